"""A vision language model behind an OpenAI-style address that is asked for a mark."""

import base64
import io
import re
from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np
from PIL import Image

from cosmos_wfm.errors import RewardServiceError
from cosmos_wfm.model_rewards.pictures import middle_frames
from cosmos_wfm.reward_wire import RewardRequest

_QUESTION = (
    "How well does this picture show what was asked for, and how good does it look? "
    'What was asked for: "{prompt}". Answer with one number from 0 (not at all) to 10.'
)
_BEST = 10.0
_SCALE = re.compile(r"\b[01]\s*(?:to|-|\u2013|and|through)\s*10\b", re.IGNORECASE)
"""What many a model says again before its mark."""


class Judge:
    """Scores ``judge``: the mark that the model answers, over 10, so 0 to 1."""

    def __init__(
        self, source: str, *, key: str = "", model: str = "", deadline_s: float = 120.0
    ) -> None:
        """Get ready; nothing is asked yet.

        Args:
            source: address that ``/chat/completions`` is added to, such as ``http://host:8000/v1``;
                the model may follow behind ``#``.
            key: sent as bearer token if it is not empty.
            model: its name; empty for what follows ``#``, or else the first that is served.
            deadline_s: of each question.
        """
        self._url, _, named = source.partition("#")
        self._model = model or named
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(headers=headers, timeout=deadline_s)

    def __call__(self, request: RewardRequest) -> Mapping[str, list[float]]:
        """Return a mark of each sample.

        Raises:
            RewardServiceError: if the model does not answer, or its answer has no number.
        """
        model = self._model or self._served()
        marks: list[float] = []
        pairs = zip(middle_frames(request), request.prompts, strict=True)
        for picture, prompt in pairs:
            pixels = (picture.permute(1, 2, 0).numpy() * 255.0).round().astype(np.uint8)
            marks.append(mark_of(self._asked(model, _data_url(pixels), prompt)))
        return {"judge": marks}

    def _served(self) -> str:
        return str(self._answer("GET", "/models", None)["data"][0]["id"])

    def _asked(self, model: str, picture: str, prompt: str) -> str:
        content = [
            {"type": "image_url", "image_url": {"url": picture}},
            {"type": "text", "text": _QUESTION.format(prompt=prompt)},
        ]
        asked = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0.0,
            "max_tokens": 16,
        }
        answer = self._answer("POST", "/chat/completions", asked)
        return str(answer["choices"][0]["message"]["content"])

    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        url = self._url.rstrip("/") + path
        try:
            answer = self._http.request(method, url, json=body)
            answer.raise_for_status()
            return answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise RewardServiceError(f"judge: {url}: {error}") from error


def mark_of(answer: str) -> float:
    """Return the first number of an answer over 10, cut to [0, 1]; "from 0 to 10" is none.

    Raises:
        RewardServiceError: if there is none.
    """
    found = re.search(r"\d+(?:\.\d+)?", _SCALE.sub(" ", answer))
    if found is None:
        raise RewardServiceError(f"judge: the answer {answer!r} has no number")
    return min(float(found[0]) / _BEST, 1.0)


def _data_url(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
