"""Where the ranks of a run are found: a file of each in the run's directory.

``<output>/disaggregated/rank<r>.json`` names the address for samples, that of the weights, and the
token that opens both; only its owner can read it.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from cosmos_app.errors import DataError
from cosmos_core.rundir import write_atomic

_LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a rank is found.

    Attributes:
        host: that samples are sent to.
        port: for samples.
        weights: endpoint of its weight sender.
        token: opens both.
        num_ranks: of the run.
    """

    host: str
    port: int
    weights: str
    token: str
    num_ranks: int


def write_place(output: Path, rank: int, place: Place) -> None:
    """Tell replicas where a rank is; the file is there whole or not at all."""
    directory = output / "disaggregated"
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(directory / f"rank{rank}.json", json.dumps(asdict(place)), mode=0o600)


def remove_place(output: Path, rank: int) -> None:
    """Take it away again, so that nobody looks for a run that is over."""
    (output / "disaggregated" / f"rank{rank}.json").unlink(missing_ok=True)


def read_places(output: Path, deadline_s: float) -> list[Place]:
    """Return where every rank is, in order; waits until all have told.

    Raises:
        DataError: if they have not in time; says which.
    """
    end = time.monotonic() + deadline_s
    while True:
        first = _read(output, 0)
        places = [_read(output, rank) for rank in range(first.num_ranks)] if first else [None]
        found = [place for place in places if place is not None]
        if len(found) == len(places):
            return found
        if time.monotonic() > end:
            raise DataError(
                f"{output}/disaggregated: rank {places.index(None)} of the run told no address "
                f"in {deadline_s:g} s; start 'cosmos-app wfm run' with this output"
            )
        time.sleep(_LOOK_S)


def _read(output: Path, rank: int) -> Place | None:
    try:
        text = (output / "disaggregated" / f"rank{rank}.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return Place(**json.loads(text))
