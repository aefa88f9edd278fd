"""A replica whose main thread gets no further ends, although its pulse goes on."""

import sys
import time
from multiprocessing.connection import Listener

import pytest
from forked_scripts import TRAINERS, Forked, warm

pytest.importorskip("diffusers")
pytest.importorskip("cosmos_weightsync")

from cosmos_app.progress_watch import ProgressWatch
from cosmos_app.supervisor import ChildSpec
from cosmos_app.wfm.disaggregated.keeping import KeptReplicas
from cosmos_app.wfm.disaggregated.pulse import StartedReplica, started_replica
from cosmos_core.config import config_to_json
from cosmos_wfm import (
    DiffusionRlConfig,
    DisaggregatedConfig,
    RolloutOrder,
    RolloutReplica,
    SamplerConfig,
    local_scorer,
    tiny_sd3_pipeline,
)

DEADLINE_S = 240.0
STALL_S = 8.0
HANGS_IN_A_PASS = """
import sys, time
from multiprocessing.connection import Client
from pathlib import Path
from cosmos_app.progress_watch import ProgressWatch
from cosmos_app.wfm.disaggregated.pulse import Pulse
from cosmos_core.config import config_from_json
from cosmos_wfm import DiffusionRlConfig, RolloutOrder, RolloutReplica

port, stall_s = int(sys.argv[2]), float(sys.argv[3])
recipe = config_from_json(DiffusionRlConfig, Path(sys.argv[1]).read_text())
order = RolloutOrder(step=0, place=0, numbers=(0, 1), version=0)
progress, hangs = ProgressWatch("replica0", stall_s), []

def note(part):
    progress.at(part)
    while hangs and part == "a pass of the denoiser":
        time.sleep(0.1)

replica = RolloutReplica(recipe, lambda pixels, prompts: [0.0] * len(prompts), on_part=note)
replica.draw(order)  # what is slow at first is not looked at
link = Client(("127.0.0.1", port), authkey=b"secret")
hangs.append(True)
with Pulse([link], stall_s, child="replica0"), progress:
    replica.draw(order)
"""
MUTE_ONCE = """
import os, sys, time
from pathlib import Path

home = Path(sys.argv[1])
if (home / "began").exists():
    (home / "pid").write_text(str(os.getpid()))
(home / "began").write_text("")
time.sleep(3600)
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    model = tmp_path_factory.mktemp("progress") / "model"
    tiny_sd3_pipeline(num_layers=1).save_pretrained(model)
    return DiffusionRlConfig(
        model=str(model),
        prompts="mock",
        output="",
        rewards={"brightness": 1.0},
        sampler=SamplerConfig(num_steps=3, height=16, width=16),
        disaggregated=DisaggregatedConfig(),
    )


def looks_until_told(progress):
    num = 0
    while not progress.look():
        num += 1
    return num


def test_a_part_may_take_as_many_looks_as_there_are_however_many_were_before_it():
    progress = ProgressWatch("replica0", 1.0)
    progress.at("loading")
    most = looks_until_told(progress)

    for part in ("one", "two", "three"):
        progress.at(part)
        assert [progress.look() for _ in range(most)] == [""] * most
    assert progress.look() == "three"
    progress.rest()
    assert [progress.look() for _ in range(10 * most)] == [""] * (10 * most)


def test_a_replica_tells_every_pass_of_the_denoiser(recipe):
    parts = []
    replica = RolloutReplica(recipe, local_scorer(recipe.rewards), on_part=parts.append)

    replica.draw(RolloutOrder(step=0, place=0, numbers=(0, 1), version=0))

    # the sampler has three steps
    passes = ["a pass of the denoiser", "decoding and rewards"] * 3
    assert parts == ["embedding prompts", *passes]


@pytest.mark.slow
def test_a_process_that_hangs_ends_although_its_pulse_goes_on(recipe, tmp_path):
    (tmp_path / "recipe.json").write_text(config_to_json(recipe))
    with Listener(("127.0.0.1", 0), authkey=b"secret") as listener:
        _, port = listener.address
        (tmp_path / "hangs.py").write_text(HANGS_IN_A_PASS)
        command = [tmp_path / "hangs.py", tmp_path / "recipe.json", port, STALL_S]
        with (tmp_path / "log").open("w") as log:
            to = log.fileno()
            hung = Forked(command, warm(TRAINERS), stdout=to, stderr=to)
        try:
            words = words_of(listener)
            assert hung.wait(DEADLINE_S) == 1
        finally:
            hung.kill()
            hung.wait(DEADLINE_S)
    said = (tmp_path / "log").read_text()
    assert (
        "a pass of the denoiser took more than 8 s, so it ends; its threads are listed above"
        in said
    )
    assert " in note\n" in said  # the trace of the thread that hangs
    assert (
        len(words) >= 3
    )  # of five in each lease, which is the stall here, and hence while it hung
    assert {started_replica(word) for word in words} == {StartedReplica("replica0", hung.pid)}


def words_of(listener):
    """Return all that a process says until it ends."""
    link, words = listener.accept(), []
    with link:
        while link.poll(DEADLINE_S):
            try:
                words.append(link.recv_bytes())
            except EOFError:
                return words
    raise AssertionError(f"it goes on; {len(words)} words were heard")


@pytest.mark.slow
def test_a_replica_that_does_not_connect_is_killed_and_one_that_is_heard_stays(tmp_path, capfd):
    spec = ChildSpec(
        name="replica0",
        argv=[sys.executable, "-c", MUTE_ONCE, str(tmp_path)],
        environment={},
        log=tmp_path / "log",
        restarts=100,
    )
    end, stall_s, heard = time.monotonic() + DEADLINE_S, 2.0, ""
    with KeptReplicas([spec], stall_s) as kept:
        kept.open()
        while (found := pid_in(tmp_path)) != heard or not heard:
            assert time.monotonic() < end
            heard = found
            if heard:
                kept.hear(StartedReplica("replica0", int(heard)))
            time.sleep(2 * stall_s if heard else 0.05)
    said = capfd.readouterr().err
    assert "did not connect in 2 s; it is killed" in said
    assert "ended: signal 9 (SIGKILL); restarted" in said


def pid_in(home):
    return (home / "pid").read_text() if (home / "pid").exists() else ""
