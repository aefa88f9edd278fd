"""An engine that sleeps: its memory is free, and its tokens are those of one that never slept."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402
from tiny_models import random_qwen3  # noqa: E402

from cosmos_core.trajectory import VersionSpan  # noqa: E402
from cosmos_rollout import (  # noqa: E402
    EngineError,
    EnginePausedError,
    EngineSetup,
    GeneratedSample,
    GenerationRequest,
    InProcessEngine,
    Sampling,
    TransformersConfig,
)

PROMPT, LENGTH = (5, 9, 33, 12, 7), 40


class Staged:
    def __init__(self, version: int, path: Path) -> None:
        self.version, self.tensors = version, load_file(path / "model.safetensors")


class Directory:
    """Serves one directory as any version."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def stage(self, version: int, endpoints: Sequence[str]) -> Staged:
        return Staged(version, self._path)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_qwen3(0, vocabulary=64, context=128, tied=True).save_pretrained(path)
    return path


async def build(model: Path, *, with_source: bool = True) -> InProcessEngine:
    source = Directory(model) if with_source else None
    engine = await TransformersConfig().build(EngineSetup(model_path=model, weight_source=source))
    assert isinstance(engine, InProcessEngine)
    return engine


def ask(seed: int) -> GenerationRequest:
    sampling = Sampling(temperature=0.8, max_new_tokens=LENGTH, seed=seed)
    return GenerationRequest(request_id=f"r{seed}", prompt_token_ids=PROMPT, sampling=sampling)


async def generate(engine: InProcessEngine) -> list[GeneratedSample]:
    async with aclosing(engine.generate([ask(seed) for seed in range(2)])) as samples:
        found = [sample async for sample in samples]
    return sorted(found, key=lambda sample: sample.request_id)


def weights_bytes(engine: InProcessEngine) -> int:
    decoder = engine._decoder
    return sum(p.numel() * p.element_size() for p in decoder._model.parameters())


@pytest.mark.parametrize("weights", ["keep", "discard"])
async def test_tokens_are_those_of_an_engine_that_never_slept(model: Path, weights):
    awake, sleepy = await build(model), await build(model)
    expected = await generate(awake)
    whole = weights_bytes(sleepy)
    generating = asyncio.create_task(generate(sleepy))
    while sleepy.num_tokens_generated < 10:  # noqa: ASYNC110 - an engine has no event for it
        await asyncio.sleep(0.001)
    await sleepy.sleep(weights)
    await sleepy.sleep(weights)  # idempotent
    slept_at = sleepy.num_tokens_generated
    assert weights_bytes(sleepy) == (whole if weights == "keep" else 0)
    with pytest.raises(EnginePausedError, match="wake the engine"):
        await sleepy.load_version(3, [])
    await asyncio.sleep(0.05)
    assert sleepy.num_tokens_generated == slept_at < 2 * LENGTH
    await sleepy.wake()
    await sleepy.wake()
    assert weights_bytes(sleepy) == whole
    version = 0
    if weights == "discard":  # nothing is sampled from weights that are not there
        await asyncio.sleep(0.05)
        assert sleepy.num_tokens_generated == slept_at
        version = (await sleepy.load_version(3, [])).version
    for one, other in zip(expected, await generating, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert other.versions[-1].version == version
    assert (await generate(sleepy))[0].versions == (VersionSpan(version, LENGTH),)
    await awake.aclose()
    await sleepy.aclose()


async def test_weights_that_nobody_has_are_not_given_up(model: Path):
    engine = await build(model, with_source=False)
    with pytest.raises(EngineError, match="need a weight source"):
        await engine.sleep("discard")
    await engine.sleep("keep")
    await asyncio.wait_for(engine.aclose(), 30)  # also one that sleeps
