"""Replicas keep their lease while they get further, and end themselves when they do not."""

import asyncio
import contextlib
import os
from dataclasses import replace

import pytest
from forked_scripts import TRAINERS, Forked, warm

pytest.importorskip("cosmos_algos")
from cosmos_app.patience import patience_s, silence_s
from cosmos_app.recipe import Recipe, controller_config
from cosmos_app.roles.lease import Standing, keep_lease
from cosmos_core.messages import Progress

GETS_STUCK = """
import asyncio, sys, time
from cosmos_app.roles.lease import Standing, keep_lease

class Channel:
    async def send(self, event):
        print("renewed", flush=True)

def engine_that_hangs():
    time.sleep(3600)

async def main():
    loop = asyncio.get_running_loop()
    if sys.argv[1] == "loop":
        loop.call_later(0.5, engine_that_hangs)
    busy_from = loop.time() + 0.5
    standing = lambda: Standing(1, is_busy=loop.time() > busy_from)
    await keep_lease(Channel(), "rollout-7", standing, 2.0, pulse_s=0.05)

asyncio.run(main())
"""


WRITES = """
import time
from cosmos_app.recipe import LaunchConfig
from cosmos_app.roles.lease import watch_saving

launch = LaunchConfig(save_s=1.0)
with watch_saving("policy-3", launch, "s3://quick/run"):
    pass
time.sleep(2.0)
print("it may rest", flush=True)
with watch_saving("policy-3", launch, "s3://slow/run"):
    time.sleep(3600)
"""


HANGS = """
import time
from cosmos_app.progress_watch import ProgressWatch

with ProgressWatch("policy-3", 0.5) as watch:
    watch.at("all it does")
    time.sleep(3600)
"""


LEAVES = """
import time
from cosmos_app.roles.ranks import leave_ranks

leave_ranks("policy-0", end_s=1.0)
time.sleep(1.5)
print("left", flush=True)
leave_ranks("policy-1", lambda: time.sleep(3600), end_s=1.0)
"""


def run(folder, program, *arguments):
    """Return how a program ends, what it tells, and what it says as an error."""
    script, errors = folder / "program.py", folder / "errors"
    script.write_text(program)
    with errors.open("wb") as log:
        process = Forked([script, *arguments], warm(TRAINERS), stderr=log.fileno())
        told, _ = process.communicate(timeout=60)
    return process.returncode, told, errors.read_text()


class Channel:
    def __init__(self):
        self.counts = []

    async def send(self, event):
        assert isinstance(event, Progress)
        self.counts.append(event.count)


async def renewals(standings):
    """Return the counts that are sent at each of these looks, one after the other."""
    channel, left = Channel(), iter(standings)

    def standing():
        try:
            return next(left)
        except StopIteration:
            raise asyncio.CancelledError from None

    with contextlib.suppress(asyncio.CancelledError):
        await keep_lease(channel, "rollout-0", standing, 60.0, pulse_s=0.0)
    return channel.counts


async def test_a_lease_is_renewed_by_progress_and_where_there_is_nothing_to_do():
    looks = [Standing(5, is_busy=True), Standing(5, is_busy=True), Standing(6, is_busy=True)]
    assert await renewals(looks) == [5, 6]
    looks = [Standing(6, is_busy=False), Standing(6, is_busy=False), Standing(6, is_busy=True)]
    assert await renewals(looks) == [6, 6]


def test_a_launcher_that_looks_is_sooner_than_the_replica_itself():
    recipe = Recipe()
    assert silence_s(recipe) == recipe.bus.lease_s + (recipe.bus.lease_s + patience_s(recipe))


@pytest.mark.parametrize("what", ["loop", "engine"])
def test_who_hangs_ends_with_the_stacks_of_its_threads(what, tmp_path):
    code, told, said = run(tmp_path, GETS_STUCK, what)
    assert code == 1
    assert "renewed\n" in told
    assert (
        "rollout-7: what it was given took more than 2 s, so it ends; its threads are listed above"
        in said
    )
    assert ("in engine_that_hangs" in said) == (what == "loop")


def test_who_writes_for_too_long_ends_and_names_the_place(tmp_path):
    code, told, said = run(tmp_path, WRITES)
    assert (code, told) == (1, "it may rest\n")
    assert (
        "policy-3: writing to s3://slow/run (launch.save_s) took more than 1 s, so it ends" in said
    )
    assert "quick" not in said


def test_a_rank_that_never_leaves_its_process_groups_ends_and_says_so(tmp_path):
    code, told, said = run(tmp_path, LEAVES)
    assert (code, told) == (1, "left\n")
    assert "policy-1: leaving its process groups took more than 1 s, so it ends" in said
    assert "policy-0" not in said


def test_who_hangs_ends_even_if_its_log_takes_no_words(tmp_path):
    """As where the log is in the file system that is gone; a pipe that is full blocks as well."""
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(1 << 12))
        os.set_blocking(writer, True)
        (tmp_path / "hangs.py").write_text(HANGS)
        process = Forked([tmp_path / "hangs.py"], warm(TRAINERS), stderr=writer)
        process.communicate(timeout=60)
    finally:
        os.close(reader)
        os.close(writer)
    assert process.returncode == 1


def test_a_replica_of_a_run_is_dead_after_thirty_silent_seconds_unless_a_recipe_says_otherwise():
    recipe = Recipe()
    assert recipe.bus.lease_s == 30.0
    assert controller_config(recipe, 0).lease_s == 30.0
    longer = replace(recipe, bus=replace(recipe.bus, lease_s=400.0))
    assert controller_config(longer, 0).lease_s == 400.0
    assert controller_config(longer, 0).first_lease_s == 400.0
