"""Pictures for vLLM: read here, cut up by the model's own processor, put in place of their marks.

A prompt comes with one mark a picture. vLLM's renderer makes of each mark as many tokens as the
picture has; its caches are left out that both ends of a pipe have to agree on, since a swap of
weights empties them one after the other while requests are on their way.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from vllm.config import ModelConfig
from vllm.inputs import TokensPrompt
from vllm.inputs.engine import MultiModalInput
from vllm.v1.engine.async_llm import AsyncLLM

from cosmos_core.images import ImageError, read_image
from cosmos_rollout.engine import GenerationRequest
from cosmos_rollout.errors import NoPicturesError, PictureError, PromptError

_MARKS = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
)
_KEPT = 16
_Key = tuple[tuple[int, ...], tuple[str, ...]]
Prompts = dict[str, MultiModalInput]
"""What vLLM is given, by request."""


class VLLMPictures:
    """Makes vLLM's inputs of requests with pictures, each once for all siblings.

    Attributes:
        sees: whether the model takes pictures.
        marks: tokens that stand for pictures and the like; no response may have one, since
            whoever reads it again would look for the picture. Empty for a model that sees nothing.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._made: OrderedDict[_Key, asyncio.Task[MultiModalInput]] = OrderedDict()
        self.sees = _sees(llm)
        self.marks = _marks(llm.model_config) if self.sees else frozenset[int]()

    async def expand(
        self, requests: Sequence[GenerationRequest]
    ) -> tuple[list[GenerationRequest], Prompts]:
        """Return the requests with their prompts as the model sees them, and what vLLM is given.

        Raises:
            NoPicturesError: if there are pictures, and the model sees none.
            PictureError: if one cannot be read, or they do not fit the prompt.
        """
        prompts: Prompts = {}
        expanded: list[GenerationRequest] = []
        for request in requests:
            num_places = 0
            if request.images:
                made = prompts[request.request_id] = await self._input(request)
                request = replace(request, prompt_token_ids=tuple(made["prompt_token_ids"]))
                num_places = sum(place.length for place in made["mm_placeholders"]["image"])
            if sum(token in self.marks for token in request.prompt_token_ids) > num_places:
                raise PictureError(
                    f"request {request.request_id}: its text has tokens that stand for pictures "
                    f"beside those of its {len(request.images)} pictures"
                )
            expanded.append(request)
        return expanded, prompts

    def refused(self, request: GenerationRequest, error: Exception) -> PromptError:
        """Return the error for a request that vLLM refuses."""
        kind = PictureError if request.images else PromptError
        return kind(f"request {request.request_id} is refused by vLLM: {error}")

    async def _input(self, request: GenerationRequest) -> MultiModalInput:
        if not self.sees:
            raise NoPicturesError(
                f"request {request.request_id} has {len(request.images)} pictures, and the model "
                "that vLLM serves sees none: it has no part for vision, no preprocessor_config.json"
                ", or images_per_prompt is 0"
            )
        key = (request.prompt_token_ids, request.images)
        if key not in self._made:
            self._made[key] = asyncio.create_task(self._make(*key))
        self._made.move_to_end(key)
        while len(self._made) > _KEPT:
            self._made.popitem(last=False)
        try:
            return await asyncio.shield(self._made[key])  # others may wait for it too
        except ImageError as error:
            self._made.pop(key, None)
            raise PictureError(f"request {request.request_id}: {error}") from error
        except Exception as error:  # the model's own code may raise anything
            self._made.pop(key, None)
            raise self.refused(request, error) from error

    async def _make(self, tokens: tuple[int, ...], images: tuple[str, ...]) -> MultiModalInput:
        pictures = await asyncio.to_thread(lambda: [read_image(image) for image in images])
        prompt = TokensPrompt(
            prompt_token_ids=list(tokens), multi_modal_data={"image": list(pictures)}
        )
        (made,) = await self._llm.renderer.render_cmpl_async([prompt], skip_mm_cache=True)
        return cast(MultiModalInput, made)


def _sees(llm: AsyncLLM) -> bool:
    processor = llm.renderer.mm_processor
    return processor is not None and processor.info.allowed_mm_limits.get("image", 0) > 0


def _marks(model: ModelConfig) -> frozenset[int]:
    found = [getattr(model.hf_config, name, None) for name in _MARKS]
    return frozenset(token for token in found if isinstance(token, int))
