"""Replicas of a run are forked from processes that import for them, also after a death."""

import os
import signal

import pytest
from processes import descendants, image_of, parent_of, title_of
from real_runs import SMALL, Run, Runner

IMPORTS = "cosmos-app: imports what replicas share"
VLLM = ("rollout.engine.kind=vllm", "rollout.engine.kv_cache_mib=16")
SETTINGS = {"transformers": (), "on cuda": ("rollout.engine.device=cuda",), "vllm": VLLM}


def is_back(run: Run, dead: int) -> bool:
    return any(pid != dead for pid in run.children("rollout-0"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", ["transformers", pytest.param("on cuda", marks=pytest.mark.gpu), "vllm"]
)
def test_replicas_are_forked_at_first_and_after_a_death(runner: Runner, engine: str) -> None:
    runner.forks = False  # the launcher is not
    run = runner.start(*SMALL, *SETTINGS[engine], "trainer.steps=100000")
    run.wait_for(lambda: run.steps_done() >= 1)
    first = run.child("rollout-0")
    forkers = [parent_of(run.child("policy-0")), parent_of(first)]
    assert [title_of(pid) for pid in forkers] == [IMPORTS, IMPORTS]
    assert len(set(forkers)) == (2 if engine == "vllm" else 1)  # it changes who trains
    if engine == "vllm":
        cores = [pid for pid in descendants(first) if "EngineCore" in title_of(pid)]
        assert [image_of(pid) for pid in cores] == [image_of(first)]
    os.kill(first, signal.SIGKILL)
    run.wait_for(lambda: is_back(run, first))
    before = run.steps_done()
    run.wait_for(lambda: run.steps_done() >= before + 2)
    assert title_of(parent_of(run.child("rollout-0"))) == IMPORTS
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 3
    died = [(incident["name"], incident["outcome"]) for incident in run.report["incidents"]]
    assert died == [("rollout-0", "restarted")]
