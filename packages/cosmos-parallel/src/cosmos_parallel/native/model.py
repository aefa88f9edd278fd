"""A torchtitan model that is called as a causal language model of transformers is."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from cosmos_parallel.errors import PictureError
from cosmos_parallel.families import is_tied
from cosmos_parallel.native.names import HfNames
from cosmos_parallel.native.stage import Stage
from cosmos_parallel.pipeline import Joined
from cosmos_parallel.sequences import kept_columns, padded_rows
from cosmos_parallel.value_head import VALUE_HEAD

if TYPE_CHECKING:
    from collections.abc import Generator

    from transformers import PretrainedConfig
    from transformers.modeling_outputs import CausalLMOutput

Body = Callable[[Tensor, Tensor], Tensor]


class NativeCausalLM(nn.Module):
    """Stages of a decoder on this rank, and its output head where it has it.

    Attributes:
        config: the Hugging Face config.
        decoder: every parameter and buffer of this rank, under torchtitan's names whatever the
            layout; not called itself.
        stages: one, with all layers; several or a part of them under pipeline parallelism.
        least_rows: batches of fewer rows get empty ones.
        tells_samples_apart: every layer goes by the samples of a row, those with a state too.
        runs_packed_rows: and at no more cost than by samples themselves.
        body: from padded ``[B, T']`` tokens and positions to hidden states; exchanged by what runs
            the stages, see `running`.
    """

    tells_samples_apart = True

    def __init__(
        self,
        config: "PretrainedConfig",
        stages: Sequence[Stage],
        head: nn.Linear | None,
        *,
        multiple_of: int,
        hf_names: HfNames,
    ) -> None:
        """Join what a rank has.

        Args:
            config: the Hugging Face config.
            stages: those of this rank.
            head: the output head, on the rank of the last stage.
            multiple_of: lengths are padded to this: ``cp x tp``.
            hf_names: what files call the tensors.
        """
        super().__init__()
        self.config = config
        self.decoder = _joined(stages, head)
        self.stages = tuple(stages)  # a tuple, so that nothing is registered twice
        if stages[-1].value_head is not None:
            self.add_module(VALUE_HEAD, stages[-1].value_head)
        self.multiple_of = multiple_of
        self.least_rows = 1
        self.runs_packed_rows = False
        self.hf_names = hf_names
        self.body: Body = self._run_stages
        # stands for a head that another rank has, where a loss only looks whether there is one
        self._heads = (head or nn.Linear(1, 1, bias=False, device="meta"),)

    def get_output_embeddings(self) -> nn.Linear:
        """Return the output head."""
        return self._heads[0]

    def tie_weights(self) -> None:
        """Let embedding and output head be one parameter."""
        self.stages[0].decoder.tok_embeddings.weight = self.get_output_embeddings().weight

    def get_input_embeddings(self) -> nn.Module | None:
        """Return the embedding, if this rank has it."""
        if not self.stages[0].is_first:
            return None
        # of some models a norm goes with it
        parts = self.decoder.get_submodule("tok_embeddings").modules()
        return next(part for part in parts if isinstance(part, nn.Embedding))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        logits_to_keep: int | Tensor = 0,
        use_cache: bool = False,
        **pictures: Any,
    ) -> "CausalLMOutput":
        """Return logits ``[B, T, vocab]`` of next tokens; rows are padded on the right if at all.

        Args:
            input_ids: ``[B, T]``.
            position_ids: ``[B, T]``; 0 where a packed sample begins. ``None`` for one per row.
            logits_to_keep: the last so many columns (0 for all), or the columns themselves.
            use_cache: must be false.
            pictures: must not be there.

        Raises:
            PictureError: if there are pictures.
        """
        if pictures:
            raise PictureError(
                f"torchtitan's implementation takes no {', '.join(sorted(pictures))}: train a "
                f"{self.config.model_type} model on pictures with that of transformers, without pp "
                "and ep"
            )
        from transformers.modeling_outputs import CausalLMOutput

        assert not use_cache, "a model in training keeps no cache"
        rows, length = input_ids.shape
        tokens, positions = padded_rows(input_ids, position_ids, self.multiple_of)
        extra = (0, 0, 0, max(0, self.least_rows - rows))
        hidden = self.body(functional.pad(tokens, extra), functional.pad(positions, extra, value=1))
        logits = self._heads[0](kept_columns(hidden[:rows], length, logits_to_keep))
        return CausalLMOutput(logits=logits.full_tensor() if _is_split(logits) else logits)

    @contextmanager
    def running(self, body: Body) -> "Generator[None]":
        """Take hidden states from ``body`` inside the block."""
        self.body = body
        try:
            yield
        finally:
            self.body = self._run_stages

    def to_hf(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Rename tensors to Hugging Face names; experts become views of their own matrices.

        Args:
            tensors: by the names of ``state_dict``, whole or on the meta device.
        """
        return self.hf_names.to_hf(
            {name.removeprefix("decoder."): value for name, value in tensors.items()},
            leaving=frozenset(("lm_head.weight",) if is_tied(self.config) else ()),
        )

    def _run_stages(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.stages[0](tokens, positions)


def _joined(stages: Sequence[Stage], head: nn.Module | None) -> nn.Module:
    joined = Joined()
    layers = nn.ModuleDict()
    for stage in stages:
        layers.update(dict(stage.decoder.layers.items()))
    for name, child in (
        ("tok_embeddings", stages[0].decoder.tok_embeddings),
        ("layers", layers),
        ("norm", next((stage.decoder.norm for stage in stages if stage.is_last), None)),
        ("lm_head", head),
    ):
        if child is not None:
            joined.add_module(name, child)
    return joined


def _is_split(logits: Any) -> bool:
    return isinstance(logits, DTensor)
