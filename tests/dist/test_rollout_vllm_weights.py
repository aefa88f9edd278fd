"""The real thing in one process tree: a producer over vLLM, weights pushed while groups generate.

The sender holds a model with tied embeddings, the case that a naive reload gets wrong on CPU.
"""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
pytest.importorskip("cosmos_weightsync")

from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from cosmos_core.messages import (  # noqa: E402
    Generate,
    GroupFinished,
    GroupId,
    LoadVersion,
    VersionLoaded,
)
from cosmos_rollout import (  # noqa: E402
    EngineSetup,
    Producer,
    ProducerConfig,
    ProducerParts,
    PromptRow,
    PromptSet,
    Sampling,
    Scored,
    VLLMConfig,
    cpu_environment,
)
from cosmos_weightsync import WeightSender, shards_of  # noqa: E402
from cosmos_weightsync.integrations.vllm import (  # noqa: E402
    VLLMWeightClient,
    engine_arguments,
)

pytestmark = pytest.mark.slow
NUM_NEW = 250


class Numbers:
    """A tokenizer of numbers separated by blanks."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [int(number) for number in text.split()]

    def decode(self, token_ids, *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))

    def apply_chat_template(self, conversation, *, add_generation_prompt: bool, tokenize: bool):
        return conversation[-1]["content"]


class OneForAll:
    """Scores every sample 1."""

    async def score(self, sample):
        return Scored(rewards={"one": 1.0}, total=1.0)


def build(seed: int):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture
def environment():
    before = dict(os.environ)
    os.environ.update(cpu_environment())
    torch.set_num_threads(1)
    yield
    os.environ.clear()
    os.environ.update(before)


@torch.no_grad()
def reference(models, trajectory) -> np.ndarray:
    """Log-prob of every token after the first, under the model of the version that sampled it."""
    ids = torch.tensor(trajectory.token_ids[None].astype(np.int64))
    rows = [torch.log_softmax(model(ids).logits[0, :-1], dim=-1) for model in models]
    picked = torch.stack([row.gather(1, ids[0, 1:, None])[:, 0] for row in rows]).numpy()
    version = np.maximum(trajectory.version_of_each_step()[1:], 0)
    return picked[version, np.arange(len(version))]


async def test_weights_pushed_while_groups_generate_are_exact_to_the_token(environment, tmp_path):
    old, new = build(0), build(1)
    path = Path(tmp_path) / "model"
    old.save_pretrained(path)
    trained = build(0)
    sender = WeightSender(shards_of(trained))
    config = VLLMConfig(dtype="float32", context_length=512, kv="recompute", progress_tokens=2)
    engine = await config.build(
        EngineSetup(
            model_path=path,
            weight_client=lambda llm, kv: VLLMWeightClient(llm, kv_cache=kv),
            engine_arguments=engine_arguments(),
        )
    )
    stored = []

    async def publish(trajectories):
        stored.extend(trajectories)
        return [f"{t.group}/{t.sibling}" for t in trajectories]

    rows = [PromptRow(prompt_id=str(i), prompt=f"{i + 1} 7 21 {i + 3}") for i in range(3)]
    producer = Producer(
        ProducerParts(
            engine=engine,
            prompts={"train": PromptSet(rows, order="file")},
            tokenizer=Numbers(),
            scorer=OneForAll(),
            publish=publish,
        ),
        ProducerConfig(slots=3, sampling=Sampling(max_new_tokens=NUM_NEW, seed=2**40)),
        replica="rollout-0",
    )
    try:
        for ordinal in range(3):
            group = GroupId(source="train", round=0, ordinal=ordinal)
            producer.submit(Generate(group=group, attempt=0, num_samples=4))
        async with asyncio.timeout(120):
            while engine.num_tokens_generated < 200:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.001)
            trained.load_state_dict(new.state_dict())
            await asyncio.to_thread(sender.publish, 1)
            loaded = await producer.load(LoadVersion(version=1, endpoints=(sender.endpoint,)))
            assert isinstance(loaded, VersionLoaded), loaded
            stream = producer.events()
            events = [await anext(stream) for _ in range(3)]
    finally:
        await producer.aclose()
        await engine.aclose()
        sender.close()
    assert all(isinstance(event, GroupFinished) for event in events)
    assert loaded.version == engine.weight_version == 1
    assert loaded.stall_s > 0.0
    assert len(stored) == 12
    for trajectory in stored:
        assert (trajectory.oldest_version, trajectory.newest_version) == (0, 1)
        expected = reference((old, new), trajectory)
        sampled = trajectory.trainable[1:]
        np.testing.assert_allclose(trajectory.logprobs[1:][sampled], expected[sampled], atol=1e-3)
    answers = {tuple(t.token_ids.tolist()) for t in stored}
    assert len(answers) == 12  # siblings draw from seeds of their own
