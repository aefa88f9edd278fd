"""A small world that Hypothesis drives: two rollout replicas, one or two policies with a disk.

Whatever it does, the books balance, orders keep `control_promises`, a controller read back from a
snapshot, or an older one and what came since, does exactly what the first one does, and once
everybody answers the run ends. A policy may skip a publication, and publish that version or a later
one when it has room; rollouts give weights to each other. Two policy replicas take each step
together, and when one dies the other is started anew too, as the launcher does.
"""

import itertools
import random

from control_promises import check_load, check_rollouts, check_step
from control_replica import Replica
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cosmos_core.control import (
    ALL_DONE,
    STOPPED,
    Controller,
    ControllerConfig,
    EnduranceConfig,
    StalenessConfig,
    ValidationPlan,
)
from cosmos_core.control.books import audit
from cosmos_core.control.ending import LOST
from cosmos_core.control.state import UNKNOWN_VERSION
from cosmos_core.messages import (
    CancelGroup,
    CheckpointSaved,
    Command,
    Event,
    Generate,
    LoadFailed,
    LoadVersion,
    Progress,
    PublicationSkipped,
    ReplicaJoined,
    ReplicaLeft,
    StepFinished,
    Stop,
    Tick,
    Train,
    VersionLoaded,
    VersionPublished,
    decode_command,
    encode_message,
)

NUM_STEPS = 6
GROUPS_PER_STEP = 3
POLICIES = ("policy-0", "policy-1")


