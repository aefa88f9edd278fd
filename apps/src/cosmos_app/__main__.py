"""``python -m cosmos_app`` is ``cosmos-app``."""

from cosmos_app.kept_modules import begin_imports
from cosmos_app.leaving import leaving
from cosmos_app.stop_signals import leave_on_interrupt


def start() -> None:
    """Run the command line in a process of its own."""
    with leaving():
        begin_imports()  # of the command that is asked for; `guarded` ends them
        leave_on_interrupt()
        from cosmos_app.cli import main

        main()


if __name__ == "__main__":
    start()
