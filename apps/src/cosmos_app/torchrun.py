"""torchrun, with an exit code that says what the ranks' own said: 2 for what no restart mends.

``python -m cosmos_app.torchrun ...`` takes torchrun's arguments. It leaves ranks that were told of
Ctrl-C the time for the step in hand and its checkpoint, where torchrun kills them after 30 s: an
hour, or TORCH_ELASTIC_SHUTDOWN_TIMEOUT. Meanwhile it says who still runs; a second one stops now.
Where no launcher of ours sees the ranks, it ends those that are suspended for ten minutes, or
COSMOS_SUSPENDED_S. Ranks on one machine meet on loopback.
"""

import os
import sys

from cosmos_app.errors import REFUSED
from cosmos_app.impatience import ranks_of, watch_signals
from cosmos_app.parent import PARENT, as_parent, die_with_parent
from cosmos_app.supervisor import describe_exit
from cosmos_app.suspended import watch_children

_PATIENCE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_STEP_S = 3600


def main() -> int:
    """Start the ranks and wait for them; return the exit code."""
    os.environ.setdefault(_PATIENCE, str(_STEP_S))
    if PARENT in os.environ:  # a launcher of ours, and no script for a cluster
        die_with_parent()
    else:
        watch_children(lambda: ranks_of(os.getpid()))
    os.environ.update(as_parent())
    watch_signals(float(os.environ[_PATIENCE]))
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
    from torch.distributed.run import parse_args, run

    from cosmos_app.rendezvous import meet_on_loopback

    arguments = parse_args(None)
    meet_on_loopback(arguments)
    try:
        record(run)(arguments)
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        rank, first = error.get_first_failure()  # what it said itself is the end of the log
        sys.stderr.write(
            f"rank {rank} (pid {first.pid}) ended first: {describe_exit(first.exitcode)}\n"
        )
        return REFUSED if REFUSED in codes else 1
    except SignalException as error:  # the ranks were told, and have ended
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
