"""One rank of a policy replica without its control loop: model, learner, weight sender.

All its methods block, and all ranks of a replica call them in the same order, each from the one
thread that owns the replica's communicators.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from cosmos_algos import ScoreField, TokenBatch, policy_loss, summarise_metrics
from cosmos_app.errors import RunError
from cosmos_app.exporting import export_trained
from cosmos_app.held import held_like, held_training
from cosmos_app.recipe import Recipe
from cosmos_app.roles.batch_plan import batch_plan
from cosmos_app.roles.critic import critic_figures, critic_step
from cosmos_app.roles.elastic import Gathering
from cosmos_app.roles.publication import Publication, publish_together
from cosmos_app.roles.put_away import PutAway
from cosmos_app.roles.quantised import published_shards
from cosmos_app.roles.run_checkpoints import RunCheckpoints
from cosmos_app.roles.step_trainer import Seat
from cosmos_app.roles.weights import sender_config
from cosmos_app.step_share import (
    StepShare,
    batch_sizes,
    batches_of_share,
    share_of_step,
    step_statistics,
)
from cosmos_app.token_scorers import scorers_of
from cosmos_core.lineage import is_on_line
from cosmos_core.messages import Train
from cosmos_core.trajectory import Trajectory
from cosmos_parallel import (
    FallenBackError,
    HasHfNames,
    Learner,
    LossResult,
    PictureReader,
    ReplicaGroup,
    ReplicaLostError,
    StepReport,
    Work,
    copy_weights,
    device_peak_flops,
    load_causal_lm,
    model_cost,
    tell_passes,
    throughput,
    whole_step,
)
from cosmos_weightsync import WeightSender


class Trainer:
    """The state of one rank: it trains, serves weights, saves and exports.

    Attributes:
        version: of the weights that the model holds; step k makes version k + 1.
        num_passes: forward passes so far; grows while a step is being worked on.
        problem: what was not finite in the last step, so that it changed nothing; empty if all was.
        publication: what became of the version that was last to be published.
    """

    def __init__(
        self,
        recipe: Recipe,
        model_dir: Path,
        seat: Seat,
        checkpoints: RunCheckpoints,
        others: ReplicaGroup | Gathering | None,
        *,
        pictures: PictureReader | None = None,
    ) -> None:
        """Load the model, or the newest checkpoint if there is one, and start to serve it.

        Args:
            recipe: of the run.
            model_dir: what is trained.
            seat: this rank's share; of the first step, where replicas come and go.
            checkpoints: of the run.
            others: the other policy replicas, which are always the same, or come and go.
            pictures: what shows pictures to the model, if any may come.
        """
        self.num_passes = 0
        self.problem = ""
        self._recipe = recipe
        self._seat = seat
        self._checkpoints = checkpoints
        self._model_dir = model_dir
        self._algorithm = recipe.algorithm.build()
        self._model = load_causal_lm(model_dir, seat.mesh, held_training(recipe))
        self._learner = Learner(
            self._model,
            recipe.learner,
            mesh=seat.mesh,
            replica_group=None if isinstance(others, Gathering) else others,
        )
        self._gathering = others if isinstance(others, Gathering) else None
        self._kl = self._algorithm.objective.kl
        self._reference = self._frozen("reference_logprobs", model_dir)
        if self._kl.reset_every:
            self._learner.companion = self._reference
        self.version, self._line = checkpoints.load(self._learner)
        self._plan = batch_plan(self._model, recipe, pictures)
        self._cost = model_cost(self._model, seat.mesh)
        self._loss = policy_loss(recipe.algorithm)
        teacher = None if recipe.teacher.is_beside else recipe.model.teacher
        self._teacher = self._frozen("teacher_logprobs", teacher)
        self._scorers = scorers_of(self._algorithm, self._reference, self._teacher)
        tell_passes(self._count_pass, self._model, self._reference, self._teacher)
        self._sender = self._serve()
        self.publication = Publication(version=self.version)

    @property
    def is_waiting(self) -> bool:
        """Whether a step that it works on waits for other replicas."""
        others = self._learner.replica_group
        return others is not None and others.is_waiting

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank's replica is the one that writes checkpoints and exports."""
        return self._seat.replica_index == 0

    @property
    def endpoint(self) -> str:
        """Where this rank serves its shards."""
        return self._sender.endpoint

    @property
    def lineage(self) -> int:
        """That of the weights which the model holds."""
        return len(self._line)

    def is_lost_on(self, line: Sequence[int]) -> bool:
        """Whether a run that has this line has fallen back from the weights held here."""
        return not is_on_line(line, self.lineage, self.version)

    def follow(self, line: tuple[int, ...], saved: int = 0) -> bool:
        """Go on as the run does; return whether it does so as these weights, not as newer ones.

        Args:
            line: of the run, as an order tells it.
            saved: version of the newest checkpoint, if the run has just fallen back.

        Raises:
            FallenBackError: if the weights held here are lost, or older than a checkpoint.
        """
        if len(line) < self.lineage:
            return False
        if self.is_lost_on(line) or self.version < saved:
            raise FallenBackError(
                f"version {self.version} of lineage {self.lineage} is lost: the run has fallen "
                f"back to versions {list(line)}, and checkpoint {saved}; this replica begins again"
            )
        if len(line) > self.lineage and self._gathering is not None:
            self._gathering.leave_seat()
        self._line = line
        return True

    def meet(self, step: int) -> int:
        """Agree with the other replicas on the step to come, on weights that all of them have.

        Args:
            step: the one that is ordered, or the next if none is.

        Returns:
            The step that they take; later than ``step`` if that has been taken without this one.

        Raises:
            FallenBackError: if the others have fallen back from the weights held here.
            ReplicaLostError: if the others could not be met in time.
            RunError: if none of them has the weights that the step begins with.
        """
        if self._gathering is None:
            return step
        seat = self._gathering.meet(self._learner, self.version, self._line)
        self._seat = replace(self._seat, replica_index=seat.index, num_replicas=seat.size)
        is_newer, self._line = len(seat.line) > self.lineage, seat.line
        self.version = seat.step
        if seat.step < step and not is_newer:
            raise RunError(
                f"step {step} needs weights that died with a replica: {', '.join(seat.names)} "
                f"have those of step {seat.step}; going back to the last checkpoint"
            )
        return seat.step

    def lose(self, error: ReplicaLostError) -> None:
        """Note that the step in hand is void, for all who took part.

        Raises:
            ReplicaLostError: where replicas are always the same, who then begin anew together.
        """
        if self._gathering is None:
            raise error
        self._gathering.lose()

    def share(self, train: Train) -> StepShare:
        """Return the share of a step that this rank trains on."""
        return share_of_step(
            train,
            self._algorithm,
            index=self._seat.index,
            num_shares=self._seat.num_shares,
            mask_truncated=self._recipe.trainer.mask_truncated,
        )

    def train(
        self, train: Train, share: StepShare, trajectories: Sequence[Trajectory]
    ) -> dict[str, float]:
        """Take one step, `publish` it if asked; return its metrics, the same on every rank.

        Raises:
            ReplicaLostError: if a replica did not take part; nothing is updated.
        """
        batches = batches_of_share(share, trajectories, self._plan, policy_version=train.step)
        report = self._take([batch.to(self._seat.mesh.process.device) for batch in batches])
        self.problem = report.problem
        self.version = train.step + 1
        self._move_reference()
        if self._gathering is not None:
            self._gathering.take()
        published = self.publish().figures if train.publish else {}
        means = summarise_metrics(_without_sizes(report.metrics))
        return {
            **step_statistics(train, mask_truncated=self._recipe.trainer.mask_truncated),
            **_flat(means | critic_figures(means)),
            **self._speed(report),
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "lr": report.lr,
            "train_s": report.seconds,
            "num_passes": float(report.num_passes),
            "skipped": float(report.outcome != "updated"),
            "replicas": float(self._seat.num_replicas),
            **published,
        }

    def publish(self) -> Publication:
        """Publish the weights of now, or skip them where readers leave a rank no room."""
        self.publication = publish_together(self._sender, self.version)
        return self.publication

    def settle_end(self) -> None:
        """Settle which replica is the first of those that come and go, once there are no steps.

        Returns when this one is, or when another has written the checkpoint of this version.

        Raises:
            ReplicaLostError: if another is alive and has not written it in time.
        """
        if self._gathering is not None:
            is_first = self._claims(self._gathering, "end")
            self._seat = replace(self._seat, replica_index=0 if is_first else 1)

    def save(self, cut: bytes) -> str:
        """Write a checkpoint of the present version with the controller's cut; wait until durable.

        Only the first replica writes; the first of a step may still do what the first of the end is
        to do. The others return its path if it is there, and an empty one if they do not know.
        """
        write = partial(self._checkpoints.save, self.version - 1, self._learner, cut)
        if self._gathering is None:
            return write() if self.is_first_replica else ""
        found = self._checkpoints.path_for_all(self.version, self._line)
        if self.is_first_replica and not found and self._claims(self._gathering, "save"):
            return write()
        return found or self._checkpoints.path_for_all(self.version, self._line)

    def _claims(self, others: Gathering, what: str) -> bool:
        find = partial(self._checkpoints.path_of, self.version, self._line)
        return others.claims(f"{what} {self.lineage}.{self.version}", lambda: find() != "")

    def export(self, directory: Path) -> None:
        """Have one replica write the model in Hugging Face form, averaged if so kept, and adapters.

        Where they come and go, each is to call: others write it if the one that began to has died.
        """
        mesh, training = self._seat.mesh, self._recipe.model.training
        write = partial(
            export_trained, self._model, directory, mesh, base=self._model_dir, training=training
        )
        with self._learner.averaged():
            if self._gathering is not None:
                self._gathering.once(f"export {self.lineage}.{self.version}", write)
            elif self.is_first_replica:
                write()

    def belongings(self) -> PutAway:
        """Return what holds the device's memory, for a policy that shares its device."""
        models = (self._model, self._reference, self._teacher)
        held = [model for model in models if model is not None]
        ema = self._learner.ema
        averages = [] if ema is None else list(ema.averages.values())
        return PutAway(held, self._learner.optimizer, averages)

    def close(self) -> None:
        """Stop serving weights, and leave the other replicas if they can go on."""
        if self._gathering is not None:
            self._gathering.close()
        self._sender.close()

    def _serve(self) -> WeightSender:
        """Offer the present weights to whoever generates."""
        seat, process = self._seat, self._seat.mesh.process
        config = sender_config(self._recipe.weight_sync)
        sender = WeightSender(
            published_shards(self._model, self._recipe, process),
            rank=process.rank,
            num_ranks=process.world_size,
            config=replace(config, bind_host=seat.host, token=seat.token),
        )
        sender.publish(self.version)
        return sender

    def _take(self, batches: Sequence[TokenBatch]) -> StepReport:
        if not self._algorithm.scores_first:
            return self._learner.step(batches, self._loss_of, scorers=self._scorers)
        is_undone = self._gathering is not None and self._algorithm.epochs > 1
        with whole_step(self._learner) if is_undone else nullcontext():
            return critic_step(
                self._learner,
                batches,
                self._algorithm,
                value=self._algorithm.with_token_advantages,
                loss=self._loss_of,
                scorers=self._scorers,
            )

    def _move_reference(self) -> None:
        """Let the reference be the policy, if it is time."""
        is_due = self._kl.reset_every and self._kl.reference_version(self.version) == self.version
        if is_due and self._reference is not None:
            copy_weights(self._model, self._reference)

    def _loss_of(self, model: nn.Module, batch: TokenBatch) -> LossResult:
        """Sum the loss of a batch that has the scores it needs, and its sizes."""
        if self._recipe.teacher.is_beside and not batch.trainable.any():
            nothing = torch.zeros_like(batch.behaviour_logprobs)  # padding has no teacher
            batch = replace(batch, teacher_logprobs=nothing)
        result = self._loss(model, batch)
        return replace(result, metrics={**result.metrics, **batch_sizes(batch, self._model.config)})

    def _count_pass(self) -> None:
        self.num_passes += 1

    def _speed(self, report: StepReport) -> dict[str, float]:
        """Return tokens per second and rank, again in each update, share of places, and MFU."""
        tokens, places = report.metrics["batch/tokens"], report.metrics["batch/places"]
        work = Work(
            num_tokens=tokens,
            num_pairs=report.metrics["batch/pairs"],
            num_patches=report.metrics["batch/patches"],
            num_patch_pairs=report.metrics["batch/patch_pairs"],
        )
        speed = throughput(
            self._cost,
            work,
            rank_seconds=report.seconds / self._algorithm.epochs * self._seat.num_ranks,
            peak_flops=device_peak_flops(self._seat.mesh.process.device),
        )
        return {
            "tokens_per_s_per_rank": speed.tokens_per_s,
            "useful_tokens": tokens / places if places else 0.0,
            "mfu": speed.mfu,
        }

    def _frozen(self, needed_for: ScoreField, model_dir: Path | None) -> nn.Module | None:
        """Load a model that only scores, if the algorithm needs one; every rank calls.

        A reference that moves is held as the policy is: it has adapters where the policy has, which
        add nothing at first, and in the implementation that the policy has.
        """
        if needed_for not in self._algorithm.needs or model_dir is None:
            return None
        held = held_like(self._recipe)
        if needed_for != "reference_logprobs" or not self._kl.reset_every:
            held = replace(held, lora=None)
        else:
            is_native = isinstance(self._model, HasHfNames)
            held = replace(held, implementation="native" if is_native else "transformers")
        model = load_causal_lm(model_dir, self._seat.mesh, held)
        return model.requires_grad_(False)


def _without_sizes(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("batch/")}


def _flat(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name.replace("/", "_"): value for name, value in metrics.items()}
