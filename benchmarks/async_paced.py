"""An engine and a learner that take the time they are told, around weights that really move.

What they do and when goes into spans; everything between them, from the queues to the swap at a
token boundary, is the system's own.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from async_learner import TinyLearner, sleep_until
from async_waits import Waits

from cosmos_algos import GrpoConfig
from cosmos_app.roles.publication import Publication, publish_together
from cosmos_app.roles.weights import ReceivedWeights
from cosmos_app.step_share import StepShare, share_of_step, step_statistics
from cosmos_core.lineage import is_on_line
from cosmos_core.messages import Role, Train
from cosmos_core.rundir import write_atomic
from cosmos_core.simulation import Diary, SystemConfig, step_taken, write_log
from cosmos_core.trajectory import Trajectory
from cosmos_parallel import ReplicaLostError
from cosmos_rollout import GenerationRequest, SleepPolicy, StagedWeights
from cosmos_rollout.engines.in_process import DecodedToken
from cosmos_weightsync import SenderConfig, WeightSender

GROUPS = "groups.jsonl"
"""The groups of each step that a `PacedTrainer` took, in the order in which it took them."""
_CHECKPOINT = "paced.json"
_LATEST_S = 0.25
_TOKEN = 5


def open_diary(role: Role, replica: str, folder: Path) -> Diary:
    """Begin a diary that is written as things end, so that who is killed leaves what it had done.

    Args:
        role: of the replica.
        replica: its name.
        folder: of the run's diaries.
    """
    folder.mkdir(exist_ok=True)
    path = folder / f"{replica}-{os.getpid()}.jsonl"
    return Diary(role, replica, partial(write_log, path), start_s=time.monotonic())


class PacedWeights:
    """A `WeightSource` that takes at least the time of a push."""

    def __init__(self, source: ReceivedWeights, system: SystemConfig) -> None:
        self._source = source
        self._system = system

    def stage(self, version: int, endpoints: Sequence[str]) -> StagedWeights:
        """Fetch now, or, when the push is blocking, promise to."""
        later = Later(self, version, tuple(endpoints))
        return later if self._system.push == "blocking" else self.fetch(later)

    def fetch(self, later: "Later") -> StagedWeights:
        """Fetch, and wait until the push has taken its time."""
        begun = time.monotonic()
        staged = self._source.stage(later.version, later.endpoints)
        sleep_until(begun + self._system.push_s)
        return staged


class Later:
    """Weights that are fetched at the token boundary, while the engine stands still."""

    def __init__(self, source: PacedWeights, version: int, endpoints: tuple[str, ...]) -> None:
        self.version = version
        self.endpoints = endpoints
        self.tensors: Mapping[str, torch.Tensor] = {}
        self._source = source

    def fetch(self) -> None:
        """Have the tensors here."""
        staged = self._source.fetch(self)
        self.version, self.tensors = staged.version, staged.tensors


class PacedDecoder:
    """A `Decoder` that gives every request a token each ``step_s(width)`` seconds.

    A turn ends at the length that the workload has for its prompt and place in the group.

    Args:
        system: speed and lengths.
        diary: of what it does.
        waits: of what samples wait for while it does nothing.
    """

    def __init__(self, system: SystemConfig, diary: Diary, waits: Waits) -> None:
        self._system = system
        self._diary = diary
        self._waits = waits
        self._version = 0
        self._weights: dict[str, torch.Tensor] = {}
        self._left: dict[str, tuple[GenerationRequest, int]] = {}
        self._is_busy = False

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and response."""
        return 4096

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        return 1 << 20

    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        """Start these requests with the next step."""
        for request in requests:
            _, _, ordinal, _, sibling, *later = request.request_id.split(".")
            turns = self._system.turns(int(ordinal), int(sibling))
            self._left[request.request_id] = (request, turns[int(later[0]) if later else 0])

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget these requests."""
        for request_id in request_ids:
            self._left.pop(request_id, None)

    def step(self) -> Sequence[DecodedToken]:
        """Take the time of a step.

        With requests left from the step before, being called late is made up for: an engine in a
        process of its own would not have waited for us.
        """
        self._idle()
        width = len(self._left)
        if not width:
            return []
        end_s = self._diary.until_s + self._system.speed.step_s(width)
        sleep_until(end_s)
        if time.monotonic() - end_s > _LATEST_S:
            end_s = time.monotonic()
        self._diary.note("decode", end_s, version=self._version, width=width, tokens=width)
        tokens: list[DecodedToken] = []
        for request_id, (request, left) in self._left.items():
            end = request.sampling.stop_token_ids[0]
            tokens.append(DecodedToken(request_id, end if left == 1 else _TOKEN, -1.0))
            self._left[request_id] = (request, left - 1)
        self._is_busy = any(left for _, left in self._left.values())
        return tokens

    def load(self, staged: StagedWeights) -> None:
        """Copy new weights over those in use."""
        self._idle()
        if isinstance(staged, Later):
            staged.fetch()
            self._diary.note("paused_for_weights", time.monotonic(), version=self._version)
        for name, tensor in staged.tensors.items():
            if name in self._weights:
                self._weights[name].copy_(tensor)
            else:
                self._weights[name] = tensor.clone()
        self._version = staged.version
        self._diary.note("swap", time.monotonic(), version=self._version)

    def sleep(self, weights: SleepPolicy) -> None:
        """Never asked here: each side has devices of its own."""

    def wake(self) -> None:
        """Likewise."""

    def rest(self) -> None:
        """Account for the time until now; no step will come."""
        self._is_busy = False
        self._idle()

    def _idle(self) -> None:
        """Account for the time since the last step if there was nothing left to do then."""
        now = time.monotonic()
        if not self._is_busy and now > self._diary.until_s:
            for activity, end_s in self._waits.split(self._diary.until_s, now):
                self._diary.note(activity, end_s, version=self._version)


class PacedTrainer:
    """A `StepTrainer` that takes ``train_s`` for a step, and really publishes its weights.

    Args:
        system: how long it takes.
        learner: takes the steps.
        diary: of what it does.
        folder: where it keeps its checkpoint and the groups of its steps; it goes on from there.
    """

    def __init__(
        self, system: SystemConfig, learner: TinyLearner, diary: Diary, folder: Path
    ) -> None:
        self._folder = folder
        self.version, self._line = self._restore()
        self.num_passes = 0
        self.is_waiting = False
        self.problem = ""
        self.is_first_replica = True
        self._system = system
        self._diary = diary
        self._algorithm = GrpoConfig().build()
        self._learner = learner
        self._sender = WeightSender(learner.shards, rank=0, num_ranks=1, config=SenderConfig())
        self._sender.publish(self.version)
        self.publication = Publication(version=self.version)
        self._free_s = diary.until_s = time.monotonic()

    @property
    def endpoint(self) -> str:
        """Where the weights are served."""
        return self._sender.endpoint

    @property
    def lineage(self) -> int:
        """That of the weights it holds."""
        return len(self._line)

    def is_lost_on(self, line: Sequence[int]) -> bool:
        """Whether a run that has this line has fallen back from the weights held here."""
        return not is_on_line(line, self.lineage, self.version)

    def follow(self, line: tuple[int, ...], saved: int = 0) -> bool:
        """Go on as the run does; return whether it does so as these weights."""
        del saved
        if len(line) < self.lineage:
            return False
        assert not self.is_lost_on(line), "the only policy has lost its weights"
        self._line = line
        return True

    def meet(self, step: int) -> int:
        """There is nobody to meet."""
        return step

    def lose(self, error: ReplicaLostError) -> None:
        """Nobody can be lost."""
        raise error

    def share(self, train: Train) -> StepShare:
        """Return the whole step."""
        return share_of_step(train, self._algorithm, index=0, num_shares=1)

    def train(
        self, train: Train, share: StepShare, trajectories: Sequence[Trajectory]
    ) -> dict[str, float]:
        """Take a step, padded to its time, and publish the weights."""
        self._wait_for_push()
        begun = time.monotonic()
        self._diary.note("wait_data", begun, version=train.step)
        self.num_passes += 1
        self._learner.step(
            share,
            trajectories,
            version=train.step,
            until_s=begun + self._system.train_s,
            passed=partial(self._diary.note, "fwd_bwd", version=train.step),
        )
        self._diary.note("optim", time.monotonic(), version=train.step)
        self.version = train.step + 1
        self.publish()
        done = time.monotonic()
        self._diary.note("push_exposed", done, version=self.version)
        if self._system.push == "blocking":
            self._free_s = done + self._system.push_s
        self._diary.took(step_taken(train, begun, done))
        taken = {"step": train.step, "groups": sorted({each.group for each in trajectories})}
        with (self._folder / GROUPS).open("a") as file:
            file.write(json.dumps(taken) + "\n")
        return step_statistics(train)

    def publish(self) -> Publication:
        """Publish the weights of now if there is room."""
        self.publication = publish_together(self._sender, self.version)
        return self.publication

    def settle_end(self) -> None:
        """There is one replica."""

    def save(self, cut: bytes) -> str:
        """Keep what there is: a number, and the line it belongs to."""
        del cut
        path = self._folder / _CHECKPOINT
        begun = time.monotonic()
        write_atomic(path, json.dumps([self.version, self._line]))
        self._diary.note("wait_data", begun, version=self.version)
        self._diary.note("checkpoint", time.monotonic(), version=self.version)
        return str(path)

    def export(self, directory: Path) -> None:
        """There is nothing to keep."""
        del directory

    def close(self) -> None:
        """Stop serving weights."""
        self._sender.close()

    def _restore(self) -> tuple[int, tuple[int, ...]]:
        path = self._folder / _CHECKPOINT
        version, line = json.loads(path.read_text()) if path.exists() else (0, ())
        return version, tuple(line)

    def _wait_for_push(self) -> None:
        """Stand still while a blocking push goes on."""
        if self._free_s > self._diary.until_s:
            sleep_until(self._free_s)
            self._diary.note("push_exposed", self._free_s, version=self.version)
