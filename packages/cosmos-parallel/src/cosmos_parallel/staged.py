"""A model of transformers on the ranks of a pipeline, and how it is loaded."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cosmos_parallel.errors import MeshError
from cosmos_parallel.families import is_tied
from cosmos_parallel.generic_weights import fill_parts
from cosmos_parallel.mesh import TrainingMesh
from cosmos_parallel.packed_attention import runs_packed_rows
from cosmos_parallel.passes import LossFunction, LossResult, Pass, Scores
from cosmos_parallel.pipeline import (
    Call,
    Joined,
    Pipeline,
    called_alone,
    divide_layers,
    stages_of_rank,
)
from cosmos_parallel.rotary_axes import RotaryAxes, has_rotary_axes
from cosmos_parallel.sharding import keep_gathered, shard_module
from cosmos_parallel.stage_part import StagePart
from cosmos_parallel.tied_ends import TiedEnds
from cosmos_parallel.value_head import VALUE_HEAD

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput

Body = Callable[[Call], Tensor]
_OF_ALL_STAGES = frozenset({"attention_mask", "inputs_embeds", "labels", "past_key_values"})


class StagedCausalLM(nn.Module):
    """The stages that one pipeline rank has of a model; it cannot be called by itself.

    Attributes:
        config: the Hugging Face config.
        stages: of this rank.
        tells_samples_apart: whether rows may hold several samples.
        runs_packed_rows: and at no more cost than by samples themselves.
    """

    def __init__(
        self, stages: Mapping[int, StagePart], mesh: TrainingMesh, hidden_dtype: torch.dtype
    ) -> None:
        """Join what a rank has, under the names that a whole model has.

        Args:
            stages: by their index along the whole pipeline, in the order of the layers.
            mesh: the ranks of the replica.
            hidden_dtype: what goes between stages.
        """
        super().__init__()
        self.stages = tuple(stages.values())  # a tuple, so that nothing is registered twice
        models = [stage.model for stage in self.stages]
        self.config: PretrainedConfig = models[0].config
        # whose transformers asks as it gives the tensors of an export their files' names
        self._weight_conversions = getattr(models[0], "_weight_conversions", None)
        # as peft leaves it in a model with adapters
        self.peft_config: dict[str, Any] = getattr(models[0], "peft_config", {})
        self.tells_samples_apart = self.runs_packed_rows = runs_packed_rows(models[0])
        head = models[-1].get_output_embeddings() if self.stages[-1].is_last else None
        self._ends: TiedEnds | None = None
        if is_tied(self.config):
            self._ends = TiedEnds(self.get_input_embeddings(), head, mesh)
        _join(self, models, apart=head if self._ends else None)
        # stands for a head that another rank has, where a loss only looks whether there is one
        self._heads = (head or nn.Linear(1, 1, bias=False, device="meta"),)
        self._axes = RotaryAxes(self.config) if has_rotary_axes(self.config) else None
        self._body: Body = _refuse
        self._shares = mesh.config.cp
        self._pipeline = Pipeline(
            stages,
            mesh,
            width=self.config.get_text_config().hidden_size,
            shares=self._shares,
            hidden_dtype=hidden_dtype,
        )

    def get_output_embeddings(self) -> nn.Module:
        """Return the output head."""
        return self._heads[0]

    def get_input_embeddings(self) -> nn.Module | None:
        """Return the embedding, if this rank has it."""
        first = self.stages[0]
        return first.model.get_input_embeddings() if first.is_first else None

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """Return the part that sees, on the rank of the first stage; elsewhere this module."""
        first = self.stages[0]
        return first.model.get_encoder(modality=modality) if first.is_first else self

    def save_pretrained(self, directory: Path, *, state_dict: Mapping[str, Tensor]) -> None:
        """Write what belongs to a model beside its weights, as transformers' own do."""
        self.stages[0].model.save_pretrained(directory, state_dict=dict(state_dict))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        logits_to_keep: int | Tensor = 0,
        use_cache: bool = False,
        **pictures: Any,
    ) -> "CausalLMOutput":
        """Return what the whole model returns; rows are padded on the right if at all.

        Args:
            input_ids: ``[B, T]``.
            position_ids: as the model takes them.
            logits_to_keep: the last so many columns (0 for all), or the columns themselves.
            use_cache: must be false.
            pictures: as the model takes them.

        Raises:
            MeshError: if there is a mask, or what else later stages would not be given.
        """
        assert not use_cache, "a model in training keeps no cache"
        others = told_beside(pictures)
        if position_ids is None and self._axes is not None and "image_grid_thw" in others:
            # only the first stage has what would tell the others where pictures are
            position_ids = self._axes.positions(
                others["mm_token_type_ids"], pictures=[others["image_grid_thw"]]
            )
        # pictures of all passes are kept where they are looked at only
        call = Call(input_ids, position_ids, others if self.stages[0].is_first else {})
        rows, length = input_ids.shape
        hidden = self._body(padded_call(call, rows, length + -length % self._shares))[:, :length]
        keeps_all = isinstance(logits_to_keep, int) and not logits_to_keep
        keep = {} if keeps_all else {"logits_to_keep": logits_to_keep}
        return self.stages[-1].outputs(call, hidden, keep)

    @property
    def least_passes(self) -> int:
        """How many passes fill the pipeline."""
        return self._pipeline.least_passes

    def run_passes(
        self,
        passes: Sequence[Pass[Any]],
        loss: LossFunction[Any],
        on_result: Callable[[Pass[Any], LossResult], None],
    ) -> None:
        """Run all passes through the pipeline; see ``Pipeline.run_passes``."""
        with self._running():
            self._pipeline.run_passes(self, passes, loss, on_result)
        if self._ends is not None and torch.is_grad_enabled():
            self._ends.add_gradient()

    def score_passes(
        self, passes: Sequence[Pass[Any]], score: Callable[[nn.Module, Any], Scores]
    ) -> list[Scores]:
        """Return the scores of all passes; see ``Pipeline.score_passes``."""
        with self._running():
            return self._pipeline.score_passes(self, passes, score)

    @contextmanager
    def _running(self) -> Generator[None]:
        """Inside the block, have a head that is the embedding; behind it, hold on to no batch."""
        if self._ends is not None:
            self._ends.copy_weight()
        try:
            yield
        finally:
            for stage in self.stages:
                stage.calls = ()

    @contextmanager
    def answering(self, answer: Body) -> Generator[None]:
        """Inside the block, take hidden states from ``answer``."""
        self._body = answer
        try:
            yield
        finally:
            self._body = _refuse

    def laid_out(self, calls: Sequence[Call], rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Return tokens of all calls, padded, and their numbers; the stages know the rest."""
        padded = [padded_call(call, rows, columns) for call in calls]
        for stage in self.stages:
            stage.calls = padded
        return torch.cat([call.tokens for call in padded]), torch.arange(len(padded))


def told_beside(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a model's arguments that are given, all of which are for its first stage.

    Raises:
        MeshError: if one of them is for others too.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if wrong := sorted(_OF_ALL_STAGES & given.keys()):
        raise MeshError(
            f"pp: call the model with input_ids, position_ids and pictures, not {', '.join(wrong)}"
        )
    return given


def _refuse(call: Call) -> Tensor:
    raise called_alone()


def load_staged(
    make: Callable[[], "PreTrainedModel"],
    path: Path,
    mesh: TrainingMesh,
    *,
    blocks: Callable[[nn.Module], Sequence[nn.Module]],
    compute_dtype: torch.dtype | None,
) -> StagedCausalLM:
    """Load the stages of this rank; every rank calls.

    Args:
        make: returns the whole model on the meta device, ready to be cut.
        path: directory in Hugging Face form.
        mesh: the ranks of the replica.
        blocks: of a model, what FSDP2 gathers at a time.
        compute_dtype: see `shard_module`.

    Raises:
        MeshError: if the model cannot be cut.
        ModelMismatchError: if the files do not hold what the config describes.
    """
    degrees = mesh.config
    stages: dict[int, StagePart] = {}
    mine = stages_of_rank(
        mesh.process.rank // mesh.ranks_per_stage,
        degrees.pp,
        num_stages=degrees.num_stages,
        returning=degrees.pp_schedule == "ZBVZeroBubble",
    )
    for index in sorted(mine):
        model = make()
        num_layers = int(model.config.get_text_config().num_hidden_layers)
        head = head_of(model)
        layers = divide_layers(num_layers, degrees.num_stages)[index]
        stage = StagePart(model, layers, num_layers, mesh.context_group)
        units = list(blocks(model))
        if stage.is_last:
            units.append(head)  # called when the stage has run
        shard_module(stage, mesh, blocks=units, compute_dtype=compute_dtype)
        keep_gathered(stage)
        apart: set[str] = set()
        if is_tied(model.config):
            apart = {f"{name}.weight" for name, part in model.named_modules() if part is head}
        fill_parts(model, path, mesh.process.device, apart=apart)
        stages[index] = stage
    check_trained(stages, mesh)
    own = next(next(iter(stages.values())).parameters()).dtype
    hidden_dtype = compute_dtype or own
    like = torch.empty(0, dtype=hidden_dtype, device=mesh.process.device)
    for stage in stages.values():
        stage.check_entry(like)
    return StagedCausalLM(stages, mesh, hidden_dtype)


def head_of(model: "PreTrainedModel") -> nn.Module:
    """Return the output head of a whole model.

    Raises:
        MeshError: if it has none, or one that is more than the embedding's matrix where it is that.
    """
    head: nn.Module | None = model.get_output_embeddings()
    if head is None:
        raise MeshError(f"pp: {type(model).__name__} has no output head behind its layers")
    if is_tied(model.config) and len(list(head.parameters())) > 1:
        raise MeshError(
            f"pp: the output head of {type(model).__name__} is its embedding's matrix and a bias, "
            "of which the last stage has a copy alone; use tp and dp_shard"
        )
    return head


def check_trained(stages: Mapping[int, StagePart], mesh: TrainingMesh) -> None:
    """Refuse, on every rank, a stage with nothing to train: no gradient would come out of it."""
    idle = torch.zeros(mesh.config.num_stages, dtype=torch.int64, device=mesh.process.device)
    for index, stage in stages.items():
        idle[index] = not any(parameter.requires_grad for parameter in stage.parameters())
    found = mesh.max_(idle).nonzero()
    if len(found):
        raise MeshError(
            f"pp: all that stage {int(found[0])} of {mesh.config.num_stages} has is frozen; freeze "
            "less, or use fewer stages"
        )


def padded_call(call: Call, rows: int, columns: int) -> Call:
    """Return a call with rows of one sample, and columns behind the last sample of each, added.

    What is told of each token is 0 there.
    """
    shape = call.tokens.shape
    more = (0, columns - shape[1], 0, rows - shape[0])
    if not any(more):
        return call
    others = {
        name: functional.pad(value, more)
        if isinstance(value, Tensor) and value.shape == shape
        else value
        for name, value in call.others.items()
    }
    positions = call.positions
    if positions is not None:
        positions = _counted_on(positions, rows, columns)
    return Call(functional.pad(call.tokens, more), positions, others)


def _counted_on(positions: Tensor, rows: int, columns: int) -> Tensor:
    """Return positions [..., rows, columns] in which the last sample of a row goes on."""
    count = torch.arange(columns, dtype=positions.dtype, device=positions.device)
    behind = positions[..., -1:] + 1 + count[: columns - positions.shape[-1]]
    added = count.expand(*positions.shape[:-2], rows - positions.shape[-2], columns)
    return torch.cat([torch.cat([positions, behind], dim=-1), added], dim=-2)


def _join(target: nn.Module, parts: Sequence[nn.Module], *, apart: nn.Module | None = None) -> None:
    """Register below ``target`` what parts of one model have, each under its own name.

    Args:
        target: of the same type as the parts, or a `Joined`.
        parts: of the same name each.
        apart: left out.
    """
    for name in dict.fromkeys(name for part in parts for name, _ in part.named_children()):
        found = [child for part in parts for own, child in part.named_children() if own == name]
        held = [
            child for child in found if child is not apart and any(True for _ in child.parameters())
        ]
        if name == VALUE_HEAD:
            target.add_module(name, (held or found)[0])
        elif len(held) == 1:
            target.add_module(name, held[0])
        elif held:
            joined = Joined()
            _join(joined, held, apart=apart)
            target.add_module(name, joined)
