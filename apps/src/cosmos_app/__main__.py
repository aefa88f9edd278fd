"""``python -m cosmos_app`` is ``cosmos-app``."""

from cosmos_app.cli import main
from cosmos_app.kept_modules import begin_imports


def start() -> None:
    """Run the command line in a process of its own."""
    begin_imports()  # of the command that is asked for; `guarded` ends them
    main()


if __name__ == "__main__":
    start()
