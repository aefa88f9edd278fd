"""Whether a picture shows the text that its prompt has in quotation marks, read by TrOCR."""

import re
from collections.abc import Mapping

import torch
from transformers import AutoTokenizer, VisionEncoderDecoderModel

from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.model_rewards.pictures import from_directory, middle_frames, normalised, resized
from cosmos_wfm.reward_wire import RewardRequest

_HALF = (0.5, 0.5, 0.5)
_MOST_TOKENS = 64
_QUOTED = (re.compile(r"[\"“]([^\"”]+)[\"”]"), re.compile(r"(?<!\w)'(.+?)'(?!\w)"))
"""Single marks come second, and at the edges of words: within them, and before, are apostrophes."""


class Ocr:
    """Scores ``ocr_reward``: 1 - min(distance, length) / length; 1 if the text is within."""

    def __init__(self, directory: str) -> None:
        """Load a ``VisionEncoderDecoderModel`` (TrOCR) and its tokenizer from a directory."""
        self._model = from_directory(VisionEncoderDecoderModel, directory, "ocr")
        self._tokenizer = from_directory(AutoTokenizer, directory, "ocr")

    @torch.no_grad()
    def __call__(self, request: RewardRequest) -> Mapping[str, list[float]]:
        """Return a score of each sample.

        Raises:
            WfmConfigError: if a prompt has no text in quotation marks.
        """
        wanted = [quoted(prompt) for prompt in request.prompts]
        size = self._model.config.encoder.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        pictures = normalised(resized(middle_frames(request), height, width), _HALF, _HALF)
        tokens = self._model.generate(
            pictures, max_new_tokens=_MOST_TOKENS, do_sample=False, num_beams=1
        )
        read = self._tokenizer.batch_decode(tokens, skip_special_tokens=True)
        pairs = zip(read, wanted, strict=True)
        return {"ocr_reward": [text_likeness(found, asked) for found, asked in pairs]}


def quoted(prompt: str) -> str:
    """Return the first text in quotation marks, in double ones if there are any.

    Raises:
        WfmConfigError: if there is none.
    """
    found = next((match for marks in _QUOTED if (match := marks.search(prompt))), None)
    if found is None:
        raise WfmConfigError(f"ocr: {prompt!r} has no text in quotation marks")
    return found[1]


def text_likeness(read: str, wanted: str) -> float:
    """Return 1 - min(distance, length) / length, without spaces and capitals; 1 if within."""
    one, other = (re.sub(r"\s", "", text).lower() for text in (read, wanted))
    if other in one:
        return 1.0
    return 1.0 - min(edit_distance(one, other), len(other)) / len(other)


def edit_distance(one: str, other: str) -> int:
    """Return the fewest insertions, deletions and replacements from one text to the other."""
    row = list(range(len(other) + 1))
    for number, mine in enumerate(one, start=1):
        before, row[0] = row[0], number
        for place, theirs in enumerate(other, start=1):
            cost = min(row[place] + 1, row[place - 1] + 1, before + (mine != theirs))
            before, row[place] = row[place], cost
    return row[-1]
