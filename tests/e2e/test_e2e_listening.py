"""Nothing of a run on one machine listens where other machines could reach it."""

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from listeners import Listener, listeners
from processes import descendants, naming
from real_runs import SMALL, SUMS, Run, Runner
from reward_services import serving

from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SHORT = (*SMALL, "trainer.steps=2", "validation.before=false", "validation.after=false")
LENGTH = "reward.rewards=[{kind='length', target=0, limit=32}]"
PICTURES = """
kind = "wfm_rl"
model = "{folder}/model"
prompts = "{folder}/prompts.txt"
num_steps = 2
groups_per_step = 2
samples_per_group = 2
rewards = {{ brightness = 1.0 }}
sampler = {{ num_steps = 1, height = 16, width = 16 }}
tuning = {{ kind = "lora", rank = 2, alpha = 4 }}
"""


@pytest.fixture(autouse=True)
def no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COSMOS_HOST", raising=False)


def processes_of(run: Run) -> set[int]:
    """Return those that name its directory, with all that they have started."""
    named = {run.process.pid, *naming(str(run.output))} - {os.getpid()}
    return named.union(*map(descendants, named))


def seen_until_the_end(run: Run, beside: Sequence[int] = ()) -> set[Listener]:
    """Return what a run and processes beside it listened on at any time."""
    seen = set[Listener]()
    deadline = time.monotonic() + 300.0
    while run.process.poll() is None and time.monotonic() < deadline:
        seen |= listeners(processes_of(run).union(beside, *map(descendants, beside)))
        time.sleep(0.2)
    assert run.finish(10.0) == 0, run.logs()
    return seen


def assert_on_loopback(seen: set[Listener], who: Sequence[str]) -> None:
    told = [f"{each.address}:{each.port} {each.process}" for each in seen]
    for words in who:
        assert any(words in each for each in told), (words, told)
    assert [each for each in seen if not each.address.is_loopback] == []


@pytest.mark.parametrize(
    ("overrides", "who"),
    [
        pytest.param(
            ["policy.ranks=2"],
            # the store of torchrun, and what ranks have for sums and weights
            ["redis-server", "cosmos_app.torchrun", "cosmos_app policy", "cosmos_app dashboard"],
            id="ranks",
        ),
        pytest.param(
            ["policy.replicas=2", "elastic.lease_s=5"],
            ["redis-server", "meeting", "policy-0", "policy-1"],
            id="elastic",
        ),
        pytest.param(
            ["rollout.engine.kind=vllm", "rollout.engine.tensor_parallel=2"],
            ["redis-server", "VLLM"],  # its workers meet at a store
            id="vllm",
        ),
    ],
)
def test_whatever_a_run_listens_on_is_loopback(
    runner: Runner, overrides: list[str], who: list[str]
) -> None:
    if "elastic.lease_s=5" in overrides:
        pytest.importorskip("torchft")
    if "rollout.engine.kind=vllm" in overrides:
        pytest.importorskip("vllm")
    run = runner.start(*SHORT, *overrides)
    assert_on_loopback(seen_until_the_end(run), who)


def test_so_is_what_scores_its_samples(runner: Runner) -> None:
    """A teacher, and a reward service with settings of its own."""
    size = TinyModelConfig(num_layers=1, hidden_size=32, num_heads=2)
    for seed, name in enumerate(("student", "teacher")):
        build_tiny_model(runner.folder / name, ["0123456789+= "], size, seed)
    with serving(runner.folder / "service", str(SUMS), LENGTH) as service:
        asked = f"{{kind='service', url='{service.url}', key_file='{service.key_file}'}}"
        run = runner.start(
            *SHORT, f"model.path={runner.folder}/student",
            f"model.teacher={runner.folder}/teacher", "algorithm.kind=on_policy_distillation",
            "teacher.replicas=1", "teacher.engine.kind=transformers",
            f"reward.rewards=[{asked}]",
        )  # fmt: skip
        seen = seen_until_the_end(run, [service.process.pid])
        assert service.figure("cosmos_reward_samples_total") >= 2 * 8 * 4
    assert_on_loopback(seen, ["cosmos_app teacher", "cosmos_app reward-service"])


def test_so_is_what_a_run_of_a_world_model_listens_on(runner: Runner, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    from cosmos_wfm import tiny_sd3_pipeline

    tiny_sd3_pipeline().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a red square\na blue disc\n")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(PICTURES.format(folder=tmp_path))
    assert_on_loopback(seen_until_the_end(runner.start(recipe=recipe)), ["cosmos_app dashboard"])


def test_a_socket_on_all_interfaces_would_be_seen() -> None:
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        port = everywhere.getsockname()[1]
        found = {str(each.address) for each in listeners([os.getpid()]) if each.port == port}
    assert found == {"0.0.0.0"}