class World(RuleBasedStateMachine):
    endurance = EnduranceConfig()

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.count = itertools.count()
        self.replicas: dict[str, Replica] = {}
        self.stream: dict[str, list[tuple[str, Event]]] = {}  # by sender, in order
        self.said: list[tuple[str, Event]] = []
        self.disk = (0, 0)  # version, fall-backs
        self.may_be_lost = False
        self.trained: dict[int, tuple[int, ...]] = {}
        self.machines = ("m0", "m1")  # of rollouts; policies have another
        self.kept = b""  # a snapshot, and all that was heard since
        self.log: list[tuple[Event, float]] = []

    @initialize(
        depth=st.integers(0, 2),
        slack=st.integers(0, 2),
        zero_signal=st.booleans(),
        validation=st.booleans(),
        every=st.integers(0, 3),
        policy=st.sampled_from(["block", "drop", "count", "window"]),
        num_policies=st.integers(1, 2),
    )
    def begin(self, depth, slack, zero_signal, validation, every, policy, num_policies) -> None:
        self.config = ControllerConfig(
            num_steps=NUM_STEPS,
            groups_per_step=GROUPS_PER_STEP,
            samples_per_group=2,
            num_policies=num_policies,
            staleness=StalenessConfig(depth=depth, bound=depth + slack, policy=policy),
            validation=ValidationPlan(num_prompts=3 if validation else 0, every=every),
            checkpoint_every=every,
            drop_zero_signal=zero_signal,
            max_attempts=1000,
            lease_s=10.0,
            first_lease_s=20.0,
            endurance=self.endurance,
        )
        self.controller = Controller(self.config)
        self.shadow = Controller(self.config)
        for name in ("rollout-0", "rollout-1", *POLICIES[:num_policies]):
            self.start(name)

    # ------------------------------------------------------------ what processes do

    def start(self, name: str) -> None:
        replica = Replica(name, f"{name}#{next(self.count)}")
        if name.startswith("policy"):
            replica.version, replica.num_fall_backs = self.disk
            replica.published = replica.version
        else:
            replica.machine = self.machines[int(name[-1])]
            if next(self.count) % 3 == 0:
                replica.version = UNKNOWN_VERSION  # its engine has weights of its own
        self.replicas[name] = replica
        self.join(replica)

    def join(self, replica: Replica) -> None:
        role = "policy" if replica.name.startswith("policy") else "rollout"
        joined = ReplicaJoined(
            replica=replica.name,
            role=role,
            slots=2 if role == "rollout" else 0,
            version=replica.version,
            lineage=replica.num_fall_backs,
            published=replica.published if role == "policy" else None,
            endpoints=(replica.name,),
            host=replica.machine,
            incarnation=replica.incarnation,
        )
        self.say(replica, joined)

    def say(self, replica: Replica, event: Event) -> None:
        self.stream.setdefault(replica.name, []).append((replica.incarnation, event))

    def act(self, replica: Replica, choice: int) -> None:
        if not replica.is_alive:
            return
        has_room = choice % 4 > 0
        if choice % 3 == 0 and replica.inbox:
            self.obey(replica, replica.inbox.pop(0), has_room=has_room)
        elif choice % 3 == 1 and replica.sampling:
            self.finish_group(replica, choice)
        elif replica.loading is not None:
            self.finish_load(replica, choice)
        elif replica.inbox:
            self.obey(replica, replica.inbox.pop(0), has_room=has_room)
        elif replica.published < replica.version and has_room and replica.name in POLICIES:
            self.publish(replica)

    def obey(self, replica: Replica, command: Command, *, has_room: bool) -> None:
        name = replica.name
        match command:
            case Generate():
                old = replica.version
                replica.sampling[command.group] = (command.attempt, command.num_samples, old, old)
            case CancelGroup():
                if replica.sampling.get(command.group, (-1,))[0] == command.attempt:
                    del replica.sampling[command.group]
            case LoadVersion():
                replica.loading = command
            case Train() if command.step == replica.version and not self.is_met(replica, command):
                replica.inbox.insert(0, command)
            case Train() if command.step == replica.version:
                self.take_step(replica, command, has_room=has_room)
            case Stop() if name.startswith("policy"):
                self.save(replica)
            case Stop():
                replica.is_alive = False
                self.say(replica, ReplicaLeft(replica=name, reason=STOPPED))
            case _:
                pass

    def take_step(self, policy: Replica, train: Train, *, has_room: bool) -> None:
        policy.version += 1
        policy.num_fall_backs = lineage = len(train.line)
        self.say(policy, StepFinished(replica=policy.name, step=train.step, lineage=lineage))
        self.publish(policy, has_room=has_room)
        if train.cut:
            self.save(policy)

    def publish(self, policy: Replica, *, has_room: bool = True) -> None:
        policy.published = policy.version if has_room else policy.published
        said = VersionPublished if has_room else PublicationSkipped
        lineage = policy.num_fall_backs
        self.say(policy, said(replica=policy.name, version=policy.version, lineage=lineage))

    def policies(self) -> list[Replica]:
        return [self.replicas[name] for name in POLICIES if name in self.replicas]

    def is_met(self, replica: Replica, train: Train) -> bool:
        """Whether the others are at this very step too, or have taken it with this one."""
        others = [policy for policy in self.policies() if policy is not replica]
        return all(train in other.inbox or other.version > train.step for other in others)

    def save(self, replica: Replica) -> None:
        version, lineage = replica.version, replica.num_fall_backs
        if version:  # who has taken no step has nothing to save, and says so
            self.disk = (version, lineage)
        path = "x" if version else ""
        saved = CheckpointSaved(replica=replica.name, step=version - 1, path=path, lineage=lineage)
        self.say(replica, saved)

    def finish_group(self, replica: Replica, choice: int) -> None:
        self.say(replica, replica.finish_group(choice))

    def finish_load(self, replica: Replica, choice: int) -> None:
        """Load from who serves the version; wait for who is being sent it, but not for ever."""
        order = replica.loading
        assert order is not None
        source, name = self.replicas[order.endpoints[0]], replica.name
        version, lineage = order.version, order.lineage
        if choice % 5 and order.holder and not source.gives(order) and source.will_give(order):
            return
        replica.loading = None
        if choice % 5 == 0 or not source.gives(order):
            failed = LoadFailed(replica=name, version=version, reason="gone", lineage=lineage)
            self.say(replica, failed)
            return
        replica.version, replica.loaded = version, (version, lineage)
        replica.serves = choice % 7 > 0
        loaded = VersionLoaded(
            replica=name,
            version=version,
            transfer_s=0,
            stall_s=0,
            lineage=lineage,
            endpoints=(name,) if replica.serves else (),
        )
        self.say(replica, loaded)

    # ------------------------------------------------------------ the bus and the host

    def deliver(self, name: str) -> None:
        incarnation, event = self.stream[name].pop(0)
        self.hear(name, incarnation, event)
        self.said.append((incarnation, event))

    def hear(self, name: str, incarnation: str, event: Event) -> None:
        known = self.controller.incarnation_of(name)
        if not isinstance(event, ReplicaJoined) and known != incarnation:
            replica = self.replicas[name]
            if known is None and replica.incarnation == incarnation and replica.is_alive:
                replica.sampling.clear()
                replica.inbox = [c for c in replica.inbox if not isinstance(c, Generate)]
                self.join(replica)
            return
        if isinstance(event, ReplicaJoined) and self.replicas[name].incarnation != incarnation:
            return  # of a process that is dead by now; the test does not keep its streams apart
        self.handle(event)

    def handle(self, event: Event) -> None:
        self.now += 0.01
        commands = self.controller.handle(event, self.now)
        self.log.append((event, self.now))
        assert self.shadow.handle(event, self.now) == commands
        for name, command in commands:
            assert decode_command(encode_message(command)) == command
            replica = self.replicas[name]
            if self.controller.incarnation_of(name) == replica.incarnation:
                replica.inbox.append(command)
            if isinstance(command, Train):
                check_step(command, self.controller, self.trained)
        for told, command in commands:
            if isinstance(command, LoadVersion):
                (name,) = command.endpoints
                has_failed = self.controller.state.replicas[told].failed_loads > 0
                assert not (has_failed and command.holder), "it is to ask a policy replica now"
                unheard = [event for _, event in self.stream.get(name, [])]
                check_load(command, self.controller, self.replicas[name], unheard)

    # ------------------------------------------------------------ what may happen

    def name_of(self, which: int) -> str:
        return sorted(self.replicas)[which % len(self.replicas)]

    @rule(which=st.integers(0, 3), choices=st.lists(st.integers(0, 400), min_size=1, max_size=25))
    def work(self, which, choices) -> None:
        for choice in choices:
            self.act(self.replicas[self.name_of(which)], choice)

    @rule(counts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=6))
    def listen(self, counts) -> None:
        for which, count in counts:
            name = self.name_of(which)
            for _ in range(min(count, len(self.stream.get(name, [])))):
                self.deliver(name)

    @rule(rounds=st.integers(1, 4), seed=st.integers(0, 1000))
    def go_on(self, rounds, seed) -> None:
        for turn in range(rounds):
            for name, replica in self.replicas.items():
                for choice in range(6):
                    self.act(replica, seed * 13 + turn * 7 + choice)
                while self.stream.get(name):
                    self.deliver(name)

    @precondition(lambda self: self.said)
    @rule(back=st.integers(1, 20))
    def repeat(self, back) -> None:
        incarnation, event = self.said[-min(back, len(self.said))]
        name = getattr(event, "replica", "")
        if isinstance(event, (ReplicaJoined, ReplicaLeft)):
            return
        if self.controller.incarnation_of(name) == incarnation:
            self.handle(event)

    @rule(which=st.integers(0, 3), says_so=st.booleans(), comes_back=st.booleans())
    def kill(self, which, says_so, comes_back) -> None:
        replica = self.replicas[self.name_of(which)]
        dying = self.policies() if replica.name in POLICIES else [replica]
        self.note_death()
        for each in dying:
            each.is_alive = False
        for each in dying:
            if says_so and self.controller.incarnation_of(each.name) == each.incarnation:
                self.handle(ReplicaLeft(replica=each.name, reason="killed"))
            if comes_back:
                self.start(each.name)

    @rule(seconds=st.floats(0.1, 30.0))
    def silence(self, seconds) -> None:
        self.now += seconds
        self.note_death()
        self.handle(Tick())

    def note_death(self) -> None:
        """A policy that dies, or seems to, behind the last step takes its weights along."""
        self.may_be_lost |= any(policy.version == NUM_STEPS for policy in self.policies())

    @rule()
    def restart_controller(self) -> None:
        self.controller = Controller.restore(self.config, self.controller.snapshot())

    @rule()
    def keep_snapshot(self) -> None:
        self.kept, self.log = self.controller.snapshot(), []

    @rule()
    def restart_controller_from_its_log(self) -> None:
        """As after `kill -9`: what it ordered since its last snapshot has been ordered."""
        old = Controller.restore(self.config, self.kept) if self.kept else Controller(self.config)
        for event, now in self.log:
            old.handle(event, now)
        assert old.snapshot() == self.controller.snapshot()
        self.controller = old

    @rule()
    def restart_shadow(self) -> None:
        self.shadow = Controller.restore(self.config, self.shadow.snapshot())

    # ------------------------------------------------------------ what must hold

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "controller"):
            return
        books = audit(self.controller.state)
        books.check()
        assert books == self.controller.books()
        check_rollouts(self.controller.state)

    def teardown(self) -> None:
        if hasattr(self, "controller"):
            self.settle()
            self.check_end()
            assert self.controller.snapshot() == self.shadow.snapshot()

    def settle(self) -> None:
        """Have everybody there, and answering, until the run has ended."""
        rng = random.Random(0)
        for turn in range(200):
            if self.controller.finished:
                break
            for name in sorted(self.replicas):
                if not self.replicas[name].is_alive:
                    self.start(name)
                self.say(self.replicas[name], Progress(replica=name, count=turn))
                for _ in range(20):
                    self.act(self.replicas[name], rng.randrange(1000))
                while self.stream.get(name):
                    self.deliver(name)
            self.now += 1.0
            self.handle(Tick())

    def check_end(self) -> None:
        """Check why the run has ended, and that it has done all that it was to do."""
        if self.may_be_lost and self.controller.finished == LOST:
            assert self.controller.state.saved < NUM_STEPS, "it was told of the last weights"
            return
        assert self.controller.finished == ALL_DONE, self.controller.waiting_for(self.now)
        assert self.controller.books().consumed == NUM_STEPS * GROUPS_PER_STEP
