"""What is wrong with a run of the soak: its steps, its books, its samples, who was seen to end."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cosmos_core.metrics import read_metrics
from cosmos_core.simulation import StepTaken

GROUPS, SAMPLES = 4, 2
"""Groups of a step, samples of a group."""


def judge(output: Path, report: dict[str, Any], steps: int) -> list[str]:
    """Return what is wrong with the steps and the books of a run that has ended."""
    books = report["books"]
    problems: list[str] = []
    committed = {r.step for r in read_metrics(output / "metrics.jsonl") if r.role == "controller"}
    if committed != set(range(steps)):
        problems.append(f"steps {sorted(set(range(steps)) - committed)} were never committed")
    if books["consumed"] != steps * GROUPS:
        problems.append(f"{books['consumed']} groups were trained on, not {steps * GROUPS}")
    if dropped := {reason: count for reason, count in books["dropped"].items() if count}:
        problems.append(f"groups were dropped: {dropped}")
    if in_flight := {stage: count for stage, count in books["in_flight"].items() if count}:
        problems.append(f"groups are still in flight: {in_flight}")
    if books["issued"] != books["consumed"] + sum(dropped.values()) + sum(in_flight.values()):
        problems.append(f"the books do not balance: {books}")
    return problems


def judge_samples(taken: Sequence[StepTaken], issued: int, steps: int) -> list[str]:
    """Return what is wrong with what a policy says it trained on.

    Args:
        taken: its steps in the order in which it took them; one that was taken anew counts as last.
        issued: how many groups there were.
        steps: how many there should be.
    """
    problems: list[str] = []
    last = {step.step: step.keys for step in taken}
    trained = Counter(key for step in range(steps) for key in last.get(step, ()))
    groups = [{_group_of(key) for key in last.get(step, ())} for step in range(steps)]
    if doubled := sorted(key for key, count in trained.items() if count > 1):
        problems.append(f"trained on twice: {', '.join(doubled)}")
    times = Counter(group for each in groups for group in each)
    if again := sorted(group for group, count in times.items() if count > 1):
        problems.append(f"groups {again} were trained on in several steps")
    if lost := sorted(set(range(issued)) - set(times)):
        problems.append(f"groups {lost} were issued and never trained on")
    if uneven := [step for step, each in enumerate(groups) if len(each) != GROUPS]:
        problems.append(f"steps {uneven} were not taken on {GROUPS} groups")
    siblings: dict[str, set[int]] = {}
    for attempt, sibling in (key.rsplit(".", 1) for key in trained):
        siblings.setdefault(attempt, set()).add(int(sibling))
    if partial := sorted(a for a, found in siblings.items() if found != set(range(SAMPLES))):
        problems.append(f"of {', '.join(partial)} not all {SAMPLES} samples were trained on")
    return problems


def _group_of(key: str) -> int:
    """Return the ordinal of the group in a sample's key."""
    return int(key.split(".")[2])


def judge_others(report: dict[str, Any], kills: Counter[str]) -> list[str]:
    """Return what is wrong with what became of Redis and of the rewards."""
    problems: list[str] = []
    ends = sum(incident["name"] == "redis" for incident in report["incidents"])
    if ends > kills["redis"] or bool(ends) != bool(kills["redis"]):
        problems.append(f"Redis ended {ends} times and was hit {kills['redis']} times")
    if sum(report["failures"].values()) > kills["reward"]:
        problems.append(f"{report['failures']} with {kills['reward']} reward workers hit")
    return problems
