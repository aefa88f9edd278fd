"""Episodes of many turns against transformers: what was recorded is what one forward pass gives."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

from safetensors.torch import load_file  # noqa: E402
from spelling import END, ROW, SIZE, TOKENIZER  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from cosmos_core.trajectory import UNSAMPLED  # noqa: E402
from cosmos_rollout import (  # noqa: E402
    ChatRenderer,
    Conversation,
    EngineSetup,
    EpisodeLimits,
    Sampling,
    TransformersConfig,
)


class Staged:
    def __init__(self, version: int, tensors) -> None:
        self.version, self.tensors = version, tensors


class Directories:
    """A weight source over directories; version v is the v-th."""

    def __init__(self, paths) -> None:
        self._paths = paths

    def stage(self, version: int, endpoints) -> Staged:
        return Staged(version, load_file(self._paths[version] / "model.safetensors"))


class Interview:
    """Three questions; new weights come before the last."""

    tools = ()

    def __init__(self, engine) -> None:
        self._engine = engine

    async def play(self, row, chat, seed):
        await chat.reply([{"role": "user", "content": row.prompt}])
        await chat.reply([{"role": "user", "content": "and ab?"}])
        await self._engine.load_version(1, ["here"])
        await chat.reply([{"role": "tool", "content": "ok"}, {"role": "user", "content": "so?"}])
        return {"asked": 3.0}

    async def aclose(self):
        pass


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> list[Path]:
    paths = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=SIZE,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            initializer_range=0.2,
        )
        paths.append(tmp_path_factory.mktemp("models") / f"seed{seed}")
        Qwen3ForCausalLM(config).save_pretrained(paths[-1])
    return paths


async def test_every_sampled_token_has_the_logprob_of_one_pass_over_the_whole_episode(weights):
    ends = (END, *range(3, SIZE, 2))  # of many, so that a model that knows nothing ends its replies
    torch.set_num_threads(1)
    setup = EngineSetup(model_path=weights[0], weight_source=Directories(weights))
    engine = await TransformersConfig(kv="recompute").build(setup)
    try:
        conversation = Conversation(
            engine,
            ChatRenderer(TOKENIZER),
            name="e",
            sampling=Sampling(max_new_tokens=400, seed=3, stop_token_ids=ends),
            limits=EpisodeLimits(max_turns=3),
        )
        episode = await conversation.play(Interview(engine), ROW, seed=1)
    finally:
        await engine.aclose()
    assert episode.num_turns == 3
    sampled = [span.version for span in episode.versions if span.version != UNSAMPLED]
    assert sampled == [0, 0, 1]
    tokens = torch.tensor(episode.token_ids.astype(np.int64))
    tables = []
    for path in weights:
        model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        with torch.no_grad():
            tables.append(torch.log_softmax(model(tokens[None]).logits[0], dim=-1))
    versions = np.repeat(
        [span.version for span in episode.versions], [span.length for span in episode.versions]
    )
    places = np.flatnonzero(episode.trainable)
    expected = [float(tables[versions[t]][t - 1, tokens[t]]) for t in places]
    np.testing.assert_allclose(episode.logprobs[places], expected, atol=1e-4)
    others = [float(tables[1 - versions[t]][t - 1, tokens[t]]) for t in places]
    assert np.abs(episode.logprobs[places] - others).max() > 0.1  # the two weights do differ
