"""Which processes of a run go to which machines of a cluster, and the command line of each."""

import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from cosmos_app.devices import gpus_of
from cosmos_app.errors import DataError
from cosmos_app.recipe import Recipe
from cosmos_rollout import EngineConfig

_LONGEST_NAME = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Engines:
    """Replicas of one role that are an engine each; several share a machine.

    Attributes:
        role: of theirs, also the beginning of their names.
        count: how many.
        gpus: of each.
        per_node: how many share a machine.
    """

    role: str
    count: int
    gpus: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Machines of all of them."""
        return math.ceil(self.count / self.per_node)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A run on a cluster: a head, policy replicas, rollout replicas, teachers.

    Attributes:
        name: of the job; letters, digits and hyphens.
        run_dir: its directory, on shared storage.
        recipe_file: the file it is read from.
        overrides: given on the command line.
        policy_replicas: how many.
        policy_nodes: machines of each.
        ranks_per_node: ranks of a policy replica on each of its machines.
        policies_needed: with fewer policy replicas nothing goes on.
        is_elastic: whether policy replicas come and go.
        restarts: how often a replica is started again that others go on without.
        rollouts: the replicas that generate.
        teachers: the replicas that score what those sample; may be none.
    """

    name: str
    run_dir: Path
    recipe_file: Path
    overrides: tuple[str, ...]
    policy_replicas: int
    policy_nodes: int
    ranks_per_node: int
    policies_needed: int
    is_elastic: bool
    restarts: int
    rollouts: Engines
    teachers: Engines

    @property
    def engines(self) -> tuple[Engines, ...]:
        """What is there of rollouts and teachers, in the order of their machines."""
        return tuple(engines for engines in (self.rollouts, self.teachers) if engines.count)

    @property
    def nodes(self) -> int:
        """Machines in all; the head needs no GPU and shares the first."""
        policies = self.policy_replicas * self.policy_nodes
        return policies + sum(engines.nodes for engines in self.engines)

    def head_command(self, address: str, *more: str) -> list[str]:
        """Return the process that starts Redis and controller and writes the report.

        Words are a shell's: those from outside are quoted, ``address`` and ``more`` may hold
        variables for it to fill in.
        """
        return [
            "cosmos-app",
            "run",
            *map(shlex.quote, [str(self.recipe_file), *self.overrides]),
            "launch.external=true",
            f"bus.host={address}",
            *more,
        ]

    def role_command(self, role: str, replica: str, join_s: int) -> list[str]:
        """Return the arguments of a role's process, behind ``python -m cosmos_app``.

        Words are a shell's; ``replica`` may hold variables for it to fill in.
        """
        run_dir = shlex.quote(str(self.run_dir))
        return [role, run_dir, "--replica", replica, "--wait", str(join_s)]


def place(recipe: Recipe, recipe_file: Path, overrides: tuple[str, ...]) -> Placement:
    """Return where a recipe's processes go.

    Raises:
        DataError: naming what does not fit the machines.
    """
    gpus, elastic = recipe.cluster.gpus_per_node, recipe.elastic
    nodes = math.ceil(recipe.policy.ranks / gpus)
    if recipe.policy.ranks % nodes:
        raise DataError(
            f"policy.ranks is {recipe.policy.ranks}, which {nodes} machines of "
            f"cluster.gpus_per_node={gpus} cannot share evenly; want a multiple of {nodes}"
        )
    return Placement(
        name=_job_name(recipe.output),
        run_dir=recipe.output,
        recipe_file=recipe_file,
        overrides=overrides,
        policy_replicas=recipe.policy.replicas,
        policy_nodes=nodes,
        ranks_per_node=recipe.policy.ranks // nodes,
        policies_needed=recipe.policy.replicas if elastic is None else elastic.min_replicas,
        is_elastic=elastic is not None,
        restarts=recipe.launch.restarts,
        rollouts=_engines("rollout", recipe.rollout.replicas, recipe.rollout.engine, gpus),
        teachers=_engines("teacher", recipe.teacher.replicas, recipe.teacher.engine, gpus),
    )


def _engines(role: str, count: int, engine: EngineConfig, gpus: int) -> Engines:
    each = max(1, gpus_of(engine))
    if count and each > gpus:
        raise DataError(
            f"{role}.engine needs {each} GPUs and a machine has cluster.gpus_per_node={gpus}; "
            "an engine stays on one machine: lower tensor_parallel or pipeline_parallel"
        )
    return Engines(role=role, count=count, gpus=each, per_node=max(1, gpus // each))


def _job_name(output: Path) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", output.name.lower()).strip("-")[:_LONGEST_NAME].rstrip("-")
    return f"cosmos-{name or 'run'}"
