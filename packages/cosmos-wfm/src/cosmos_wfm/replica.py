"""A model that only draws samples, with weights that somebody else trains."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from cosmos_parallel import ParallelConfig, TrainingMesh, build_mesh
from cosmos_wfm.denoiser import shard_denoiser
from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.loading import load_adapter
from cosmos_wfm.prompts import read_prompts
from cosmos_wfm.rl import rollout_task, step_parts
from cosmos_wfm.rl_config import DiffusionRlConfig
from cosmos_wfm.rollout_wire import RolloutMessage, RolloutOrder
from cosmos_wfm.scoring import PATIENCE_S, GuardedScorer, Scorer
from cosmos_wfm.tuning import LoraTuning

OnPart = Callable[[str], None]
"""Told what a replica begins with, in words."""


def look_away(part: str) -> None:
    """Do nothing with what a replica is at."""


class RolloutReplica:
    """Draws micro-batches of a run as the run itself would.

    Attributes:
        weights: those that change: the adapters, or all; a new version is written into them.
    """

    def __init__(
        self,
        config: DiffusionRlConfig,
        scorer: Scorer,
        *,
        mesh: TrainingMesh | None = None,
        on_part: OnPart = look_away,
    ) -> None:
        """Load model and prompts.

        Args:
            config: of the run, with ``disaggregated``.
            scorer: computes the rewards, in this process or elsewhere.
            mesh: of this process by itself, with its device; ``None`` for the CPU. In bfloat16 it
                needs a process group of one, as the run does: samples whose log-probabilities the
                run takes again have to be computed as it computes.
            on_part: told of each part of drawing a micro-batch as it begins: embedding its prompts,
                each pass of the denoiser, what follows the last.

        Raises:
            PipelineError: if the model cannot be loaded.
            WfmConfigError: if there are too few prompts, the run draws its samples itself, or it
                computes in bfloat16 and there is no process group.
        """
        if config.disaggregated is None:
            raise WfmConfigError(
                "rl: this run has no table [disaggregated]: it draws samples itself"
            )
        self._config = config
        patience_s = min(PATIENCE_S, config.disaggregated.stall_s / 4)  # rewards are no stall
        self._scorer = GuardedScorer(scorer, config.scorer_deadline_s, patience_s=patience_s)
        self._parts = step_parts(config, 1)
        self._prompts = read_prompts(Path(config.prompts), config.groups_per_step)
        self._adapter = load_adapter(config.model)
        config.sampler.check_model(self._adapter)
        config.tuning.prepare(self._adapter, seed=config.seed)
        mesh = mesh or build_mesh(ParallelConfig())
        self._adapter.pipeline.to(mesh.process.device)
        shard_denoiser(self._adapter.transformer, self._adapter.blocks, mesh, config.compute)
        self._on_part = on_part
        denoiser = self._adapter.transformer
        denoiser.register_forward_pre_hook(self._pass_begins)
        denoiser.register_forward_hook(self._pass_is_over)
        named = dict(denoiser.named_parameters())
        if isinstance(config.tuning, LoraTuning):
            named = {name: weight for name, weight in named.items() if weight.requires_grad}
        # The parameters stay what training makes of them: adapters ask which are trained.
        self.weights: Mapping[str, Tensor] = {name: w.detach() for name, w in named.items()}

    def draw(self, order: RolloutOrder) -> RolloutMessage:
        """Draw a micro-batch with the weights as they are; its rewards may come later."""
        prompts = self._parts.prompts(self._prompts, order.step, order.numbers)
        self._on_part("embedding prompts")
        task = rollout_task(self._config, self._adapter, order.step, self._scorer)
        if isinstance(self._adapter.transformer, FSDPModule):
            self._adapter.transformer.reshard()  # what FSDP2 has gathered is of the version before
        rollout = task.run(self._adapter.transformer, order.numbers, prompts)
        return RolloutMessage(step=order.step, place=order.place, rollout=rollout)

    def _pass_begins(self, module: nn.Module, args: object) -> None:
        self._on_part("a pass of the denoiser")

    def _pass_is_over(self, module: nn.Module, args: object, output: object) -> None:
        self._on_part("decoding and rewards")
