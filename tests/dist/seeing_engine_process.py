"""vLLM with a model that sees, in a process that finds torchvision; writes what it measured.

What the log-probs have to be comes from transformers, which cuts up the same pictures with the same
processor and knows nothing of engines. One engine plays both policies for keys and values.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from seeing import write_pictures, write_seeing_model
from transformers import AutoModelForImageTextToText, AutoProcessor

from cosmos_core.images import read_image
from cosmos_rollout import (
    Chat,
    ChatRenderer,
    Conversation,
    EngineSetup,
    Episode,
    EpisodeLimits,
    GeneratedSample,
    GenerationRequest,
    PromptRow,
    RolloutEngine,
    Sampling,
    VLLMConfig,
    cpu_environment,
    prompt_tokens,
)
from cosmos_rollout.environments.environment import opening
from cosmos_weightsync import WeightSender, shards_of
from cosmos_weightsync.integrations.vllm import VLLMWeightClient, engine_arguments

CONTEXT = 1024
LONG = 600


class World:
    """Models of two seeds, their processor, and what vLLM said compared with what they say."""

    def __init__(self, folder: Path) -> None:
        self.paths = [folder / "a", folder / "b"]
        for seed, path in enumerate(self.paths):
            write_seeing_model(path, seed=seed, context=CONTEXT)
        write_pictures(folder, [(56, 56), (28, 56), (100, 70)])
        self.folder = folder
        self.models = [self.model(0), self.model(1)]
        self.processor: Any = AutoProcessor.from_pretrained(self.paths[0])
        config = self.models[0].config
        self.marks = [config.image_token_id, config.video_token_id]

    def model(self, seed: int) -> Any:
        path = self.paths[seed]
        return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()

    def request(self, name: str, *pictures: str, **sampling: Any) -> GenerationRequest:
        images = tuple(str(self.folder / picture) for picture in pictures)
        content = [{"type": "image"}] * len(images) + [{"type": "text", "text": "colour?"}]
        row = PromptRow(prompt_id="r", messages=({"role": "user", "content": content},))
        return GenerationRequest(
            request_id=name,
            prompt_token_ids=prompt_tokens(row, self.processor.tokenizer),
            sampling=Sampling(**{"max_new_tokens": 16, **sampling}),
            images=images,
        )

    @torch.no_grad()
    def table(self, request: GenerationRequest, sample: GeneratedSample, seed: int) -> np.ndarray:
        """[n, V] log-probs of a response under one model, marks left out."""
        text = self.processor.tokenizer.decode(list(request.prompt_token_ids))
        pictures = [read_image(image) for image in request.images]
        given = self.processor(text=[text], images=pictures or None, return_tensors="pt")
        prompt = given["input_ids"][0].tolist()
        assert prompt == list(sample.prompt_token_ids or request.prompt_token_ids)
        said = torch.from_numpy(sample.token_ids.astype(np.int64))
        ids = torch.cat([given["input_ids"], said[None]], dim=1)
        kinds = torch.nn.functional.pad(given["mm_token_type_ids"], (0, len(said)))
        pixels = {k: given[k] for k in ("pixel_values", "image_grid_thw") if k in given}
        logits = self.models[seed](input_ids=ids, mm_token_type_ids=kinds, **pixels).logits
        logits = logits[0, len(prompt) - 1 : -1]
        logits[:, self.marks] = float("-inf")
        return torch.log_softmax(logits, dim=-1).numpy()

    def difference(self, request: GenerationRequest, sample: GeneratedSample) -> dict[str, Any]:
        """The largest difference of log-probs, each under the weights that sampled the token."""
        tables = np.stack([self.table(request, sample, seed) for seed in (0, 1)])
        seeds = [span.version % 2 for span in sample.versions for _ in range(span.length)]
        steps = np.arange(len(seeds))
        expected = tables[seeds, steps, sample.token_ids]
        other = tables[[1 - seed for seed in seeds], steps, sample.token_ids]
        return {
            "difference": float(np.abs(sample.logprobs - expected).max()),
            "to_other_weights": float(np.abs(sample.logprobs - other).max()),
            "is_greedy": bool((tables[seeds, steps].argmax(-1) == sample.token_ids).all()),
            "versions": [list(span) for span in sample.versions],
            "num_marks": int(np.isin(sample.token_ids, self.marks).sum()),
            "num_prompt_tokens": len(sample.prompt_token_ids or ()),
            "num_tokens": len(sample.token_ids),
        }

    @torch.no_grad()
    def episode_difference(self, episode: Episode) -> dict[str, Any]:
        """The same of an episode under the first weights, from what a trajectory keeps of it."""
        ids = torch.from_numpy(episode.token_ids.astype(np.int64))[None]
        pictures = [read_image(image) for image in episode.images]
        logits = self.models[0](
            input_ids=ids,
            mm_token_type_ids=(ids == self.marks[0]).long(),
            **self.processor.image_processor(images=pictures, return_tensors="pt"),
        ).logits[0, :-1]
        logits[:, self.marks] = float("-inf")
        logprobs = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
        difference = np.abs(episode.logprobs[1:] - logprobs)[episode.trainable[1:]]
        return {
            "difference": float(difference.max()),
            "num_marks": int((episode.token_ids == self.marks[0]).sum()),
            "num_sampled": len(difference),
            "num_turns": episode.num_turns,
        }


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
        self.kv = "keep"
        self._clients = {
            "keep": VLLMWeightClient(llm, kv_cache="keep"),
            "recompute": VLLMWeightClient(llm, kv_cache="recompute"),
        }

    async def connect(self, endpoints: Sequence[str]) -> None:
        await self._clients[self.kv].connect(endpoints)

    async def load(self, version: int) -> Any:
        return await self._clients[self.kv].load(version)


async def answers(engine: RolloutEngine, *requests: GenerationRequest) -> list[GeneratedSample]:
    async with aclosing(engine.generate(requests)) as samples:
        found = {sample.request_id: sample async for sample in samples}
    return [found[request.request_id] for request in requests]


async def refusal(engine: RolloutEngine, request: GenerationRequest) -> str:
    try:
        await answers(engine, request)
    except Exception as error:  # noqa: BLE001 - which one is what is asked
        return f"{type(error).__name__}: {error}"
    return ""


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


async def measure(world: World, engine: RolloutEngine, client: EitherClient) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def compare(name: str, *requests: GenerationRequest) -> None:
        samples = await answers(engine, *requests)
        found[name] = [world.difference(*one) for one in zip(requests, samples, strict=True)]

    red = "red-56x56.png"
    await compare("sampled", *(world.request(f"s{seed}", red, seed=seed) for seed in range(4)))
    await compare("two", world.request("t", red, "blue-28x56.png", "red-56x56.png"))
    await compare("resized", world.request("z", "green-100x70.png"))
    await compare("text", world.request("x"))
    await compare("greedy", world.request("g", red, temperature=0.0))
    found["episode"] = world.episode_difference(await episode(world, engine, red))
    plain = world.request("r", red)
    found["refused"] = {
        "gone": await refusal(engine, world.request("r", "gone.png")),
        "unmarked": await refusal(engine, replace(plain, images=plain.images * 2)),
        "spelled": await refusal(engine, replace(plain, images=())),
        "many": await refusal(engine, world.request("r", *[red] * 5)),
        "long": await refusal(
            engine, replace(plain, prompt_token_ids=plain.prompt_token_ids + (9,) * (CONTEXT - 30))
        ),
        "score": await teacher_refusal(engine, plain),
    }
    trained = world.model(0)
    sender = WeightSender(shards_of(trained))
    for version, client.kv in ((1, "keep"), (2, "recompute")):
        long = world.request(f"l{version}", red, seed=version, max_new_tokens=LONG)
        flying = asyncio.create_task(answers(engine, long))
        begun = engine.num_tokens_generated
        while engine.num_tokens_generated < begun + 40 and not flying.done():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        trained.load_state_dict(world.models[version % 2].state_dict())
        await asyncio.to_thread(sender.publish, version)
        await engine.load_version(version, [sender.endpoint])
        await compare(f"after-{version}", world.request(f"n{version}", red, temperature=0.0))
        (sample,) = await flying
        found[f"through-{version}"] = [world.difference(long, sample)]
    sender.close()
    return found


async def teacher_refusal(engine: Any, request: GenerationRequest) -> str:
    try:
        await engine.score(request.prompt_token_ids, 0)
    except Exception as error:  # noqa: BLE001 - which one is what is asked
        return f"{type(error).__name__}: {error}"
    return ""


async def main(folder: Path) -> None:
    os.environ.update(cpu_environment())
    torch.set_num_threads(1)
    world = World(folder)
    clients: list[EitherClient] = []

    def client(llm: Any, kv: str) -> EitherClient:
        clients.append(EitherClient(llm))
        return clients[-1]

    config = VLLMConfig(
        dtype="float32", context_length=CONTEXT, progress_tokens=2, images_per_prompt=4
    )
    engine = await config.build(
        EngineSetup(
            model_path=world.paths[0],
            weight_client=client,
            engine_arguments=engine_arguments(),
        )
    )
    try:
        found = await measure(world, engine, clients[0])
    finally:
        await engine.aclose()
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
