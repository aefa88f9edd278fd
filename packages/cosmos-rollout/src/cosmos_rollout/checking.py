"""What is refused of a request before anything is generated."""

from collections.abc import Container, Sequence
from dataclasses import replace

from cosmos_rollout.engine import GenerationRequest
from cosmos_rollout.errors import (
    DuplicateRequestError,
    EmptyPromptError,
    NoPicturesError,
    PromptTooLongError,
    TokenRangeError,
)


def check_request(
    request: GenerationRequest, *, context_length: int, vocabulary_size: int
) -> GenerationRequest:
    """Return the request with ``max_new_tokens`` cut to what the context leaves.

    Raises:
        EmptyPromptError: if there is no prompt token.
        PromptTooLongError: if the prompt leaves no room for a new token.
        TokenRangeError: if a prompt token is outside the vocabulary.
    """
    prompt = request.prompt_token_ids
    if not prompt:
        raise EmptyPromptError(f"request {request.request_id}: the prompt has no tokens")
    room = context_length - len(prompt)
    if room < 1:
        raise PromptTooLongError(
            f"request {request.request_id}: the prompt has {len(prompt)} tokens, "
            f"a context of {context_length} leaves room for {context_length - 1} at most"
        )
    if min(prompt) < 0 or max(prompt) >= vocabulary_size:
        bad = next(token for token in prompt if not 0 <= token < vocabulary_size)
        raise TokenRangeError(
            f"request {request.request_id}: prompt token {bad} is outside the vocabulary "
            f"0..{vocabulary_size - 1}"
        )
    if request.sampling.max_new_tokens <= room:
        return request
    return replace(request, sampling=replace(request.sampling, max_new_tokens=room))


def check_requests(
    requests: Sequence[GenerationRequest],
    *,
    context_length: int,
    vocabulary_size: int,
    in_flight: Container[str] = (),
) -> list[GenerationRequest]:
    """Return all of them as `check_request` does.

    Args:
        requests: of one call.
        context_length: most tokens of prompt and response.
        vocabulary_size: token ids are below this.
        in_flight: ids of requests of other calls, which are taken.

    Raises:
        DuplicateRequestError: if an id is taken: samples could not be told apart.
        PromptError: what `check_request` raises of the first bad one.
    """
    names = set[str]()
    for request in requests:
        if request.request_id in names or request.request_id in in_flight:
            raise DuplicateRequestError(
                f"request id {request.request_id!r} is in flight already; give each sample its own"
            )
        names.add(request.request_id)
    return [
        check_request(request, context_length=context_length, vocabulary_size=vocabulary_size)
        for request in requests
    ]


def refuse_pictures(requests: Sequence[GenerationRequest], engine: str) -> None:
    """Raise `NoPicturesError` for a request with pictures or videos to an engine without sight."""
    for request in requests:
        if request.images:
            raise NoPicturesError(
                f"request {request.request_id} has {len(request.images)} pictures or videos, and "
                f"{engine} takes none; VLLMConfig does, with a model that sees"
            )
