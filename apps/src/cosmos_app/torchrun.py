"""torchrun, with an exit code that says what the ranks' own said: 2 for what no restart mends.

``python -m cosmos_app.torchrun ...`` takes torchrun's arguments.
"""

import sys

from cosmos_app.errors import REFUSED


def main() -> int:
    """Start the ranks and wait for them; return the exit code."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun()
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        sys.stderr.write(f"{error}\n")
        return REFUSED if REFUSED in codes else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
