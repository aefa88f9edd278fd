"""Pictures and videos for vLLM: read here, cut up by the model's own processor, put in place.

A prompt comes with one mark for each. vLLM's renderer makes of a mark as many tokens as the picture
or video has, and chooses no frames of a video: those that its reference names are shown. Its
caches are left out that both ends of a pipe have to agree on, since a swap of weights empties them
one after the other while requests are on their way.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from vllm.config import ModelConfig
from vllm.inputs import TokensPrompt
from vllm.inputs.engine import EngineInput, MultiModalInput, tokens_input
from vllm.v1.engine.async_llm import AsyncLLM

from cosmos_core.images import MediaError, read_image
from cosmos_core.videos import is_video, read_video, video_info
from cosmos_rollout.engine import GenerationRequest, Shown
from cosmos_rollout.errors import NoPicturesError, PictureError, PromptError

_MARKS = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
)
_ABSENT = {
    "image": "pictures, and the model that vLLM serves sees none: it has no part for vision, no "
    "preprocessor_config.json, or images_per_prompt is 0",
    "video": "videos, and vLLM takes none: its model sees no videos, or videos_per_prompt is 0",
}
_ALL_FRAMES = {"do_sample_frames": False}
_KEPT = 16
_KEPT_BYTES = 1 << 30
_Key = tuple[tuple[int, ...], tuple[str, ...]]
Prompts = dict[str, MultiModalInput]
"""What vLLM is given, by request."""


class VLLMPictures:
    """Makes vLLM's inputs of requests with pictures or videos, each once for all siblings.

    Attributes:
        marks: tokens that stand for pictures and the like; no response may have one, since
            whoever reads it again would look for the picture. Empty for a model that sees nothing.
        share_prefixes: whether prompts with pictures may begin with keys and values that are there.
            vLLM's older model runner then forgets the pixels, and ends when a request has to be
            computed anew: after new weights, or where memory was short.

    Args:
        llm: what the inputs are for.
        kept_bytes: of inputs that are kept for further siblings, the newest of them in any case.
    """

    def __init__(self, llm: AsyncLLM, *, kept_bytes: int = _KEPT_BYTES) -> None:
        self._llm = llm
        self._kept_bytes = kept_bytes
        self._made: OrderedDict[_Key, asyncio.Task[MultiModalInput]] = OrderedDict()
        self._limits = _limits(llm)
        self.share_prefixes = bool(llm.vllm_config.use_v2_model_runner)
        self.marks = _marks(llm.model_config) if any(self._limits.values()) else frozenset[int]()

    async def expand(
        self, requests: Sequence[GenerationRequest]
    ) -> tuple[list[GenerationRequest], Prompts]:
        """Return the requests with their prompts as the model sees them, and what vLLM is given.

        Raises:
            NoPicturesError: if there are pictures or videos, and the model is shown none.
            PictureError: if one cannot be read, or they do not fit the prompt.
        """
        prompts: Prompts = {}
        expanded: list[GenerationRequest] = []
        for request in requests:
            text: Sequence[int] = request.prompt_token_ids
            if request.images:
                made = prompts[request.request_id] = await self._input(request)
                request = replace(request, prompt_token_ids=tuple(made["prompt_token_ids"]))
                text = _text(made)
            if not self.marks.isdisjoint(text):
                raise PictureError(
                    f"request {request.request_id}: its text has tokens that stand for pictures "
                    f"or videos beside those of its {len(request.images)} pictures and videos"
                )
            expanded.append(request)
        return expanded, prompts

    async def whole(self, request: GenerationRequest, shown: Shown | None) -> EngineInput:
        """Return what vLLM is given of a prompt in which pictures and videos are tokens already.

        Raises:
            NoPicturesError: if there are pictures or videos, and the model is shown none.
            PictureError: if one cannot be read, they do not fit the prompt, or the model makes
                other tokens of them.
        """
        marked = request
        if shown is not None:
            marked = replace(request, prompt_token_ids=shown.marked_token_ids, images=shown.images)
        (seen,), prompts = await self.expand([marked])
        self._made.pop((marked.prompt_token_ids, marked.images), None)  # no sibling has its words
        given, found = request.prompt_token_ids, seen.prompt_token_ids
        if found != given:
            raise PictureError(
                f"request {request.request_id}: it has {len(given)} tokens with those of pictures "
                f"or videos, and here they are {len(found)} or others; this model has to cut them "
                "up as the one did that saw them"
            )
        made = prompts.get(request.request_id)
        return made or tokens_input(list(request.prompt_token_ids))

    def refused(self, request: GenerationRequest, error: Exception) -> PromptError:
        """Return the error for a request that vLLM refuses."""
        kind = PictureError if request.images else PromptError
        words = error.__cause__ or error  # vLLM's own quote the pixels
        return kind(f"request {request.request_id} is refused by vLLM: {words}")

    async def _input(self, request: GenerationRequest) -> MultiModalInput:
        for kind, count in Counter(map(_kind, request.images)).items():
            if not self._limits.get(kind):
                words = f"request {request.request_id} has {count} {_ABSENT[kind]}"
                raise NoPicturesError(words)
        key = (request.prompt_token_ids, request.images)
        if key not in self._made:
            self._made[key] = asyncio.create_task(self._make(*key))
        self._made.move_to_end(key)
        self._forget()
        try:
            return await asyncio.shield(self._made[key])  # others may wait for it too
        except MediaError as error:
            self._made.pop(key, None)
            raise PictureError(f"request {request.request_id}: {error}") from error
        except Exception as error:  # the model's own code may raise anything
            self._made.pop(key, None)
            raise self.refused(request, error) from error

    async def _make(self, tokens: tuple[int, ...], images: tuple[str, ...]) -> MultiModalInput:
        prompt = TokensPrompt(
            prompt_token_ids=list(tokens), multi_modal_data=await asyncio.to_thread(_read, images)
        )
        if any(map(is_video, images)):
            prompt["mm_processor_kwargs"] = dict(_ALL_FRAMES)
        (made,) = await self._llm.renderer.render_cmpl_async([prompt], skip_mm_cache=True)
        return cast(MultiModalInput, made)

    def _forget(self) -> None:
        """Let go of the inputs that were asked for longest ago, where there are too many."""
        while len(self._made) > 1:
            num_bytes = sum(map(_num_bytes, self._made.values()))
            if len(self._made) <= _KEPT and num_bytes <= self._kept_bytes:
                return
            self._made.popitem(last=False)


def _kind(reference: str) -> str:
    return "video" if is_video(reference) else "image"


def _read(images: Sequence[str]) -> dict[str, Any]:
    """Return pictures, and frames of videos with what they are, as vLLM takes them."""
    data: dict[str, list[Any]] = {}
    for reference in images:
        if is_video(reference):
            shown = {**video_info(reference).metadata(), **_ALL_FRAMES}
            data.setdefault("video", []).append((read_video(reference), shown))
        else:
            data.setdefault("image", []).append(read_image(reference))
    return data


def _text(made: MultiModalInput) -> list[int]:
    """Return the tokens of a prompt that stand for no picture or video."""
    tokens = list(made["prompt_token_ids"])
    places = [place for kind in made["mm_placeholders"].values() for place in kind]
    for place in sorted(places, key=lambda place: place.offset, reverse=True):
        del tokens[place.offset : place.offset + place.length]
    return tokens


def _num_bytes(task: "asyncio.Task[MultiModalInput]") -> int:
    """Return the size of an input; 0 where it is not there yet, or never will be."""
    if not task.done() or task.cancelled() or task.exception() is not None:
        return 0
    items = [item for kind in task.result()["mm_kwargs"].values() for item in kind if item]
    tensors = [element.data for item in items for element in item.values()]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def _limits(llm: AsyncLLM) -> Mapping[str, int]:
    """Return how many of each kind a request may have."""
    processor = llm.renderer.mm_processor
    return {} if processor is None else processor.info.allowed_mm_limits


def _marks(model: ModelConfig) -> frozenset[int]:
    found = [getattr(model.hf_config, name, None) for name in _MARKS]
    return frozenset(token for token in found if isinstance(token, int))
