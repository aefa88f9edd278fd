"""Rewards in worker processes beside a real vLLM, of which no token waits for them."""

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from engines_forked import engine_environment, may_fork  # noqa: E402
from number_tokens import Numbers  # noqa: E402
from paced_steps import PACED, Steps  # noqa: E402
from tiny_models import random_qwen3  # noqa: E402

from cosmos_core.messages import Generate, GroupFinished, GroupId  # noqa: E402
from cosmos_core.trajectory import Trajectory  # noqa: E402
from cosmos_rollout import (  # noqa: E402
    EngineSetup,
    Producer,
    ProducerConfig,
    ProducerParts,
    PromptRow,
    PromptSet,
    PythonReward,
    RewardPoolConfig,
    Sampling,
    VLLMConfig,
)

# "default": vLLM's own warnings are no errors in a process that is forked from this one either
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
REWARD_S = 0.6
REWARD = f"""
import time
from pathlib import Path

def slow(sample):
    begun = time.monotonic()
    time.sleep({REWARD_S})
    with (Path(__file__).parent / "scored.txt").open("a") as file:
        file.write(f"{{begun}} {{time.monotonic()}}\\n")
    return 0.5
"""


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Steps:
    """Those of an engine that is made with them in the environment."""
    steps = Steps(tmp_path)
    for name, value in {**engine_environment(), **steps.environment}.items():
        monkeypatch.setenv(name, value)
    torch.set_num_threads(1)
    return steps


async def test_tokens_are_sampled_while_rewards_of_others_are_computed(
    steps: Steps, tmp_path: Path
) -> None:
    """One group after another is generated, and each is scored while the next one is."""
    random_qwen3(0, vocabulary=64, context=256).save_pretrained(tmp_path / "model")
    (tmp_path / "mine.py").write_text(REWARD)
    config = VLLMConfig(dtype="float32", context_length=256, kv_cache_mib=16)
    setup = EngineSetup(
        model_path=tmp_path / "model",
        engine_arguments={"logits_processors": [PACED]},
        may_fork=may_fork(),
    )
    reward = PythonReward(function=f"{tmp_path / 'mine.py'}:slow")
    pool = RewardPoolConfig(rewards=(reward,), num_workers=2).build()
    engine, stored = await config.build(setup), []

    async def publish(trajectories: list[Trajectory]) -> list[str]:
        stored.extend(trajectories)
        return [f"{t.group}/{t.sibling}" for t in trajectories]

    rows = [PromptRow(prompt_id=str(i), prompt=f"{i + 1} 7 21") for i in range(3)]
    parts = ProducerParts(
        engine=engine,
        prompts={"train": PromptSet(rows, order="file")},
        tokenizer=Numbers(),
        scorer=pool,
        publish=publish,
    )
    chosen = ProducerConfig(slots=1, scoring=2, sampling=Sampling(max_new_tokens=80))
    producer = Producer(parts, chosen, replica="rollout-0")
    try:
        await pool.start()
        steps.pace(0.02)  # a group takes longer than its rewards
        for ordinal in range(3):
            group = GroupId(source="train", round=0, ordinal=ordinal)
            producer.submit(Generate(group=group, attempt=0, num_samples=2))
        async with asyncio.timeout(120):
            events = producer.events()
            finished = [await anext(events) for _ in range(3)]
    finally:
        await producer.aclose()
        await engine.aclose()
        await pool.aclose()
    assert [type(event) for event in finished] == [GroupFinished] * 3
    assert [trajectory.rewards["slow"] for trajectory in stored] == [0.5] * 6
    lines = (tmp_path / "scored.txt").read_text().splitlines()
    scored = sorted(tuple(map(float, line.split())) for line in lines)
    assert len(scored) == 6
    sampled = steps.sampled()
    for begun, ended in scored[:4]:  # nothing is left to be sampled beside the last
        assert sum(begun < at < ended for at in sampled) > 5
