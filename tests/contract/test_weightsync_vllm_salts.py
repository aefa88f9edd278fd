"""When the salt of prefixes changes: while vLLM stands still, before any token of new weights."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from cosmos_weightsync.integrations.vllm import VLLMWeightClient


@dataclass
class Standing:
    """An ``AsyncLLM`` that notes which salt requests would be given at each thing it is told."""

    seen: list[tuple[str, str]] = field(default_factory=list)
    client: VLLMWeightClient | None = None
    vllm_config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=True))
    model_config = SimpleNamespace(is_multimodal_model=False)

    def note(self, told: str) -> None:
        assert self.client is not None
        self.seen.append((told, self.client.cache_salt))

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        self.note("pause")

    async def start_weight_update(self) -> None:
        self.note("start")

    async def update_weights(self, request: object) -> None:
        del request
        self.note("update")

    async def finish_weight_update(self, *, weight_version: str) -> None:
        del weight_version
        self.note("finish")

    async def resume_generation(self) -> None:
        self.note("resume")


async def test_what_is_asked_from_the_pause_on_shares_prefixes_with_the_new_weights_alone() -> None:
    """Until the pause is over tokens of the old weights come; from then on none do."""
    engine = Standing()
    engine.client = client = VLLMWeightClient(engine, kv_cache="keep", salted=True)
    before = client.cache_salt
    await client._commit(3)
    after = client.cache_salt
    assert after != before
    assert engine.seen == [
        ("pause", before),
        ("start", after),
        ("update", after),
        ("finish", after),
        ("resume", after),
    ]


def test_two_clients_of_one_engine_give_no_salt_twice() -> None:
    first, second = (VLLMWeightClient(Standing(), kv_cache="keep", salted=True) for _ in "ab")
    assert first.cache_salt != second.cache_salt
