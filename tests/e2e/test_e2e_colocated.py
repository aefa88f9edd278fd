"""Policy and rollouts on one set of devices: a real run whose engine sleeps while it trains."""

import pytest
from real_runs import SMALL, Run, Runner, assert_balanced

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 3
VLLM = (
    "rollout.engine.kind=vllm",
    "rollout.engine.kv_cache_mib=256",
    "rollout.engine.gpu_memory_share=0.3",
    "rollout.engine.compiled=no",
)
DIVIDED = ("policy.ranks=2", "rollout.engine.tensor_parallel=2")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def losses(run: Run) -> list[float]:
    return [record["values"]["loss"] for record in run.metrics("policy")]


@pytest.mark.parametrize(
    ("engine", "keeping", "forks"),
    [
        pytest.param((), (), True, id="transformers"),
        pytest.param(VLLM, DIVIDED, True, id="vllm"),
        # what is forked for all tests has an environment for processors
        pytest.param(VLLM, (), False, marks=pytest.mark.gpu, id="vllm on cuda"),
    ],
)
def test_a_run_that_takes_turns_is_the_run_that_does_not(
    engine: tuple[str, ...], keeping: tuple[str, ...], forks: bool, runner: Runner
) -> None:
    """Whether weights are given up or kept to sleep, by one process or several of each side."""
    runner.forks = forks
    same = (*SMALL, *engine, f"trainer.steps={STEPS}", "staleness.depth=0", "staleness.bound=0",
            "trainer.groups_per_step=4", "algorithm.objective.entropy_coefficient=0.5")  # fmt: skip
    apart = runner.complete(*same, name="apart")
    assert len(losses(apart)) == STEPS
    for how, settings in {"discard": (), "keep": keeping}.items():
        shared = runner.complete(*same, *settings, f"rollout.colocate={how}", name=how)
        assert_balanced(shared.report["books"])
        assert losses(shared) == pytest.approx(losses(apart), rel=1e-4, abs=1e-6)
        slept = [r["values"] for r in shared.metrics("rollout") if "sleep_s" in r["values"]]
        woke = [r["values"] for r in shared.metrics("rollout") if "wake_s" in r["values"]]
        assert len(slept) >= STEPS
        assert len(woke) >= STEPS
