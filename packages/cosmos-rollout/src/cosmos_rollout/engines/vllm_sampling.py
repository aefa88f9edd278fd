"""A request as vLLM takes it, and a sample as vLLM gives it."""

import math
from collections.abc import Iterable

import numpy as np
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from cosmos_core.trajectory import VersionSpan
from cosmos_rollout.engine import GeneratedSample, GenerationRequest, Sampling
from cosmos_rollout.errors import EngineError


def parameters_of(sampling: Sampling, forbidden: Iterable[int]) -> SamplingParams:
    """Return how vLLM is told to sample; ``forbidden`` tokens never are."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # only the stop tokens of the request end it
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        logit_bias=dict.fromkeys(forbidden, -math.inf) or None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def sample_of(
    request: GenerationRequest, token_ids: list[int], logprobs: list[float], last: CompletionOutput
) -> GeneratedSample:
    """Return a finished response, of whose outputs this is the last.

    Raises:
        EngineError: if it did not end as responses do, or versions are no numbers.
    """
    if last.finish_reason not in ("stop", "length"):
        raise EngineError(f"ended with {last.finish_reason!r}: request {request.request_id}")
    spans = last.weight_versions or ()
    labels = [span.version for span in spans if not span.version.isdecimal()]
    if labels:
        raise EngineError(
            f"request {request.request_id}: vLLM's weight version is {labels[0]!r}, and has to "
            "be a number: load weights by load_version, or call update_weight_version with a number"
        )
    versions = tuple(VersionSpan(int(span.version), span.end - span.start) for span in spans)
    return GeneratedSample(
        request_id=request.request_id,
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        versions=tuple(span for span in versions if span.length),
        finish_reason=last.finish_reason,
        prompt_token_ids=request.prompt_token_ids if request.images else None,
    )
