"""Whether processes that are started anew could import the script that this one runs.

multiprocessing has each of them import it first, unless it forks: a script that starts processes
wherever it is imported starts none, after as many tries as there are, each of which imports all
that the script does.
"""

import sys
from pathlib import Path
from types import ModuleType

IF_MAIN = (
    "each begins by importing the script that was started: if that script runs on as it is "
    'imported, put what it runs under `if __name__ == "__main__":`'
)
_MAY_KNOW = ("__main__", "__mp_main__", "parent_process")
_NOT_IMPORTED = {"__main__", "ipython"}


def lacking_guard(main: ModuleType | None = None) -> str:
    """Return what to say of a script that cannot tell that it is imported; empty of others.

    Only what is certain is said: of a script in which none of the names occurs by which it could.

    Args:
        main: what the script runs in; this process's by default.
    """
    script = getattr(main or sys.modules["__main__"], "__file__", None)
    if script is None or Path(script).stem in _NOT_IMPORTED:
        return ""  # as multiprocessing has it
    try:
        source = Path(script).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    if any(name in source for name in _MAY_KNOW):
        return ""
    return (
        f"each would begin by importing the script that was started, {script}, which would run on "
        'as it is imported: put what it runs under `if __name__ == "__main__":`'
    )
