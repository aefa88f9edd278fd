"""What the SGLang engine says to its server, and in which order, before a stand-in of that."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from cosmos_rollout import (  # noqa: E402
    EngineSetup,
    GenerationRequest,
    KvPolicy,
    RolloutEngine,
    Sampling,
    SGLangConfig,
    WeightLoadError,
)

STAND_INS = Path(__file__).parents[2] / "support" / "stand_ins"
_LONG_S = 120.0


@dataclass
class Staged:
    version: int
    tensors: dict[str, Any]


class Source:
    def stage(self, version: int, endpoints: Sequence[str]) -> Staged:
        del endpoints
        return Staged(version, {"weight": torch.zeros(2)})


class Server:
    def __init__(self, folder: Path) -> None:
        self.log, self.go = folder / "log", folder / "go"
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 64}')

    def heard(self) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [json.loads(line) for line in lines]

    async def until_heard(self, path: str) -> None:
        async with asyncio.timeout(_LONG_S):
            while path not in [call["path"] for call in self.heard()]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(STAND_INS))
    monkeypatch.setenv("STAND_IN_LOG", str(server.log))
    monkeypatch.setenv("STAND_IN_GO", str(server.go))
    return server


async def start(server: Server, kv: KvPolicy = "keep") -> RolloutEngine:
    setup = EngineSetup(model_path=server.model, weight_source=Source())
    return await SGLangConfig(kv=kv, start_s=_LONG_S).build(setup)


def ask(name: str, count: int) -> GenerationRequest:
    sampling = Sampling(max_new_tokens=count)
    return GenerationRequest(request_id=name, prompt_token_ids=(5, 9), sampling=sampling)


async def lengths(engine: RolloutEngine, *requests: GenerationRequest) -> dict[str, int]:
    return {s.request_id: len(s.token_ids) async for s in engine.generate(requests)}


@pytest.mark.parametrize(
    ("kv", "mode", "flushes"), [("keep", "in_place", False), ("recompute", "retract", True)]
)
async def test_weights_are_swapped_between_a_pause_and_what_ends_it(
    server: Server, kv: KvPolicy, mode: str, flushes: bool
) -> None:
    server.go.touch()
    engine = await start(server, kv)
    try:
        await engine.load_version(1, ["here"])
    finally:
        await engine.aclose()
    pause, update, go_on = server.heard()
    assert (pause["path"], pause["mode"]) == ("/pause_generation", mode)
    assert (update["path"], update["flush_cache"]) == ("/update_weights_from_disk", flushes)
    assert update["weight_version"] == "1"
    assert go_on["path"] == "/continue_generation"


async def test_what_is_asked_while_weights_change_shares_no_keys_with_what_was_before(
    server: Server,
) -> None:
    engine = await start(server)
    try:
        await lengths(engine, ask("before", 2))
        loading = asyncio.create_task(engine.load_version(1, ["here"]))
        await server.until_heard("/update_weights_from_disk")
        during = asyncio.create_task(lengths(engine, ask("during", 2)))
        async with asyncio.timeout(_LONG_S):
            while len(server.heard()) < 4:  # noqa: ASYNC110 - the server hears of it
                await asyncio.sleep(0.01)
        server.go.touch()
        await loading
        assert await during == {"during": 2}
        await lengths(engine, ask("after", 2))
    finally:
        await engine.aclose()
    asked = {h["rid"].partition("#")[0]: h["extra_key"] for h in server.heard() if "rid" in h}
    assert asked["before"] != asked["during"] == asked["after"]


async def test_weights_that_the_server_refuses_leave_it_going_on(server: Server) -> None:
    server.go.touch()
    engine = await start(server)
    try:
        with pytest.raises(WeightLoadError, match="no room for it"):
            await engine.load_version(13, ["here"])
        assert engine.weight_version == 0
        assert await lengths(engine, ask("r", 3)) == {"r": 3}
        report = await engine.load_version(14, ["here"])
        assert report.version == engine.weight_version == 14
    finally:
        await engine.aclose()
