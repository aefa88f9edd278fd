"""vLLM with a model that sees, in a process that finds torchvision; writes what it measured.

python seeing_engine_process.py FOLDER FAMILY; Qwen2.5-VL is shown pictures too, others only videos.
One engine plays both policies for keys and values.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from engines_forked import may_fork
from PIL import Image
from seeing import write_pictures
from seeing_videos import Family, write_clip, write_frames
from seeing_world import CONTEXT, World, answers, compared, refusal

from cosmos_core.videos import VideoSampling, video_reference
from cosmos_rollout import (
    Chat,
    ChatRenderer,
    Conversation,
    EngineSetup,
    Episode,
    EpisodeLimits,
    GenerationRequest,
    PictureError,
    PromptRow,
    RolloutEngine,
    Sampling,
    Shown,
    VLLMConfig,
    cpu_environment,
)
from cosmos_rollout.environments.environment import opening
from cosmos_rollout.episode import single_turn
from cosmos_weightsync import WeightSender, shards_of
from cosmos_weightsync.integrations.vllm import VLLMWeightClient, engine_arguments

LONG = 600
RED = "red-56x56.png"


class Gallery:
    """Shows the row's picture, then one that an environment draws itself."""

    tools = ()

    async def play(self, row: PromptRow, chat: Chat, seed: int) -> dict[str, float]:
        await chat.reply(opening(row))
        drawn = Image.new("RGB", (56, 56), "yellow")
        await chat.reply([{"role": "user", "content": [{"type": "image", "image": drawn}]}])
        return {}

    async def aclose(self) -> None:
        pass


