"""The default policy with very many replicas, simulated around the real controller.

python benchmarks/async_many.py [--replicas 1000]
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from async_arms import GROUPS, SPEED, control, sized

from cosmos_core.simulation import Capacity, Figures, figures_of, simulate, step_bound_s

_SKIP, _STEPS = 4, 12
_FOR_EVER_S = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Many:
    """A simulation of many rollout replicas.

    Attributes:
        replicas: how many.
        groups: in a step.
        bound_s: least seconds of a step.
        figures: what came of it.
        wall_s: seconds that the simulation took.
    """

    replicas: int
    groups: int
    bound_s: float
    figures: Figures
    wall_s: float


def simulate_many(replicas: int) -> Many:
    """Simulate engines like those of the real runs, with steps that grow with their number."""
    groups = GROUPS // 2 * replicas
    system = sized(rollouts=replicas, groups=groups)
    told = replace(control(2, 4, groups=groups), lease_s=_FOR_EVER_S, first_lease_s=_FOR_EVER_S)
    capacity = Capacity(
        rollouts=replicas, tokens_per_s=SPEED.full_rate, max_running=SPEED.max_running
    )
    begun = time.perf_counter()
    log = simulate(told, system, steps=_STEPS)
    return Many(
        replicas=replicas,
        groups=groups,
        bound_s=step_bound_s(told, system),
        figures=figures_of(log, capacity, skip=_SKIP),
        wall_s=time.perf_counter() - begun,
    )


def many_markdown(many: Many) -> str:
    """Return the simulation as a table of one row."""
    found = many.figures
    cells = (
        f"{many.replicas:,}",
        f"{many.groups:,}",
        f"{many.bound_s / found.step_s:.3f}",
        f"{found.policy_idle:.1%}",
        f"{found.rollout_idle_tokens:.1%}",
        f"{found.staleness_first.max:.0f}",
        f"{found.length_ratio:.3f}",
        f"{many.wall_s:.0f}",
    )
    head = (
        "rollout replicas, simulated",
        "groups a step",
        "speed / bound",
        "policy idle",
        "rollout idle, tokens",
        "staleness max",
        "trained/generated length",
        "wall s",
    )
    rows = (head, ("---",) * len(head), cells)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=1000)
    print(many_markdown(simulate_many(parser.parse_args(arguments).replicas)))


if __name__ == "__main__":
    main()
