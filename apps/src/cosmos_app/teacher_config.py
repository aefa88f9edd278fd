"""Who scores samples for algorithms that learn from a teacher."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from cosmos_rollout import TransformersConfig, VLLMConfig

TeacherEngineConfig = VLLMConfig | TransformersConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """Teachers beside the rollouts; with none of them every policy holds the teacher itself.

    Rollouts ask them while they generate, and trajectories carry what they say.

    Attributes:
        replicas: processes of this run that score with ``model.teacher``.
        urls: servers of somebody else that score, each up to and with ``/v1``; OpenAI's
            completions with ``prompt_logprobs``, as ``vllm serve`` has them.
        model: the name of the teacher at those servers.
        key_file: file that holds their bearer token; none: nothing is sent.
        engine: what the replicas score with; its context holds one token more than any sample.
        top_k: likeliest tokens that are asked for in each place; 0: the sampled token alone.
        deadline_s: longest that a sample waits for its scores; then it has failed.
        start_s: longest that rollouts wait for the first teacher.
        max_running: samples of one rollout replica that are scored at once.
    """

    replicas: int = 0
    urls: tuple[str, ...] = ()
    model: str = "teacher"
    key_file: Path | None = None
    engine: TeacherEngineConfig = field(default_factory=VLLMConfig)
    top_k: int = 0
    deadline_s: float = 120.0
    start_s: float = 600.0
    max_running: int = 64

    def __post_init__(self) -> None:
        """Check what it says.

        Raises:
            ValueError: naming the setting.
        """
        if self.replicas < 0 or self.top_k < 0:
            raise ValueError(
                f"replicas is {self.replicas} and top_k {self.top_k}; neither may be negative"
            )
        if self.replicas and self.urls:
            raise ValueError("replicas and urls: teachers are this run's or somebody else's")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"urls have to begin with http:// or https://, found {url!r}")
        limits_s = (self.deadline_s, self.start_s)
        if self.max_running < 1 or not all(0.0 < limit_s < math.inf for limit_s in limits_s):
            raise ValueError("deadline_s, start_s and max_running have to be positive and finite")

    @property
    def is_beside(self) -> bool:
        """Whether somebody other than the policy scores."""
        return bool(self.replicas or self.urls)


def check_teacher(
    config: TeacherConfig,
    directory: Path | None,
    *,
    needed_by: str,
    temperature: float,
    top_k: int = 0,
) -> None:
    """Check that an algorithm has the teacher it needs, and needs the one it has.

    Args:
        config: who would score.
        directory: the teacher's model, if there is one.
        needed_by: kind of the algorithm, empty if it learns from no teacher.
        temperature: at which it compares log-probabilities.
        top_k: how many of the teacher's likeliest tokens it compares.

    Raises:
        ValueError: naming the setting.
    """
    if not needed_by:
        if config.is_beside:
            raise ValueError(
                "teacher.replicas and teacher.urls: this algorithm learns from no teacher, as "
                'kind = "on_policy_distillation" does'
            )
        return
    if directory is None and not config.urls:
        raise ValueError(
            f"algorithm.kind is {needed_by!r}, which needs a teacher: set model.teacher to its "
            "directory, or teacher.urls to servers that score"
        )
    if config.is_beside and temperature != 1.0:
        raise ValueError(
            f"algorithm.temperature is {temperature}, and teachers beside the rollouts score at 1; "
            "leave teacher.replicas at 0 to have the policy score at any temperature"
        )
    if config.is_beside and top_k not in (0, config.top_k):
        raise ValueError(
            f"algorithm.top_k is {top_k} and teacher.top_k {config.top_k}; the algorithm compares "
            "as many of the teacher's likeliest tokens as it is told: give both one number"
        )