class EitherClient:
    """Two clients of one engine, of which ``kv`` says whose turn it is."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.kv = "keep"
        self._clients = {
            "keep": VLLMWeightClient(llm, kv_cache="keep", salted=True),
            "recompute": VLLMWeightClient(llm, kv_cache="recompute"),
        }

    @property
    def cache_salt(self) -> str:
        return self._clients[self.kv].cache_salt

    async def connect(self, endpoints: Sequence[str]) -> None:
        await self._clients[self.kv].connect(endpoints)

    async def load(self, version: int) -> Any:
        return await self._clients[self.kv].load(version)


async def episode(world: World, engine: RolloutEngine, picture: str) -> Episode:
    """Two turns, the first ended by any letter: all but special tokens."""
    tokenizer = world.processor.tokenizer
    sampling = Sampling(max_new_tokens=16, seed=3, stop_token_ids=tuple(range(7, len(tokenizer))))
    content = [{"type": "image"}, {"type": "text", "text": "?"}]
    row = PromptRow(
        prompt_id="r",
        messages=({"role": "user", "content": content},),
        images=(str(world.folder / picture),),
    )
    conversation = Conversation(
        engine, ChatRenderer(tokenizer), name="e", sampling=sampling, limits=EpisodeLimits()
    )
    return await conversation.play(Gallery(), row, 0)


async def measure_pictures(world: World, engine: RolloutEngine) -> dict[str, Any]:
    shown = {
        "sampled": [world.request(f"s{seed}", RED, seed=seed) for seed in range(4)],
        "two": [world.request("t", RED, "blue-28x56.png", RED)],
        "resized": [world.request("z", "green-100x70.png")],
        "text": [world.request("x")],
        "greedy": [world.request("g", RED, temperature=0.0)],
    }
    found: dict[str, Any] = {
        name: await compared(world, engine, requests) for name, requests in shown.items()
    }
    found["episode"] = world.episode_difference(await episode(world, engine, RED))
    plain = world.request("r", RED)
    found["refused"] = {
        "gone": await refusal(engine, world.request("r", "gone.png")),
        "unmarked": await refusal(engine, replace(plain, images=plain.images * 2)),
        "spelled": await refusal(engine, replace(plain, images=())),
        "many": await refusal(engine, world.request("r", *[RED] * 5)),
        "long": await refusal(
            engine, replace(plain, prompt_token_ids=plain.prompt_token_ids + (9,) * (CONTEXT - 30))
        ),
        "unshown": await refused_scores(engine, plain, None),
        "other": await refused_scores(engine, plain, Shown(
            marked_token_ids=plain.prompt_token_ids, images=(str(world.folder / RED),)
        )),
    }  # fmt: skip
    found["scored"] = await scored(world, engine, shown["two"][0])
    return found


class Videos:
    """References of videos; those of 112 pixels a frame are short beside their width."""

    def __init__(self, folder: Path) -> None:
        self.file = write_clip(folder / "clip.mp4", num_frames=10, fps=10, width=112, height=28)
        write_clip(folder / "large.mp4", num_frames=40, fps=10, width=100, height=70)
        self._frames = write_frames(folder, num_frames=5, width=112, height=28)
        self._folder = folder
        self.clip = self.at("clip.mp4", fps=4.0)
        self.quick = self.at(self._frames[:4], fps=4.0)
        self.slow = self.at(self._frames[:4], fps=1.0)
        self.large = self.at("large.mp4", fps=3.0)
        self.odd = self.at(self._frames, fps=0.3)
        self.single = self.at(self._frames[:1], fps=2.0)
        self.gone = self.at("gone.mp4", fps=2.0)

    def at(self, source: object, *, fps: float) -> str:
        return video_reference(source, self._folder, VideoSampling(fps=fps))


async def measure_videos(
    world: World, engine: RolloutEngine, videos: Videos, llm: Any
) -> dict[str, Any]:
    from cosmos_rollout.engines.vllm_pictures import (
        VLLMPictures,
    )  # vLLM, once its settings are there

    shown: dict[str, tuple[str, ...]] = {
        "quick": (videos.quick,),
        "slow": (videos.slow,),
        "large": (videos.large,),
        "odd": (videos.odd,),
        "several": (videos.quick, videos.clip),
        "mixed": (RED, videos.clip, "blue-28x56.png", videos.slow),
        "single": (videos.single,),
    }
    requests = {name: world.request(name, *sources) for name, sources in shown.items()}
    found: dict[str, Any] = {
        name: await compared(world, engine, [request]) for name, request in requests.items()
    }
    found["as_transformers"] = [
        name for name, request in requests.items() if world.has_transformers_positions(request)
    ]
    found["contrast"] = {
        "rate": await contrast(world, engine, videos.quick, videos.slow),
        "frames": await contrast(world, engine, videos.quick, videos.clip),
    }
    found["scored"] = await scored(world, engine, requests["mixed"])
    spelled = world.request("r", videos.quick)
    found["refused"] = {
        "gone": await refusal(engine, world.request("r", videos.gone)),
        "picture": await refusal(engine, replace(spelled, images=(str(world.folder / RED),))),
        "spelled": await refusal(engine, replace(spelled, images=())),
        "many": await refusal(engine, world.request("r", *[videos.quick] * 3)),
    }
    siblings = [world.request(f"s{seed}", videos.clip, seed=seed) for seed in range(4)]
    found["siblings"] = await compared(world, engine, siblings[:2])
    kept, evicted = VLLMPictures(llm), VLLMPictures(llm, kept_bytes=1)
    for pictures in (kept, evicted):
        await pictures.expand([siblings[0], requests["quick"]])
    videos.file.unlink()
    found["siblings"] += await compared(world, engine, siblings[2:])
    await kept.expand(siblings)
    try:
        await evicted.expand(siblings)
    except PictureError as error:
        found["refused"]["evicted"] = f"{type(error).__name__}: {error}"
    return found


async def contrast(world: World, engine: RolloutEngine, one: str, other: str) -> float:
    """How much the log-probs of a first token differ between two videos."""
    requests = [world.request("one", one), world.request("other", other)]
    samples = await answers(engine, *requests)
    first, second = (world.table(*each, 0)[0] for each in zip(requests, samples, strict=True))
    words = np.isfinite(first)
    return float(np.abs(first - second)[words].max())


async def measure_swaps(
    world: World, engine: RolloutEngine, client: EitherClient, shown: Sequence[str]
) -> dict[str, Any]:
    """Load new weights twice, in the midst of an answer about what was ``shown`` before."""
    found: dict[str, Any] = {}
    trained = world.model(0)
    sender = WeightSender(shards_of(trained))
    for version, client.kv in ((1, "keep"), (2, "recompute")):
        long = world.request(f"l{version}", *shown, seed=version, max_new_tokens=LONG)
        flying = asyncio.create_task(answers(engine, long))
        begun = engine.num_tokens_generated
        while engine.num_tokens_generated < begun + 40 and not flying.done():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        trained.load_state_dict(world.models[version % 2].state_dict())
        await asyncio.to_thread(sender.publish, version)
        await engine.load_version(version, [sender.endpoint])
        greedy = world.request(f"n{version}", *shown, temperature=0.0)
        found[f"after-{version}"] = await compared(world, engine, [greedy])
        (sample,) = await flying
        found[f"through-{version}"] = [world.difference(long, sample)]
    sender.close()
    return found


async def scored(world: World, engine: Any, request: GenerationRequest) -> float:
    """How far scores of an answer are from transformers' log-probs."""
    (sample,) = await answers(engine, request)
    episode = single_turn(request, sample, "")
    scores = await engine.score(episode.token_ids.tolist(), 3, episode.shown)
    return world.score_difference(request, sample, scores)


async def refused_scores(engine: Any, request: GenerationRequest, shown: Shown | None) -> str:
    """Return the words with which tokens are not scored."""
    try:
        await engine.score(request.prompt_token_ids, 0, shown)
    except Exception as error:  # noqa: BLE001 - which one is what is asked
        return f"{type(error).__name__}: {error}"
    return ""


async def main(folder: Path, family: Family) -> None:
    os.environ.update(cpu_environment())
    torch.set_num_threads(1)
    world = World(folder, family)
    write_pictures(folder, [(56, 56), (28, 56), (100, 70)])
    clients: list[EitherClient] = []

    def client(llm: Any, kv: str) -> EitherClient:
        clients.append(EitherClient(llm))
        return clients[-1]

    config = VLLMConfig(
        dtype="float32",
        context_length=CONTEXT,
        progress_tokens=2,
        images_per_prompt=4,
        videos_per_prompt=2,
    )
    engine = await config.build(
        EngineSetup(
            model_path=world.paths[0],
            weight_client=client,
            engine_arguments=engine_arguments(),
            may_fork=may_fork(),
        )
    )
    found: dict[str, Any] = {}
    videos = Videos(folder)
    try:
        if family == "qwen2_5_vl":
            found["pictures"] = await measure_pictures(world, engine)
        found["videos"] = await measure_videos(world, engine, videos, clients[0].llm)
        found["swaps"] = await measure_swaps(world, engine, clients[0], (RED, videos.quick))
    finally:
        await engine.aclose()
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), cast(Family, sys.argv[2])))
