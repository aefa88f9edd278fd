"""Log-probs of tokens that a server is given, as vLLM's additions to OpenAI's completions have it.

Asked for with ``prompt_logprobs = K``; the answer has one entry for each token, nothing for the
first, and otherwise the token itself and the K likeliest in its place, each with its rank from 1::

    [null, {"9": {"logprob": -2.5, "rank": 4}, "33": {"logprob": -0.25, "rank": 1}}, ...]
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from cosmos_core.trajectory import TeacherScores
from cosmos_rollout.errors import EngineError, TeacherError


def asked_scores(top_k: int) -> dict[str, Any]:
    """Return what a request for scores says beside model and prompt."""
    return {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top_k}


def answer_scores(token_ids: Sequence[int], scores: TeacherScores) -> list[dict[str, Any] | None]:
    """Return scores as a server tells them; the other end of `read_scores`."""
    told: list[dict[str, Any] | None] = [None]
    for place in range(1, len(token_ids)):
        found = {
            str(int(token)): {"logprob": float(logprob), "rank": rank}
            for rank, (token, logprob) in enumerate(
                zip(scores.top_token_ids[place], scores.top_logprobs[place], strict=True), start=1
            )
        }
        own = str(int(token_ids[place]))
        found.setdefault(own, {"logprob": float(scores.logprobs[place]), "rank": len(found) + 1})
        told.append(found)
    return told


def read_scores(
    token_ids: Sequence[int], answer: Mapping[str, Any], *, top_k: int, whom: str
) -> TeacherScores:
    """Return what a server made of these tokens.

    Args:
        token_ids: what it was given.
        answer: what it said.
        top_k: how many likeliest tokens it was asked for.
        whom: its address, for messages.

    Raises:
        EngineError: if it does not score tokens that it is given.
        TeacherError: if it knows fewer tokens than it was asked for.
    """
    try:
        entries = cast(list[Any], answer["choices"][0].get("prompt_logprobs") or [])
        if len(entries) != len(token_ids):
            raise EngineError(f"{whom} does not score tokens that it is given")
        return scores_of(token_ids, [_plain(entry) for entry in entries], top_k=top_k, whom=whom)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(f"{whom} gives scores that cannot be read: {error!r}") from error


Candidates = Mapping[int, tuple[float, int]]
"""Log-prob and rank of some tokens in one place."""


def scores_of(
    token_ids: Sequence[int], places: Sequence[Candidates | None], *, top_k: int, whom: str
) -> TeacherScores:
    """Sort candidates into arrays; the first token, which follows nothing, gets 0.

    Raises:
        TeacherError: if there are fewer candidates than ``top_k``.
    """
    logprobs = np.zeros(len(token_ids), np.float32)
    top_logprobs = np.zeros((len(token_ids), top_k), np.float32)
    top_token_ids = np.zeros((len(token_ids), top_k), np.int32)
    for place, (token, found) in enumerate(zip(token_ids, places, strict=True)):
        if place == 0 or found is None:
            continue
        logprobs[place] = found[int(token)][0]
        ranked = sorted((rank, other, logprob) for other, (logprob, rank) in found.items())[:top_k]
        if len(ranked) < top_k:
            raise TeacherError(f"{whom} gives {len(ranked)} likeliest tokens of {top_k} asked for")
        top_logprobs[place] = [logprob for _, _, logprob in ranked]
        top_token_ids[place] = [other for _, other, _ in ranked]
    return TeacherScores(logprobs=logprobs, top_logprobs=top_logprobs, top_token_ids=top_token_ids)


def _plain(entry: Mapping[str, Any] | None) -> Candidates | None:
    if entry is None:
        return None
    return {
        int(token): (float(told["logprob"]), int(told.get("rank") or 0))
        for token, told in entry.items()
    }
