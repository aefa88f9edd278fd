"""The reference engine: any Hugging Face causal language model, decoded with transformers.

Small and exact rather than fast: what it samples, and the log-probs it reports, define what the
other engines have to agree with. Needs torch, which is why it is not imported with the package.
"""

import asyncio
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from cosmos_rollout.attention import attention_of
from cosmos_rollout.engine import (
    GenerationRequest,
    KvPolicy,
    Sampling,
    SleepPolicy,
    StagedWeights,
)
from cosmos_rollout.engines.in_process import DecodedToken, InProcessEngine
from cosmos_rollout.engines.setup import EngineSetup
from cosmos_rollout.engines.transformers_scoring import ModelScorer
from cosmos_rollout.errors import EngineMemoryError, EngineStartError, WeightLoadError


def sample_token(
    logits: Tensor, sampling: Sampling, generator: torch.Generator
) -> tuple[int, float]:
    """Draw a token from ``logits`` [V]; return it with the log-prob it was drawn with.

    Top-p keeps the smallest set of likeliest tokens whose probabilities sum to at least ``top_p``
    (Holtzman et al. 2020, arXiv:1904.09751). One uniform number of ``generator`` is used per draw,
    and none for a greedy request, whose log-prob is that of the plain softmax. Logits that are not
    numbers give some token with a log-prob that is none either, which costs the sample.
    """
    if sampling.temperature == 0.0:
        token = int(logits.argmax())
        return token, float(torch.log_softmax(logits.double(), dim=-1)[token])
    scaled = logits.double() / sampling.temperature
    if sampling.top_p < 1.0:
        ascending, order = scaled.sort()
        outside = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - sampling.top_p
        outside[-1] = False  # the likeliest token always stays
        scaled[order[outside]] = float("-inf")
    logprobs = torch.log_softmax(scaled, dim=-1)
    cumulative = logprobs.exp().cumsum(dim=-1)
    draw = torch.rand((), generator=generator, dtype=torch.float64) * cumulative[-1].cpu()
    place = int(torch.searchsorted(cumulative, draw.to(cumulative.device), right=True))
    token = min(place, len(cumulative) - 1)  # beyond the last one if nothing is a number
    return token, float(logprobs[token])


@dataclass(slots=True)
class _Row:
    request: GenerationRequest
    generator: torch.Generator


class _Cohort:
    """Requests with prompts of one length, admitted together: they need no padding, ever."""

    def __init__(self, rows: list[_Row], model: PreTrainedModel) -> None:
        self.rows = rows
        self._model = model
        self._cache_name = _cache_name(model)
        prompts = [row.request.prompt_token_ids for row in rows]
        self.tokens = torch.tensor(prompts, dtype=torch.int64, device=model.device)  # [rows, T]
        self.forget_cache()

    def keep(self, rows: Sequence[int]) -> None:
        """Drop the other rows."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.tokens.device)
        self.rows = [self.rows[row] for row in rows]
        self.tokens = self.tokens[index]
        if self.num_cached:
            chosen = cast(torch.LongTensor, index)
            self.cache.reorder_cache(chosen)  # states of linear attention too, unlike others

    def forget_cache(self) -> None:
        """Have the next step compute keys and values of everything anew."""
        self.cache, self.num_cached = DynamicCache(config=self._model.config), 0

    def step(self) -> list[DecodedToken]:
        """Sample the next token of each row."""
        fresh, cached = self.tokens[:, self.num_cached :], {self._cache_name: self.cache}
        output = self._model(input_ids=fresh, use_cache=True, logits_to_keep=1, **cached)
        self.num_cached = self.tokens.shape[1]
        drawn = [
            DecodedToken(
                row.request.request_id, *sample_token(logits, row.request.sampling, row.generator)
            )
            for row, logits in zip(self.rows, output.logits[:, -1].float(), strict=True)
        ]
        column = self.tokens.new_tensor([[token.token_id] for token in drawn])
        self.tokens = torch.cat([self.tokens, column], dim=1)
        return drawn


class ModelDecoder:
    """A `Decoder` over a transformers model, with one KV cache per cohort of equal prompts.

    Each request draws from a generator of its own, seeded by its sampling seed, so that the others
    do not shift its random numbers. (A matrix product may still round differently with another
    number of rows; where that matters to the last bit, decode one request at a time.)

    Args:
        model: a causal language model in evaluation mode.
        kv: whether new weights go on with the old keys and values, or compute them anew.
        context_length: most tokens of prompt and response; the model's own limit if 0.

    Raises:
        EngineStartError: if the model has no such limit, or keeps what it has read in a way of its
            own.
    """

    def __init__(
        self, model: PreTrainedModel, *, kv: KvPolicy = "keep", context_length: int = 0
    ) -> None:
        self._model = model
        self._kv: KvPolicy = kv
        self._context_length = context_length or _longest(model)
        _cache_name(model)
        self._cohorts: list[_Cohort] = []
        self._device = model.device
        self._given_up: dict[str, torch.Size] = {}

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and response."""
        return self._context_length

    @property
    def vocabulary_size(self) -> int:
        """Rows of the embedding."""
        return int(self._model.config.vocab_size)

    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        """Start these requests with the next step, those of one prompt length together."""
        by_length: dict[int, list[_Row]] = {}
        for request in requests:
            generator = torch.Generator().manual_seed(request.sampling.seed)
            by_length.setdefault(len(request.prompt_token_ids), []).append(_Row(request, generator))
        self._cohorts += [_Cohort(rows, self._model) for rows in by_length.values()]

    def release(self, request_ids: Iterable[str]) -> None:
        """Drop these rows and their keys and values."""
        gone = set(request_ids)
        if not gone:
            return
        for cohort in self._cohorts:
            kept = [i for i, row in enumerate(cohort.rows) if row.request.request_id not in gone]
            if len(kept) < len(cohort.rows):
                cohort.keep(kept)
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]

    @torch.no_grad()
    def step(self) -> Sequence[DecodedToken]:
        """Run the model once per cohort."""
        return [token for cohort in self._cohorts for token in cohort.step()]

    def load(self, staged: StagedWeights) -> None:
        """Copy the tensors into the model, all of them or none.

        Raises:
            WeightLoadError: if names or shapes are not those of the model.
        """
        pairs = _match(self._model.state_dict(), staged.tensors)
        with torch.no_grad():
            for target, value in pairs:
                target.copy_(value)
        if self._kv == "recompute":
            self._forget_caches()

    def sleep(self, weights: SleepPolicy) -> None:
        """Forget keys and values, and move the weights to the host or free them."""
        self._forget_caches()
        if weights == "keep":
            torch.nn.Module.to(self._model, "cpu")
            return
        for name, parameter in self._model.named_parameters():
            self._given_up[name] = parameter.shape
            parameter.data = parameter.new_empty(0)

    def wake(self) -> None:
        """Move the weights back, or make room for them."""
        for name, parameter in self._model.named_parameters():
            if name in self._given_up:
                parameter.data = parameter.new_empty(self._given_up[name])
        self._given_up.clear()
        torch.nn.Module.to(self._model, self._device)

    def _forget_caches(self) -> None:
        for cohort in self._cohorts:
            cohort.forget_cache()


