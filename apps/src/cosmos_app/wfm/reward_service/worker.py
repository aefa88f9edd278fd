"""A process that scores: requests come in over a pipe as they came to the service, scores go back.

It is forked from a process that has imported this module, so that it starts in no time.
"""

import json
import math
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from cosmos_app.errors import RunError
from cosmos_app.wfm.reward_service.rewards import find_scorer
from cosmos_wfm import LatentDecoder, RewardRequest, ScoreRequest, parse_request


class RewardError(RunError):
    """Raised when a reward did not give the scores of a request."""


def score_requests(name: str, named: str, latent_vae: str, pipe: Connection) -> None:
    """Score until the other end is closed; the first that is sent says that the reward is there.

    Args:
        name: of the reward.
        named: its ``module:function`` or directory, or empty for one that is built in.
        latent_vae: directory of what decodes latents, or empty.
        pipe: carries requests and, as JSON, answers.
    """
    threading.Thread(target=_end_with_service, daemon=True).start()
    torch.set_num_threads(1)
    score = find_scorer(name, named)
    if latent_vae:
        score = _decoding(LatentDecoder(latent_vae), score)
    _send(pipe, {})
    while True:
        try:
            body = pipe.recv_bytes()
        except EOFError:
            return
        _send(pipe, _answer(score, body))


def _end_with_service() -> None:
    """End when the service has gone, in the midst of a reward as well.

    The kernel cannot see to it: the parent of this process is the one that it was forked from.
    """
    service = multiprocessing.parent_process()
    assert service is not None
    service.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _decoding(decode: LatentDecoder, score: ScoreRequest) -> ScoreRequest:
    return lambda request: score(decode(request))


def _send(pipe: Connection, answer: dict[str, Any]) -> None:
    pipe.send_bytes(json.dumps(answer).encode())


def _answer(score: ScoreRequest, body: bytes) -> dict[str, Any]:
    started = time.perf_counter()
    request = parse_request(body)
    decoded = time.perf_counter()
    try:
        scores = _checked(score, request)
    except RewardError as error:
        return {"error": str(error)}
    ended = time.perf_counter()
    return {"scores": scores, "duration": ended - decoded, "decoded_duration": decoded - started}


def _checked(score: ScoreRequest, request: RewardRequest) -> dict[str, list[float]]:
    """Return the scores of a request.

    Raises:
        RewardError: if the reward raised anything, or gave too few scores or such that JSON cannot
            hold.
    """
    try:
        scores = {key: [float(value) for value in row] for key, row in score(request).items()}
    except Exception as error:
        raise RewardError(f"{type(error).__name__}: {error}") from error
    for key, values in scores.items():
        if len(values) != len(request.prompts):
            raise RewardError(f"{key}: {len(values)} scores of {len(request.prompts)} samples")
        if not all(math.isfinite(value) for value in values):
            raise RewardError(f"{key}: not all scores are finite: {values}")
    return scores
