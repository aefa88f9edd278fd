"""What is shown next is made in a thread: in order, within its room, and never in vain for long."""

import time
from threading import Event, current_thread, main_thread

import pytest
import torch
from forked_scripts import TRAINERS, Forked, warm
from torch import Tensor

from cosmos_parallel.pictures_ahead import PicturesAhead

SIZE = 4  # bytes of what is made of a reference


class Maker:
    """Makes a tensor of one element, when it may; notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.begun, self.may = Event(), Event()
        self.may.set()

    def __call__(self, reference: str) -> dict[str, Tensor]:
        assert current_thread() is not main_thread()
        self.asked.append(reference)
        self.begun.set()
        assert self.may.wait(10)
        if reference == "broken":
            raise ValueError(reference)
        return {"it": torch.tensor([float(reference)])}


def eventually(condition) -> bool:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


def taken(ahead: PicturesAhead, reference: str) -> float | None:
    made = ahead.take(reference)
    return None if made is None else made["it"].item()


def test_what_is_made_is_taken_once():
    make = Maker()
    ahead = PicturesAhead(make, 100 * SIZE)
    assert taken(ahead, "1") is None
    ahead.begin(["1", "2", "1", "3"])
    assert eventually(lambda: make.asked == ["1", "2", "3"])
    assert [taken(ahead, name) for name in ("2", "1", "3")] == [2.0, 1.0, 3.0]
    assert [taken(ahead, name) for name in ("2", "1", "3")] == [None] * 3
    ahead.begin(["4"])  # a thread that had ended
    assert eventually(lambda: make.asked[3:] == ["4"])
    assert taken(ahead, "4") == 4.0


def test_who_wants_what_is_under_way_waits_and_what_is_not_begun_makes_it():
    make = Maker()
    make.may.clear()
    ahead = PicturesAhead(make, 100 * SIZE)
    ahead.begin(["1", "2", "3"])
    assert make.begun.wait(10)
    assert ahead.take("2") is None  # and nobody else makes it either
    make.may.set()
    assert taken(ahead, "1") == 1.0
    assert eventually(lambda: len(make.asked) == 2)
    assert make.asked == ["1", "3"]


def test_no_more_is_made_than_there_is_room_for():
    make = Maker()
    ahead = PicturesAhead(make, 2 * SIZE)
    ahead.begin(["1", "2", "3", "4"])
    assert eventually(lambda: make.asked == ["1", "2"])
    time.sleep(0.05)
    assert make.asked == ["1", "2"]
    assert taken(ahead, "1") == 1.0
    assert eventually(lambda: make.asked == ["1", "2", "3"])


def test_what_is_no_longer_wanted_is_forgotten():
    make = Maker()
    ahead = PicturesAhead(make, 2 * SIZE)
    ahead.begin(["1", "2"])
    assert eventually(lambda: make.asked == ["1", "2"])
    ahead.begin(["2", "3"])
    assert eventually(lambda: make.asked == ["1", "2", "3"])
    assert [taken(ahead, name) for name in ("1", "2", "3")] == [None, 2.0, 3.0]


def test_what_cannot_be_made_is_left_to_who_wants_it():
    make = Maker()
    ahead = PicturesAhead(make, 100 * SIZE)
    ahead.begin(["broken", "1"])
    assert eventually(lambda: make.asked == ["broken", "1"])
    assert [taken(ahead, name) for name in ("broken", "1")] == [None, 1.0]


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)"])
def test_a_process_ends_with_the_picture_under_way(ending, tmp_path):
    program = f"""
import time
from cosmos_parallel.pictures_ahead import PicturesAhead

def make(name):
    print(name, flush=True)
    time.sleep(0.5)
    return {{}}

PicturesAhead(make, 1).begin([str(number) for number in range(1000)])
time.sleep(0.1)
{ending}
"""
    (tmp_path / "program.py").write_text(program)
    process = Forked([tmp_path / "program.py"], warm(TRAINERS))
    said, _ = process.communicate(timeout=60)
    assert process.returncode == (3 if ending else 0)
    assert said.split() == ["0"]
