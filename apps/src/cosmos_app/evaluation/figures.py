"""The figures of an evaluation: added up while answers come, and shown."""

from collections import Counter, defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rich.console import Console

from cosmos_app.output import print_facts
from cosmos_core.control import ValidationResult
from cosmos_core.messages import GroupFailed, GroupFinished, SampleRef


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What a server made of a recipe's held-out prompts.

    Attributes:
        url: the server.
        model: what the model is called there.
        num_prompts: prompts that were answered.
        num_failed: prompts that have no answer with a reward.
        num_samples: answers that each prompt was asked for.
        reward: mean over prompts of the mean reward of their answers.
        best_reward: mean over prompts of that of the best answer.
        accuracy: mean over answers of that reward which compares with the row's answer, 0 or 1;
            ``None`` if the recipe has none.
        rewards: mean over answers of each reward, by name, before its weight.
        data_sets: mean reward by data set; empty if prompts name none.
        dropped: prompts that nobody could answer, by what is wrong with them.
        failures: answers without a reward, by who is to blame, tries included.
        truncated: share of answers that a limit of tokens cut off.
        answer_tokens: mean tokens of an answer.
        seconds: from the first prompt to the last answer.
        measured: mean held-out reward by weight version, as the run itself measured it.
    """

    url: str
    model: str
    num_prompts: int
    num_failed: int
    num_samples: int
    reward: float
    best_reward: float
    accuracy: float | None
    rewards: Mapping[str, float]
    data_sets: Mapping[str, float]
    dropped: Mapping[str, int]
    failures: Mapping[str, int]
    truncated: float
    answer_tokens: float
    seconds: float
    measured: Mapping[int, float]


@dataclass(kw_only=True, slots=True)
class Tally:
    """Sums over answers, while they come."""

    answers: list[SampleRef] = field(default_factory=list[SampleRef])
    dropped: Counter[str] = field(default_factory=Counter[str])

    def note(self, event: GroupFinished | GroupFailed) -> None:
        """Count what became of a prompt."""
        if isinstance(event, GroupFailed):
            if event.drop_as:
                self.dropped[event.drop_as] += 1
            return
        self.answers += [sample for sample in event.samples if sample.status == "completed"]

    def mean_rewards(self) -> dict[str, float]:
        """Return the mean of each reward by name, over the answers that have it."""
        found = defaultdict[str, list[float]](list)
        for answer in self.answers:
            for name, reward in answer.rewards:
                found[name].append(reward)
        return {name: fmean(rewards) for name, rewards in sorted(found.items())}

    def accuracy(self, names: Container[str]) -> float | None:
        """Return the mean of the first of these rewards that each answer has, if any has one."""
        firsts = [
            next((reward for name, reward in answer.rewards if name in names), None)
            for answer in self.answers
        ]
        known = [reward for reward in firsts if reward is not None]
        return fmean(known) if known else None

    def figures(self, result: ValidationResult) -> dict[str, Any]:
        """Return those fields of an `Evaluation` that are sums over answers."""
        count = len(self.answers)
        return {
            "num_prompts": result.count,
            "num_failed": result.failed,
            "num_samples": result.num_samples,
            "reward": result.mean_reward,
            "best_reward": result.best_reward,
            "rewards": self.mean_rewards(),
            "data_sets": dict(result.of_sets),
            "dropped": dict(self.dropped),
            "truncated": sum(answer.truncated for answer in self.answers) / max(1, count),
            "answer_tokens": sum(answer.num_tokens for answer in self.answers) / max(1, count),
        }


def print_evaluation(found: Evaluation, console: Console) -> None:
    """Show the figures to a person."""
    asked = f"{found.num_prompts} answered, {found.num_failed} failed"
    if found.num_samples > 1:
        asked += f", {found.num_samples} answers each"
    facts = [("prompts", asked), ("held-out reward", f"{found.reward:.3f}")]
    if found.accuracy is not None:
        facts.insert(1, ("accuracy", f"{found.accuracy:.3f}"))
    if found.num_samples > 1:
        facts.append(("best of a prompt's answers", f"{found.best_reward:.3f}"))
    facts += [(f"reward {name}", f"{value:.3f}") for name, value in found.rewards.items()]
    facts += [(f"data set {name}", f"{value:.3f}") for name, value in found.data_sets.items()]
    facts.append(("answers", f"{found.answer_tokens:.0f} tokens, {found.truncated:.1%} cut off"))
    facts += [(f"dropped: {why}", f"{count} prompts") for why, count in found.dropped.items()]
    facts += [(f"failed: {why}", f"{count} answers") for why, count in found.failures.items()]
    if found.measured:
        versions = sorted(found.measured)
        shown = versions if len(versions) < 4 else [versions[0], *versions[-2:]]
        said = ", ".join(f"{found.measured[v]:.3f} at version {v}" for v in shown)
        facts.append(("measured by the run", said))
    facts.append(("time", f"{found.seconds:.1f} s"))
    print_facts(f"{found.model} at {found.url}", facts, console)
