"""A controller whose replicas answer as a test says, with limits that are soon reached."""

from cosmos_core.control import (
    Controller,
    ControllerConfig,
    EnduranceConfig,
    StalenessConfig,
)
from cosmos_core.messages import (
    CheckpointSaved,
    Generate,
    GroupFinished,
    ReplicaJoined,
    SampleRef,
    Stop,
    Tick,
    Train,
    VersionPublished,
)

SHORT = EnduranceConfig(unrewarded_samples=8, equal_groups=10, failing_s=100, standstill_s=200)
CONFIG = ControllerConfig(
    num_steps=3,
    groups_per_step=2,
    samples_per_group=2,
    staleness=StalenessConfig(depth=0, bound=4),
    drop_zero_signal=True,
    lease_s=1e6,
    first_lease_s=1e6,
    endurance=SHORT,
)
NAN = "reward mine: ValueError: the reward is nan"
AWAY = "reward judge: RewardError: http://judge gave no answer in 8 s: ConnectError('refused')"


class Run:
    """A controller whose replicas answer as a test says; a second passes between two events."""

    def __init__(self, config: ControllerConfig = CONFIG, *, has_rollout: bool = True) -> None:
        self.controller = Controller(config)
        self.now = 1000.0
        self.asked: list[Generate] = []
        self.trains: list[Train] = []
        self.stops: list[str] = []
        self.join_policy()
        if has_rollout:
            self.tell(ReplicaJoined(replica="rollout-0", role="rollout", slots=1))

    def join_policy(self) -> None:
        self.tell(ReplicaJoined(replica="policy-0", role="policy", endpoints=("here",)))
        self.tell(VersionPublished(replica="policy-0", version=0))

    def tell(self, event) -> None:
        self.now += 1.0
        self.take(self.controller.handle(event, self.now))

    def take(self, commands) -> None:
        for name, command in commands:
            match command:
                case Generate():
                    self.asked.append(command)
                case Train():
                    self.trains.append(command)
                case Stop():
                    self.stops.append(name)
                case _:
                    pass

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.tell(Tick())

    def answer(
        self, *rewards: float | str, unrewarded_by: str = "", replica: str = "rollout-0"
    ) -> None:
        """Finish the oldest group: a number for each sample, or why it has none."""
        command = self.asked.pop(0)
        key = f"{command.group}/{command.attempt}"
        samples = tuple(
            SampleRef(sibling=i, status="failed", failure=given, unrewarded_by=unrewarded_by)
            if isinstance(given, str)
            else SampleRef(
                sibling=i, status="completed", key=f"{key}/{i}", num_tokens=1, reward=given
            )
            for i, given in enumerate(rewards)
        )
        self.tell(
            GroupFinished(
                replica=replica, group=command.group, attempt=command.attempt, samples=samples
            )
        )

    def restart(self) -> None:
        config, snapshot = self.controller.config, self.controller.snapshot()
        self.controller = Controller.restore(config, snapshot)

    @property
    def stopping(self) -> str:
        return self.controller.state.stopping

    def end(self) -> str:
        """Let the policy save, and return why the run has ended, its books balanced."""
        assert sorted(self.stops) == sorted(self.controller.state.replicas)
        step = self.controller.state.step
        path = "checkpoint" if step else ""
        self.tell(CheckpointSaved(replica="policy-0", step=step - 1, path=path))
        self.controller.books().check()
        return self.controller.finished


def unrewarded(run: Run, words: str = NAN) -> None:
    run.answer(words, words, unrewarded_by="mine")


def fail_until_stopped(run: Run, longest_s: int, step_s: int = 8) -> float:
    """Have every group fail after a while, with a reward that is away; return the seconds."""
    began_s = run.now
    while not run.stopping and run.now < began_s + longest_s:
        run.wait(step_s)
        if run.asked:
            run.answer(AWAY, AWAY)
    return run.now - began_s
