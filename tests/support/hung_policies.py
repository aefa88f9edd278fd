"""Policy replicas that come and go, hang and come back, around a controller: a walk by chance.

Weights are known by all that they were trained on, so that the same number twice is noticed. What a
replica does is what `cosmos_app.roles` and `cosmos_parallel.elastic` do, without tensors or time.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from cosmos_core.control import Controller, ControllerConfig, StalenessConfig, ValidationPlan
from cosmos_core.control.books import audit
from cosmos_core.control.cut import line_of_cut, step_of_cut
from cosmos_core.control.rounds import SOURCE as VALIDATION
from cosmos_core.lineage import is_on_line
from cosmos_core.messages import (
    SCALED_DOWN,
    CancelGroup,
    CheckpointSaved,
    Command,
    Event,
    FallBack,
    Generate,
    GroupFinished,
    GroupId,
    LoadFailed,
    LoadVersion,
    Progress,
    ReplicaJoined,
    ReplicaLeft,
    SampleRef,
    ScaleRequested,
    StepFinished,
    Stop,
    StopRequested,
    Tick,
    Train,
    VersionLoaded,
    VersionPublished,
    decode_command,
    encode_message,
)

NUM_STEPS, GROUPS_PER_STEP, NUM_ROLLOUTS = 8, 2, 2
LONG_S = 30.0
Weights = tuple[tuple[int, ...], ...]
"""The prompts of each step that they were trained on."""
Line = tuple[int, ...]


@dataclass(frozen=True)
class Saved:
    weights: Weights
    line: Line

    @property
    def place(self) -> tuple[int, int]:
        """Lineage and version."""
        return len(self.line), len(self.weights)


@dataclass(eq=False)
class Process:
    name: str
    incarnation: str
    inbox: list[Command | str] = field(default_factory=list)
    is_alive: bool = True
    is_paused: bool = False
    is_done: bool = False


@dataclass(eq=False)
class Seats:
    """Members that take a step together: all of them or none."""

    epoch: int
    step: int
    members: "list[Policy]"
    ready: "set[str]" = field(default_factory=set)
    decision: str = ""


@dataclass(eq=False)
class Policy(Process):
    """One replica; ``joined`` is what it says of itself when it has to join again."""

    weights: Weights = ()
    line: Line = ()
    taken_in: int = -1
    joined: tuple[int, int] = (0, 0)
    served: Weights = ()
    order: Train | None = None
    seats: Seats | None = None
    saving: Saved | None = None
    stop: Stop | None = None

    @property
    def version(self) -> int:
        return len(self.weights)

    def is_lost_on(self, line: Line) -> bool:
        return not is_on_line(line, len(self.line), self.version)


@dataclass(eq=False)
class Rollout(Process):
    weights: Weights = ()
    has_joined: bool = False
    sampling: dict[GroupId, tuple[int, list[Weights]]] = field(default_factory=dict)
    reported: dict[tuple[GroupId, int], GroupFinished] = field(default_factory=dict)
    loading: list[LoadVersion] = field(default_factory=list)


class World:
    """The controller, its host and bus, a disk, a meeting place, and processes.

    Attributes:
        num_fallen_back: how often the run went back to older weights.
        num_from_rollouts: how often a rollout loaded weights from another.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        depth = self.rng.randint(0, 2)
        self.may_be_stopped = self.rng.random() < 0.2
        self.config = ControllerConfig(
            num_steps=NUM_STEPS,
            groups_per_step=GROUPS_PER_STEP,
            samples_per_group=2,
            num_policies=3,
            min_policies=self.rng.choice([1, 1, 1, 2]),
            staleness=StalenessConfig(
                depth=depth,
                bound=depth + self.rng.randint(0, 2),
                policy=self.rng.choice(["block", "drop", "count", "window"]),
            ),
            validation=ValidationPlan(
                num_prompts=self.rng.choice([0, 3]),
                before=self.rng.random() < 0.5,
                after=self.rng.random() < 0.5,
                every=self.rng.randint(0, 3),
            ),
            checkpoint_every=self.rng.choice([0, 2, 3]),
            max_attempts=10_000,
            lease_s=10.0,
            first_lease_s=20.0,
        )
        self.controller = Controller(self.config)
        self.now = 0.0
        self.num_fallen_back = self.num_from_rollouts = 0
        self.disk: list[Saved] = []
        self._count = itertools.count()
        self._epochs = itertools.count()
        self._events: list[tuple[str, str, Event]] = []
        self._newest: dict[str, Process] = {}
        self._all: dict[str, Process] = {}
        self._told_line: Line = ()
        self._tokens: dict[str, tuple[Weights, ...]] = {}
        self._claims: dict[tuple[int, int], Policy] = {}
        self._asked: list[Weights] = []
        for name in ("policy-0", "policy-1", "policy-2", "rollout-0", "rollout-1"):
            self._start(name)

    def go(self, turns: int, *, is_calm: bool = False) -> None:
        """Let things happen, one at a time; in a calm world nobody hangs or dies."""
        if is_calm:
            self._scale(NUM_ROLLOUTS, self.config.num_policies)
        for _ in range(turns):
            if self.controller.finished:
                return
            self._turn(is_calm=is_calm)

    # ---------------------------------------------------------------- what happens

    def _turn(self, *, is_calm: bool) -> None:
        rng = self.rng
        choice = rng.random()
        if choice < 0.55:
            self._act(rng.choice([p for p in self._alive() if not p.is_paused] or [None]))
        elif choice < 0.80:
            for _ in range(min(rng.randint(1, 4), len(self._events))):
                self._hear()
        elif choice < 0.88:
            self._meet()
        elif choice < 0.91:
            self._tick(rng.choice([0.5, 1.0, 2.0]))
        elif choice < 0.94:
            self._mend()
        elif choice < 0.975 and not is_calm:
            self._disturb()

    def _mend(self) -> None:
        """Start those that died again, or wake one that hangs."""
        paused = [process for process in self._alive() if process.is_paused]
        if self.rng.random() < 0.5 or not paused:
            self._revive(0.6)
        else:
            self.rng.choice(paused).is_paused = False

    def _scale(self, rollouts: int, policies: int) -> None:
        if not self.controller.finished:
            self._handle(ScaleRequested(rollouts=rollouts, policies=policies))

    def _intervene(self) -> None:
        """Ask for other numbers of replicas, or, seldom and in some worlds, for an end."""
        if self.may_be_stopped and self.rng.random() < 0.1:
            self._handle(StopRequested(reason="ctrl-c"))
        else:
            self._scale(self.rng.randint(1, NUM_ROLLOUTS), self.rng.randint(1, 3))

    def _disturb(self) -> None:
        """Kill a process, or have it hang; maybe until its lease is over, and the others die."""
        if self.rng.random() < 0.1:
            self._intervene()
            return
        if self.rng.random() < 0.3:
            self._tick(LONG_S)
            return
        kind = self.rng.choice([Policy, Policy, Policy, Rollout])
        there = [process for process in self._alive() if isinstance(process, kind)]
        if not there:
            return
        process = self.rng.choice(there)
        if self.rng.random() < 0.5:
            self._kill(process)
            return
        process.is_paused = True
        if kind is Policy and self.rng.random() < 0.6:
            self._tick(LONG_S)
            if self.rng.random() < 0.7:
                for other in self._policies():
                    if not other.is_paused and self.rng.random() < 0.9:
                        self._kill(other)
                self._revive(1.0)

    def _kill(self, process: Process) -> None:
        process.is_alive = False
        is_known = self.controller.incarnation_of(process.name) == process.incarnation
        if is_known and self.rng.random() < 0.7:
            self._handle(ReplicaLeft(replica=process.name, reason="killed"))

    def _revive(self, chance: float) -> None:
        for name, process in list(self._newest.items()):
            if not process.is_alive and not process.is_done and self.rng.random() < chance:
                self._start(name)

    def _tick(self, seconds: float) -> None:
        self.now += seconds
        for process in self._alive():
            if not process.is_paused and "join" not in process.inbox:
                self._say(process, Progress(replica=process.name, count=0))
        if self.rng.random() < 0.8:
            while self._events:
                self._hear()
        self._handle(Tick())
        self._told_line = self.controller.state.line

    def _start(self, name: str) -> None:
        incarnation = f"{name}#{next(self._count)}"
        if name.startswith("rollout"):
            process: Process = Rollout(name, incarnation)
        else:
            found = self._last_on(self._told_line)
            process = Policy(name, incarnation, weights=found.weights, line=found.line)
            process.served = found.weights
            process.joined = (process.version, len(found.line))
        self._newest[name] = self._all[incarnation] = process
        if isinstance(process, Policy) and self.rng.random() < 0.2:
            process.is_paused = True  # with what it found on the disk, before its first word
            process.inbox.append("join")
        else:
            self._join(process)

    def _last_on(self, line: Line) -> Saved:
        on_line = [saved for saved in self.disk if is_on_line(line, *saved.place)]
        return on_line[-1] if on_line else Saved((), ())

    def _end(self, process: Process, why: str, *, is_scaled_down: bool = False) -> None:
        process.is_alive, process.is_done = False, why == "stopped" and not is_scaled_down
        self._say(process, ReplicaLeft(replica=process.name, reason=why))

    # ---------------------------------------------------------------- the bus and the host

    def _join(self, process: Process) -> None:
        if isinstance(process, Policy):
            version, lineage = process.joined
            joined = ReplicaJoined(
                replica=process.name,
                role="policy",
                version=version,
                lineage=lineage,
                endpoints=(process.incarnation,),
                incarnation=process.incarnation,
            )
        else:
            assert isinstance(process, Rollout)
            joined = ReplicaJoined(
                replica=process.name,
                role="rollout",
                slots=3,
                version=len(process.weights),
                endpoints=() if process.has_joined else (process.incarnation,),
                host=process.name,  # each on a machine of its own
                incarnation=process.incarnation,
            )
            process.has_joined = True
        self._say(process, joined)

    def _say(self, process: Process, event: Event) -> None:
        times = 2 if self.rng.random() < 0.05 else 1
        self._events.extend([(process.name, process.incarnation, event)] * times)

    def _hear(self) -> None:
        name, incarnation, event = self._events.pop(0)
        known = self.controller.incarnation_of(name)
        if isinstance(event, ReplicaJoined) or known == incarnation:
            self._handle(event)
        elif not isinstance(event, ReplicaLeft) and not self.controller.finished:
            self._all[incarnation].inbox.append("rejoin" if known is None else "superseded")

    def _handle(self, event: Event) -> None:
        self.now += 0.01
        if self.rng.random() < 0.02:
            self.controller = Controller.restore(self.config, self.controller.snapshot())
        before = self.controller.state.step
        for name, command in self.controller.handle(event, self.now):
            incarnation = self.controller.incarnation_of(name)
            if incarnation is not None:
                self._all[incarnation].inbox.append(decode_command(encode_message(command)))
        self.num_fallen_back += self.controller.state.step < before
        books = audit(self.controller.state)
        books.check()
        assert books == self.controller.books()

    # ---------------------------------------------------------------- policy replicas

    def _act(self, process: Process | None) -> None:
        if isinstance(process, Rollout):
            self._act_as_rollout(process)
        elif isinstance(process, Policy):
            self._act_as_policy(process)

    def _act_as_policy(self, policy: Policy) -> None:
        order, seats = policy.order, policy.seats
        if policy.saving is not None:
            self._finish_saving(policy, policy.saving)
        elif order is not None and seats is not None and order.step == seats.step:
            self._work(policy, order, seats)
        elif order is not None and seats is not None:
            self._end(policy, "needs weights that died")
        elif order is not None:
            pass  # it asks for a seat
        elif policy.stop is not None:
            self._stop(policy, policy.stop)
        elif policy.inbox:
            self._obey(policy, policy.inbox.pop(0))

    def _obey(self, policy: Policy, command: Command | str) -> None:
        match command:
            case "join" | "rejoin":
                self._join(policy)
            case "superseded":
                self._end(policy, "superseded")
            case FallBack(line=line, saved=saved):
                if policy.is_lost_on(line) or policy.version < saved:
                    self._end(policy, "has lost weights")
            case Train():
                self._take_order(policy, command)
            case Stop():
                policy.stop = command
            case _:
                raise AssertionError(command)

    def _take_order(self, policy: Policy, train: Train) -> None:
        if len(train.line) < len(policy.line):
            return
        if policy.is_lost_on(train.line):
            self._end(policy, "has lost weights")
            return
        if len(train.line) > len(policy.line) and policy.seats is not None:
            policy.seats.decision = policy.seats.decision or "void"
            policy.seats = None
        policy.line = train.line
        policy.order = train if train.step >= policy.version else None

    def _meet(self) -> None:
        """Seat all who ask, as the Lighthouse does, on the newest weights among them."""
        asking = [p for p in self._policies() if p.order and p.seats is None and not p.is_paused]
        if len(asking) < self.config.min_policies:
            for policy in asking:
                if self.rng.random() < 0.02:
                    self._end(policy, "no quorum in time")
            return
        self.rng.shuffle(asking)
        line = max((policy.line for policy in asking), key=len)
        lost = [policy for policy in asking if policy.is_lost_on(line)]
        for policy in lost:
            self._end(policy, "has lost weights")
        if lost:
            return
        holder = max(asking, key=lambda p: (p.version, p.taken_in))
        seats = Seats(next(self._epochs), holder.version, asking)
        for policy in asking:
            self._seat(policy, seats, holder, line)

    def _seat(self, policy: Policy, seats: Seats, holder: Policy, line: Line) -> None:
        order, before = policy.order, policy.version
        assert order is not None
        policy.seats, policy.line = seats, line
        policy.weights, policy.taken_in = holder.weights, holder.taken_in
        if policy.version > before:
            self._tell_step(policy)
        if policy.version < order.step:
            self._end(policy, "needs weights that died")
        elif policy.version > order.step or len(order.line) < len(line):
            policy.order = None

    def _work(self, policy: Policy, order: Train, seats: Seats) -> None:
        if seats.decision == "void":
            policy.seats = None
        elif seats.decision:
            self._take_step(policy, order, seats)
        elif policy.incarnation not in seats.ready:
            seats.ready.add(policy.incarnation)
        else:
            missing = [m for m in seats.members if m.incarnation not in seats.ready]
            is_gone = any(not member.is_alive or member.is_paused for member in missing)
            if not missing:
                self._check(seats)
            if is_gone or self.rng.random() < (0.01 if missing else 0.1):
                seats.decision = "void"
            elif not missing:
                seats.decision = "commit"

    def _check(self, seats: Seats) -> None:
        assert len({member.weights for member in seats.members}) == 1, "sums over other weights"
        assert len({member.order for member in seats.members}) == 1, "sums over other orders"

    def _take_step(self, policy: Policy, order: Train, seats: Seats) -> None:
        ordinals = tuple(int(g[0].key.split("/")[0].split(".")[2]) for g in order.groups)
        taken = set(itertools.chain(*policy.weights))
        assert not taken & set(ordinals), "a prompt is trained on twice"
        for sample in itertools.chain(*order.groups):
            for weights in self._tokens[sample.key]:
                assert policy.weights[: len(weights)] == weights, "tokens of lost weights"
        policy.weights = policy.served = (*policy.weights, ordinals)
        policy.taken_in, policy.seats, policy.order = seats.epoch, None, None
        self._tell_step(policy)
        lineage = len(policy.line)
        published = VersionPublished(replica=policy.name, version=policy.version, lineage=lineage)
        self._say(policy, published)
        if order.cut and seats.members[0] is policy:
            policy.saving = Saved(policy.weights, line_of_cut(order.cut))

    def _tell_step(self, policy: Policy) -> None:
        step, lineage = policy.version - 1, len(policy.line)
        policy.joined = (policy.version, lineage)
        self._say(policy, StepFinished(replica=policy.name, step=step, lineage=lineage))

    def _finish_saving(self, policy: Policy, saved: Saved) -> None:
        """Have a checkpoint appear, unless the run went elsewhere while its writer hung."""
        policy.saving = None
        is_late = any(other.place > saved.place for other in self.disk)
        if is_late or not is_on_line(self._told_line, *saved.place):
            self._end(policy, "its checkpoint came too late")
            return
        version = len(saved.weights)
        self.disk = [other for other in self.disk if len(other.weights) != version]
        self.disk.append(saved)
        self._tell_saved(policy)

    def _tell_saved(self, policy: Policy) -> None:
        step, lineage, path = policy.version - 1, len(policy.line), "x" if policy.version else ""
        saved = CheckpointSaved(replica=policy.name, step=step, path=path, lineage=lineage)
        self._say(policy, saved)
        if policy.stop is not None:
            self._end(policy, "stopped")

    def _stop(self, policy: Policy, stop: Stop) -> None:
        line = line_of_cut(stop.cut) if stop.cut else ()
        if not stop.cut or policy.version < step_of_cut(stop.cut) or policy.is_lost_on(line):
            self._end(policy, "stopped", is_scaled_down=stop.reason == SCALED_DOWN)
            return
        if policy.version > step_of_cut(stop.cut):
            policy.stop = None  # it is given another cut
            return
        saved = Saved(policy.weights, line)
        policy.line = line
        holder = self._claims.setdefault(saved.place, policy)
        if policy.version == 0 or self.disk[-1:] == [saved]:
            self._tell_saved(policy)
        elif holder is policy:
            policy.saving = saved
        elif not holder.is_alive or holder.is_paused:
            self._claims[saved.place] = policy

    # ---------------------------------------------------------------- rollout replicas

    def _act_as_rollout(self, rollout: Rollout) -> None:
        choice = self.rng.random()
        if rollout.inbox and choice < 0.5:
            self._obey_as_rollout(rollout, rollout.inbox.pop(0))
        elif rollout.sampling and choice < 0.7:
            self._finish_group(rollout)
        elif rollout.loading:
            self._load(rollout, rollout.loading.pop(0))

    def _obey_as_rollout(self, rollout: Rollout, command: Command | str) -> None:
        match command:
            case "rejoin":
                rollout.sampling.clear()
                self._join(rollout)
            case "superseded":
                self._end(rollout, "superseded")
            case Stop(reason=reason):
                self._end(rollout, "stopped", is_scaled_down=reason == SCALED_DOWN)
            case Generate(group=group, attempt=attempt) if (group, attempt) in rollout.reported:
                self._say(rollout, rollout.reported[group, attempt])
            case Generate(group=group, attempt=attempt):
                rollout.sampling[group] = (attempt, [rollout.weights])
            case CancelGroup(group=group, attempt=attempt):
                if rollout.sampling.get(group, (-1,))[0] == attempt:
                    del rollout.sampling[group]
            case LoadVersion():
                rollout.loading.append(command)
            case _:
                raise AssertionError(command)

    def _finish_group(self, rollout: Rollout) -> None:
        group = self.rng.choice(list(rollout.sampling))
        attempt, weights = rollout.sampling.pop(group)
        key = f"{group}/{attempt}/{rollout.incarnation}"
        self._tokens[key] = tuple(weights)
        reward = float(self._number_of(weights[0])) if len(set(weights)) == 1 else -1.0
        samples = tuple(
            SampleRef(
                sibling=sibling,
                status="completed",
                key=key,
                num_tokens=1,
                reward=reward if group.source == VALIDATION else float(sibling),
                oldest_version=len(weights[0]),
                newest_version=len(weights[-1]),
            )
            for sibling in range(2)
        )
        finished = GroupFinished(
            replica=rollout.name, group=group, attempt=attempt, samples=samples
        )
        rollout.reported[group, attempt] = finished
        self._say(rollout, finished)

    def _number_of(self, weights: Weights) -> int:
        if weights not in self._asked:
            self._asked.append(weights)
        return self._asked.index(weights)

    def last_saved(self) -> Weights:
        """What the run would go on from; a save that hung may appear later, and is not loaded."""
        return self._last_on(self.controller.state.line).weights

    def check_validations(self, last: Weights) -> None:
        """Check that each was answered by the weights that the run has at that version."""
        for version, result in self.controller.validations.items():
            number = float(self._number_of(last[:version]))
            found = (result.mean_reward, result.best_reward, result.failed)
            assert found == (number, number, 0), f"validation of {version}: other weights"

    def _load(self, rollout: Rollout, order: LoadVersion) -> None:
        source = self._all[order.endpoints[0]]
        assert isinstance(source, Policy | Rollout)
        served = source.served if isinstance(source, Policy) else source.weights
        name, lineage = rollout.name, order.lineage
        is_there = source.is_alive and len(served) >= order.version
        if not is_there or self.rng.random() < 0.1:
            version = order.version
            failed = LoadFailed(replica=name, version=version, reason="gone", lineage=lineage)
            self._say(rollout, failed)
            return
        rollout.weights = served
        self.num_from_rollouts += source.name == order.holder
        for _, weights in rollout.sampling.values():
            weights.append(rollout.weights)
        version = len(rollout.weights)
        loaded = VersionLoaded(
            replica=name,
            version=version,
            transfer_s=0.0,
            stall_s=0.0,
            lineage=lineage,
            endpoints=(rollout.incarnation,),
        )
        self._say(rollout, loaded)

    def _alive(self) -> list[Process]:
        return [process for process in self._all.values() if process.is_alive]

    def _policies(self) -> "list[Policy]":
        return [process for process in self._alive() if isinstance(process, Policy)]


def prompts_of(weights: Weights) -> Iterator[int]:
    """All that weights were trained on."""
    return itertools.chain(*weights)
