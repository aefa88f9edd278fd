"""The reference scorer, against a forward pass of its own in double precision."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tiny_models import random_qwen3  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from cosmos_rollout import (  # noqa: E402
    EmptyPromptError,
    EngineClosedError,
    EngineSetup,
    NoPicturesError,
    PromptTooLongError,
    Shown,
    TokenRangeError,
    TransformersConfig,
)

SIZE, CONTEXT = 64, 16
TOKENS = (5, 9, 33, 12, 7, 60, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_qwen3(0, vocabulary=SIZE, context=CONTEXT).save_pretrained(path)
    return path


async def test_scores_are_those_of_a_pass_over_each_prefix(model: Path):
    scorer = await TransformersConfig().build_scorer(EngineSetup(model_path=model))
    assert scorer.context_length == CONTEXT
    scores = await scorer.score(TOKENS, 3)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    assert scores.logprobs[0] == 0.0
    assert not scores.top_logprobs[0].any()
    for place in range(1, len(TOKENS)):
        with torch.no_grad():
            row = network(torch.tensor([TOKENS[:place]])).logits[0, -1].log_softmax(-1).numpy()
        best = np.argsort(-row)[:3]
        np.testing.assert_allclose(scores.logprobs[place], row[TOKENS[place]], atol=1e-5)
        np.testing.assert_allclose(scores.top_logprobs[place], row[best], atol=1e-5)
        assert scores.top_token_ids[place].tolist() == best.tolist()
    assert (await scorer.score((5,), 0)).logprobs.tolist() == [0.0]
    await scorer.aclose()
    with pytest.raises(EngineClosedError):
        await scorer.score(TOKENS, 0)


async def test_what_cannot_be_scored_is_said_before_the_pass(model: Path):
    scorer = await TransformersConfig().build_scorer(EngineSetup(model_path=model))
    assert len((await scorer.score([1] * CONTEXT, 0)).logprobs) == CONTEXT
    with pytest.raises(PromptTooLongError):
        await scorer.score([1] * (CONTEXT + 1), 0)
    with pytest.raises(EmptyPromptError):
        await scorer.score([], 0)
    with pytest.raises(TokenRangeError, match="64 is outside"):
        await scorer.score([1, SIZE], 0)
    with pytest.raises(NoPicturesError, match="1 pictures or videos among tokens to score"):
        await scorer.score([1, 2], 0, Shown(marked_token_ids=(1,), images=("red.png",)))
    await scorer.aclose()