def _longest(model: PreTrainedModel) -> int:
    """Return how many tokens a model was made for."""
    found: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not found:
        raise EngineStartError(
            f"{type(model).__name__} does not tell its longest context: set context_length"
        )
    return found


def _cache_name(model: PreTrainedModel) -> str:
    """Return the argument by which a model is given what it keeps of the tokens before.

    One that has none would begin with each token anew, without a word.
    """
    named = inspect.signature(model.forward).parameters
    for name in ("past_key_values", "cache_params"):  # of attention, and of Mamba's states
        if name in named:
            return name
    raise EngineStartError(
        f"{type(model).__name__} keeps what it has read in a way of its own, which the "
        "transformers engine does not know: use vLLM, if it has the model"
    )


def _match(
    targets: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    unknown = sorted(set(values) - set(targets))
    if unknown:
        raise WeightLoadError(f"{len(unknown)} tensors that the model does not have: {unknown[:3]}")
    written = {targets[name].data_ptr() for name in values}
    missing = sorted(n for n in targets if n not in values and targets[n].data_ptr() not in written)
    if missing:  # tied parameters share storage and need only one of their names
        raise WeightLoadError(f"{len(missing)} tensors of the model are missing: {missing[:3]}")
    for name, value in values.items():
        if targets[name].shape != value.shape:
            raise WeightLoadError(
                f"{name}: the model has {tuple(targets[name].shape)}, got {tuple(value.shape)}"
            )
    return [(targets[name], value) for name, value in values.items()]


async def start_transformers_engine(
    setup: EngineSetup,
    *,
    dtype: str,
    device: str,
    kv: KvPolicy,
    context_length: int,
    max_running: int,
) -> InProcessEngine:
    """Load the model in a thread and put an engine over it; arguments as in `TransformersConfig`.

    Raises:
        EngineStartError: if there is no such model.
        EngineMemoryError: if the device has no room for it.
    """
    model = await _load_model(setup, dtype, device)
    decoder = ModelDecoder(model, kv=kv, context_length=context_length)
    return InProcessEngine(
        decoder, version=setup.version, source=setup.weight_source, max_running=max_running
    )


async def start_transformers_scorer(
    setup: EngineSetup, *, dtype: str, device: str, context_length: int
) -> ModelScorer:
    """Load a model that scores what it is given; arguments as in `TransformersConfig`.

    Raises:
        EngineStartError: if there is no such model.
        EngineMemoryError: if the device has no room for it.
    """
    model = await _load_model(setup, dtype, device)
    return ModelScorer(model, context_length=context_length or _longest(model))


async def _load_model(setup: EngineSetup, dtype: str, device: str) -> PreTrainedModel:
    try:
        model = await asyncio.to_thread(
            AutoModelForCausalLM.from_pretrained,
            setup.model,
            dtype=getattr(torch, dtype),
            attn_implementation=attention_of(setup.model),
        )
    except (OSError, ValueError) as error:
        raise EngineStartError(f"cannot load the model {setup.model}: {error}") from error
    try:
        torch.nn.Module.to(model, device)
    except torch.OutOfMemoryError as error:
        raise EngineMemoryError(
            f"{device} has no room for {setup.model} in {dtype}: {error}\n"
            "free memory that others use, or set dtype to one of 16 bits"
        ) from error
    return model.eval()
