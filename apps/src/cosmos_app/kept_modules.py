"""Imports of what a process keeps to its end, without looking for garbage in it.

Torch and what stands on it are hundreds of thousands of objects, none of them garbage. Python's
collector goes through all of them again and again while they are made, and once more at exit.
"""

import gc


def begin_imports() -> None:
    """Turn the collector off; called first in a process that is ours from its start to its end."""
    gc.disable()


def end_imports() -> None:
    """Turn the collector on again, and never have it look at what is there now.

    Of no effect where it is on: in somebody else's process, which decides for itself.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
