"""Scores of a reward service, fetched in threads while the next samples are generated.

submit ─► POST enqueue ─► {"uuid"} ─► POST pull (uuid, type) per reward ─► future
             503: later       │            202, 400: not yet ┘ 500: an error, no retry
                              └─ 404: forgotten (a restarted service): enqueued again
"""

import math
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import httpx
import numpy as np
import numpy.typing as npt
from torch import Tensor

from cosmos_wfm.errors import RewardServiceError, RewardTimeoutError, WfmConfigError
from cosmos_wfm.prompts import request_fields
from cosmos_wfm.ranges import check_at_least, check_finite, check_positive
from cosmos_wfm.reward_wire import (
    MediaType,
    RewardRequest,
    latents_of,
    media_of,
    pack_request,
)
from cosmos_wfm.sample_rewards import SampleRewards, SampleScorer

_Media = npt.NDArray[np.uint8] | npt.NDArray[np.float16]
_LATER = frozenset({408, 429, 502, 503, 504})
_REFUSED = frozenset({401, 403})
_NOT_YET = frozenset({202, 400})
_SHORTEST_WAIT_S = 0.05
_LONGEST_WAIT_S = 5.0
_MEBIBYTE = 1 << 20
# What existing services call the scores of these, where it is not the reward's own name.
_USUAL_KEYS: Mapping[str, str] = {
    "cosmos_reason1": "prediction",
    "dance_grpo": "overall_reward",
    "gen_eval": "gen_eval_score",
    "ocr": "ocr_reward",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EnqueueTimeout:
    """How long an upload may take: ``base_s + per_mib_s`` · size, between the bounds.

    Attributes:
        connect_s: to connect.
        base_s: of any request.
        per_mib_s: more for each MiB.
        min_s: at least.
        max_s: at most.
    """

    connect_s: float = 100.0
    base_s: float = 30.0
    per_mib_s: float = 3.0
    min_s: float = 60.0
    max_s: float = 600.0

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            WfmConfigError: names the field that is out of range.
        """
        check_positive("enqueue_timeout", self, "connect_s", "max_s")
        check_at_least("enqueue_timeout", self, base_s=0, per_mib_s=0, min_s=0)
        if self.min_s > self.max_s:
            raise WfmConfigError(f"enqueue_timeout: min_s {self.min_s} is above max_s {self.max_s}")

    def of(self, num_bytes: int) -> httpx.Timeout:
        """Return the timeout of a body."""
        read_s = self.base_s + self.per_mib_s * num_bytes / _MEBIBYTE
        return httpx.Timeout(min(max(read_s, self.min_s), self.max_s), connect=self.connect_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardServiceConfig:
    """A reward service, and how its scores become one number.

    The token is no part of it: recipes are written down and sent on.

    Attributes:
        enqueue_url: where samples go; empty for ``REMOTE_REWARD_ENQUEUE_URL`` of the environment.
        fetch_url: where scores come from; empty for ``REMOTE_REWARD_FETCH_URL``.
        score_keys: reward to the score that is meant, or several joined by ``+``; the reward's own
            name where it is not said.
        clip: each score, and their weighted sum, is cut to [-clip, clip].
        scale: the sum is multiplied by this last.
        video_fps: told to the service about videos.
        send: pixels, or latents of Wan's VAE, which the service decodes.
        max_requests: that are under way at once.
        deadline_s: from submission to scores; samples whose scores are not there by then have no
            reward. Where a request of several samples is refused, each is sent again by itself.
        pin_replica: ask the replica that took the samples for their scores.
        enqueue_timeout: of uploads.
    """

    enqueue_url: str = ""
    fetch_url: str = ""
    score_keys: Mapping[str, str] = field(default_factory=dict[str, str])
    clip: float = 5.0
    scale: float = 1.0
    video_fps: float = 16.0
    send: Literal["pixels", "latents"] = "pixels"
    max_requests: int = 8
    deadline_s: float = 1800.0
    pin_replica: bool = True
    enqueue_timeout: EnqueueTimeout = field(default_factory=EnqueueTimeout)

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            WfmConfigError: names the field that is out of range.
        """
        check_positive("reward_service", self, "clip", "deadline_s", "video_fps")
        check_at_least("reward_service", self, max_requests=1)
        check_finite("reward_service", self, "scale", "video_fps")
        if self.scale == 0:
            raise WfmConfigError("reward_service: scale is 0, so that every reward would be")


@dataclass(slots=True)
class _Asked:
    """Samples on their way through a service, and how often it has forgotten them."""

    body: bytes
    num: int
    deadline: float
    ticket: Mapping[str, Any] | None = None
    num_forgotten: int = 0


class RewardClient:
    """Asks a reward service; a ``Scorer`` that may be called from any thread.

    Attributes:
        num_retries: requests that were sent again, for whatever reason.
    """

    def __init__(
        self, config: RewardServiceConfig, weights: Mapping[str, float], *, token: str
    ) -> None:
        """Get ready; nothing is sent.

        Args:
            config: where the service is; both addresses must be filled in.
            weights: name of a reward to its weight in the sum; one of 0 is not asked, and one below
                0 is a penalty, of which the service is told the size only.
            token: sent with every request.

        Raises:
            WfmConfigError: if an address, the token or every reward is missing.
        """
        self._config = config
        self._weights = {name: weight for name, weight in weights.items() if weight}
        missing = [n for n in ("enqueue_url", "fetch_url") if not getattr(config, n)]
        if missing or not token or not self._weights:
            raise WfmConfigError(
                f"reward_service: no {(missing or ['token' if not token else 'reward'])[0]}"
            )
        for url in (config.enqueue_url, config.fetch_url):
            if not url.startswith(("http://", "https://")):
                raise WfmConfigError(
                    f"reward_service: {url!r} is no address; it begins with http://"
                )
        self._http = httpx.Client(headers={"Authorization": f"Bearer {token}"}, timeout=10.0)
        self._threads = ThreadPoolExecutor(config.max_requests, thread_name_prefix="rewards")
        self._closing = threading.Event()
        self.num_retries = 0

    def __call__(self, pixels: Tensor, prompts: Sequence[str]) -> "Future[list[float]]":
        """Send samples off and return what their scores will be.

        With ``send = "latents"`` what is given are those, not normalised, in the place of pixels.
        The future raises RewardServiceError if the service refuses or fails, and
        RewardTimeoutError if it takes too long.
        """
        media_type, media = ("latent", latents_of(pixels))
        if self._config.send == "pixels":
            media_type, media = media_of(pixels)
        body = pack_request(self._request(prompts, media_type, media))
        deadline = time.monotonic() + self._config.deadline_s
        return self._threads.submit(self._score, _Asked(body, len(prompts), deadline))

    def sample_scorer(self, deadline_s: float = math.inf) -> SampleScorer:
        """Return what has samples rewarded one by one, for validation.

        Pixels are sent in any case. A reward that the service refuses, or that takes longer than
        ``deadline_s`` or the deadline of the config, is a problem of that sample.
        """
        within_s = min(deadline_s, self._config.deadline_s)

        def ask(pixels: Tensor, prompt: str) -> "Future[SampleRewards]":
            body = pack_request(self._request([prompt], *media_of(pixels[None])))
            return self._threads.submit(self._score_sample, body, within_s)

        return ask

    def wait_until_there(self, patience_s: float) -> None:
        """Return once the service answers, whatever it says; nothing is scored.

        Raises:
            RewardTimeoutError: if it does not in time.
            RewardServiceError: if it refuses the token.
        """
        url, end, waits = self._config.fetch_url, time.monotonic() + patience_s, 0
        while True:
            try:
                answer = self._http.post(url, data={"uuid": "", "type": ""})
            except httpx.TransportError as error:
                why = f"{url} cannot be reached: {error!r}"
            else:
                if answer.status_code in _REFUSED:
                    code = answer.status_code
                    raise RewardServiceError(f"{url} answered {code}: it does not take this token")
                if answer.status_code not in _LATER:
                    return
                why = _refusal(url, answer)
            if time.monotonic() >= end:
                raise RewardTimeoutError(f"{why}; start the service, or correct its address")
            self._closing.wait(min(_SHORTEST_WAIT_S * 2**waits, 1.0))
            waits += 1

    def close(self) -> None:
        """Give up what is under way; may be called twice."""
        self._closing.set()
        self._threads.shutdown(cancel_futures=True)
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(
        self, prompts: Sequence[str], media_type: MediaType, media: _Media
    ) -> RewardRequest:
        infos = [{"video_fps": self._config.video_fps}] * len(prompts)
        return RewardRequest(
            prompts=tuple(prompts),
            rewards={name: abs(weight) for name, weight in self._weights.items()},
            media_type=media_type,
            media=media,
            extra={
                **({"video_infos": infos} if media_type != "image" else {}),
                **request_fields(prompts),
            },
        )

    def _score(self, asked: _Asked) -> list[float]:
        found = {name: self._values_of(name, asked) for name in self._weights}
        rows = range(asked.num)
        return [self._total({n: values[row] for n, values in found.items()}) for row in rows]

    def _score_sample(self, body: bytes, within_s: float) -> SampleRewards:
        asked = _Asked(body, 1, time.monotonic() + within_s)
        found: dict[str, float] = {}
        problems: dict[str, None] = {}  # each once
        for name in self._weights:
            try:
                [found[name]] = self._values_of(name, asked)
            except RewardServiceError as error:
                problems[str(error)] = None
        total = self._total(found) if len(found) == len(self._weights) else None
        return SampleRewards(rewards=found, reward=total, problems=tuple(problems))

    def _total(self, scores: Mapping[str, float]) -> float:
        total = sum(weight * self._cut(scores[name]) for name, weight in self._weights.items())
        return self._config.scale * self._cut(total)

    def _values_of(self, name: str, asked: "_Asked") -> list[float]:
        """Return a score for each sample of what was asked, which is enqueued if it is not yet."""
        if asked.ticket is None:
            asked.ticket = self._enqueue(asked.body, asked.deadline)
        while (scores := self._fetch(asked.ticket, name, asked.deadline)) is None:
            self.num_retries += 1
            why = f"{self._config.fetch_url} answered 404 for what was just enqueued"
            whose = f"{why}; is it the address of that service?"
            self._wait(asked.num_forgotten, asked.deadline, whose)
            asked.num_forgotten += 1
            asked.ticket = self._enqueue(asked.body, asked.deadline)
        return _values(scores, self._key(name), name, asked.num)

    def _key(self, name: str) -> str:
        return self._config.score_keys.get(name, _USUAL_KEYS.get(name, name))

    def _cut(self, value: float) -> float:
        return min(max(value, -self._config.clip), self._config.clip)

    def _enqueue(self, body: bytes, deadline: float) -> Mapping[str, Any]:
        url, waits = self._config.enqueue_url, 0
        headers = {"Content-Type": "application/octet-stream"}
        timeout = self._config.enqueue_timeout.of(len(body))
        while True:
            try:
                answer = self._http.post(url, content=body, headers=headers, timeout=timeout)
            except httpx.TransportError as error:
                self._wait(waits, deadline, f"{url} cannot be reached: {error!r}")
            else:
                if answer.status_code == 200:
                    return _json_object(answer, url)
                if answer.status_code not in _LATER:
                    raise RewardServiceError(_refusal(url, answer))
                self._wait(waits, deadline, _refusal(url, answer), answer)
            waits += 1
            self.num_retries += 1

    def _fetch(
        self, ticket: Mapping[str, Any], name: str, deadline: float
    ) -> Mapping[str, Any] | None:
        """Return the scores of a reward; ``None`` if the service has forgotten the request."""
        url, waits = self._config.fetch_url, 0
        headers: dict[str, str] = {}
        if self._config.pin_replica and ticket.get("replica_id"):
            headers["X-Lepton-Replica-Target"] = str(ticket["replica_id"])
        form = {"uuid": str(ticket.get("uuid", "")), "type": name}
        while True:
            try:
                answer = self._http.post(url, data=form, headers=headers)
            except httpx.TransportError as error:
                self._wait(waits, deadline, f"{url} cannot be reached: {error!r}")
            else:
                if answer.status_code == 200:
                    return _json_object(answer, url)
                if answer.status_code == 404:
                    return None
                if answer.status_code not in _NOT_YET | _LATER:
                    raise RewardServiceError(f"{name}: {_refusal(url, answer)}")
                self._wait(waits, deadline, f"{name}: {_refusal(url, answer)}", answer)
            waits += 1

    def _wait(
        self, waits: int, deadline: float, why: str, answer: httpx.Response | None = None
    ) -> None:
        """Sleep before the next try: as long as the service asks, or else ever longer.

        Raises:
            RewardTimeoutError: if the deadline has passed.
            RewardServiceError: if the client is closed.
        """
        asked = answer.headers.get("Retry-After", "") if answer is not None else ""
        growing = min(_SHORTEST_WAIT_S * 2 ** min(waits, 10), _LONGEST_WAIT_S)
        delay = float(asked) if asked.isdigit() else growing * random.uniform(1.0, 1.5)
        left = deadline - time.monotonic()
        if left <= 0:
            raise RewardTimeoutError(f"no scores in {self._config.deadline_s:g} s; last: {why}")
        if self._closing.wait(min(delay, left)):
            raise RewardServiceError("the client was closed before its scores came")


def _json_object(answer: httpx.Response, url: str) -> Mapping[str, Any]:
    try:
        found = answer.json()
    except ValueError as error:
        raise RewardServiceError(f"{url} answered no JSON: {answer.text[:200]!r}") from error
    if not isinstance(found, dict):
        raise RewardServiceError(f"{url} answered no JSON object: {answer.text[:200]!r}")
    return found


def _values(answer: Mapping[str, Any], key: str, name: str, num: int) -> list[float]:
    """Return the sum of the scores that ``key`` names."""
    scores = answer.get("scores")
    if not isinstance(scores, dict):
        raise RewardServiceError(f"{name}: the service answered without scores: {answer}")
    sums = [0.0] * num
    for part in key.split("+"):
        values: Any = scores.get(part)
        if not isinstance(values, list) or len(values) != num:
            raise RewardServiceError(
                f"{name}: want {num} scores called {part}; there are "
                + ", ".join(
                    f"{k} ({len(v) if isinstance(v, list) else v})" for k, v in scores.items()
                )
            )
        for row, value in enumerate(values):
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise RewardServiceError(f"{name}: {part} of sample {row} is {value!r}")
            sums[row] += value
    return sums


def _refusal(url: str, answer: httpx.Response) -> str:
    return f"{url} answered {answer.status_code}: {answer.text[:300].strip()}"
