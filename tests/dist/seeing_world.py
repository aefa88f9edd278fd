"""Models that see, of two seeds, and what vLLM said of pictures and videos compared with theirs.

What the log-probs have to be comes from transformers, which cuts up the same pictures and frames
with the same processor and knows nothing of engines.
"""

from collections.abc import Sequence
from contextlib import aclosing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from seeing_videos import Family, write_video_model
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.video_utils import VideoMetadata
from turning import positions_of

from cosmos_core.images import read_image
from cosmos_core.trajectory import TeacherScores
from cosmos_core.videos import is_video, read_video, video_info
from cosmos_rollout import (
    Episode,
    GeneratedSample,
    GenerationRequest,
    PromptRow,
    RolloutEngine,
    Sampling,
    prompt_tokens,
)

CONTEXT = 1024
_PIXELS = (
    "pixel_values",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "second_per_grid_ts",
)
_read_video = cache(read_video)  # some files are gone when an answer is looked at


class World:
    """Models of two seeds, their processor, and what vLLM said compared with what they say."""

    def __init__(self, folder: Path, family: Family) -> None:
        self.folder = folder
        self.family = family
        self.paths = [folder / "a", folder / "b"]
        for seed, path in enumerate(self.paths):
            write_video_model(path, family, seed=seed, context=CONTEXT)
        self.models = [self.model(0), self.model(1)]
        self.processor: Any = AutoProcessor.from_pretrained(self.paths[0])
        config = self.models[0].config
        self.marks = [config.image_token_id, config.video_token_id]

    def model(self, seed: int) -> Any:
        path = self.paths[seed]
        return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()

    def request(self, name: str, *shown: str, **sampling: Any) -> GenerationRequest:
        """Return a request that shows names of pictures in the folder, and references of videos."""
        images = tuple(one if is_video(one) else str(self.folder / one) for one in shown)
        marks = [{"type": "video" if is_video(one) else "image"} for one in shown]
        content = [*marks, {"type": "text", "text": "colour?"}]
        row = PromptRow(prompt_id="r", messages=({"role": "user", "content": content},))
        return GenerationRequest(
            request_id=name,
            prompt_token_ids=prompt_tokens(row, self.processor.tokenizer),
            sampling=Sampling(**{"max_new_tokens": 16, **sampling}),
            images=images,
        )

    def inputs(self, request: GenerationRequest) -> dict[str, Any]:
        """Return what the model's own processor makes of a prompt."""
        text = self.processor.tokenizer.decode(list(request.prompt_token_ids))
        pictures = [read_image(one) for one in request.images if not is_video(one)]
        videos = [one for one in request.images if is_video(one)]
        shown: dict[str, Any] = {"images": pictures or None}
        if videos:
            shown["videos"] = [_read_video(one) for one in videos]
            metadata = [VideoMetadata(**video_info(one).metadata()) for one in videos]
            shown |= {"video_metadata": metadata, "do_sample_frames": False}
        return self.processor(text=[text], return_tensors="pt", **shown)

    @torch.no_grad()
    def table(
        self, request: GenerationRequest, sample: GeneratedSample, seed: int, *, whole: bool = False
    ) -> np.ndarray:
        """[n, V] log-probs of a response under one model, marks left out unless it is ``whole``."""
        given = self.inputs(request)
        prompt = given["input_ids"][0].tolist()
        assert prompt == list(sample.prompt_token_ids or request.prompt_token_ids)
        said = torch.from_numpy(sample.token_ids.astype(np.int64))
        ids = torch.cat([given["input_ids"], said[None]], dim=1)
        kinds = torch.nn.functional.pad(given["mm_token_type_ids"], (0, len(said)))
        pixels = {key: given[key] for key in _PIXELS if key in given}
        logits = self.models[seed](
            input_ids=ids,
            mm_token_type_ids=kinds,
            position_ids=positions_of(kinds[0], pixels, self.models[0].config)[:, None],
            **pixels,
        ).logits
        logits = logits[0, len(prompt) - 1 : -1]
        if not whole:
            logits[:, self.marks] = float("-inf")
        return torch.log_softmax(logits, dim=-1).numpy()

    def has_transformers_positions(self, request: GenerationRequest) -> bool:
        """Whether transformers' own positions are those of the paper."""
        given = self.inputs(request)
        kinds = given["mm_token_type_ids"]
        pixels = {key: given[key] for key in _PIXELS if key in given}
        named = {key: value for key, value in pixels.items() if "pixel" not in key}
        theirs, _ = self.models[0].model.get_rope_index(given["input_ids"], kinds, **named)
        return torch.equal(theirs[:, 0], positions_of(kinds[0], pixels, self.models[0].config))

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

    def score_difference(
        self, request: GenerationRequest, sample: GeneratedSample, scores: TeacherScores
    ) -> float:
        """The largest difference of scores of a response from the first model's log-probs."""
        table = self.table(request, sample, 0, whole=True)
        begin, steps = len(sample.prompt_token_ids or ()), np.arange(len(table))
        own = np.abs(scores.logprobs[begin:] - table[steps, sample.token_ids])
        best = -np.sort(-table, axis=1)[:, : scores.top_logprobs.shape[1]]
        return float(max(own.max(), np.abs(scores.top_logprobs[begin:] - best).max()))

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


async def compared(
    world: World, engine: RolloutEngine, requests: Sequence[GenerationRequest]
) -> list[dict[str, Any]]:
    """Answer requests; return how each answer differs from what transformers says."""
    samples = await answers(engine, *requests)
    return [world.difference(*one) for one in zip(requests, samples, strict=True)]
