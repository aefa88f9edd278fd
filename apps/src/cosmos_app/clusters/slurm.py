"""A run as one sbatch script: a head, a step for each policy replica, for rollouts, for teachers.

::

    machine 0: head (Redis, controller, report) + policy-0    machines 1..: all else
    every step: srun ─► torchrun or cosmos-app ─► joins by the run directory on shared storage

Rollouts, teachers and elastic policies are started again where they are, all others together.
"""

import shlex
import textwrap
from collections.abc import Sequence

from cosmos_app.cluster_config import ClusterConfig
from cosmos_app.clusters.placement import Engines, Placement

_HEAD = """\
#!/bin/bash
{directives}

# Written by cosmos-app. The run directory has to lie on storage that all machines share.
set -euo pipefail
{setup}
{environment}

nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
declare -A engines
address_of() {{ srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" hostname -I | cut -d' ' -f1; }}
"""
_START = """\
export COSMOS_RESUME=""
if [ -e {marker} ]; then COSMOS_RESUME="--resume"; fi
"""
_NOBODY = "steps=()\npolicies=()\nengines=()"
_TAIL = """\
# Whether too few policy replicas are left since one has failed; its exit code is in "status".
lost_policy() {{
  local i code
  for i in "${{!policies[@]}}"; do
    if kill -0 "${{policies[i]}}" 2>/dev/null; then continue; fi
    wait "${{policies[i]}}" && code=0 || code=$?
    unset "policies[i]"
    if [ "$code" -ne 0 ] && [ "${{#policies[@]}}" -lt {policies_needed} ]; then
      status=$code
      return 0
    fi
  done
  return 1
}}

# Have the run stop, with a checkpoint, when all replicas of another role have ended and one failed.
# They also end when the run is over: it does not mind then.
mind_engines() {{
  local role code left
  for role in "${{!engines[@]}}"; do
    if kill -0 "${{engines[$role]}}" 2>/dev/null; then continue; fi
    wait "${{engines[$role]}}" && code=0 || code=$?
    unset "engines[$role]"
    if [ "$code" -eq 0 ]; then continue; fi
    echo "no $role replica is left and one ended with $code: the run stops; why is said above," \
      "and the same script goes on from its checkpoint" >&2
    given_up=$code
    stopping=1
    if cosmos-app stop {run_dir} --wait 0; then continue; fi
    for ((left = 10; left > 0; left--)); do
      if kill -0 "$head" 2>/dev/null; then sleep 1; fi
    done
    kill "$head" 2>/dev/null || true
  done
}}

end_all() {{
  kill "$head" "${{steps[@]}}" 2>/dev/null || true
  sleep 1
  kill "$head" 2>/dev/null || true  # the first signal asks for a step that nobody may take
  wait || true
}}

# Shortly before the time limit, or by 'scancel --signal=TERM --batch': stop with a checkpoint.
stopping=""
given_up=""
ask_to_stop() {{
  stopping=1
  cosmos-app stop {run_dir} --wait 0 || true
}}
trap ask_to_stop TERM

for ((restarts = {max_restarts}; ; restarts--)); do
  start
  while kill -0 "$head" 2>/dev/null && ! lost_policy; do
    mind_engines
    sleep 1
  done
  if ! kill -0 "$head" 2>/dev/null; then wait "$head" && status=0 || status=$?; fi
  # 0: done, 2: the recipe is wrong, 3: stopped; others may go on from the newest checkpoint
  case "$status" in
    0) break ;;
    3) status=${{given_up:-3}}; break ;;
  esac
  end_all
  if [ "$status" -eq 2 ] || [ -n "$stopping" ] || [ "$restarts" -eq 0 ]; then break; fi
  echo "the head or a policy replica ended with $status: all start again" >&2
done
{teachers_end}for ((left = {grace_s}; left > 0; left--)); do
  if [ -z "$(jobs -rp)" ]; then break; fi
  sleep 1
done
kill "${{steps[@]}}" 2>/dev/null || true
wait || true
exit "$status"
"""
# Nobody else tells them that the run is over.
_TEACHERS_END = 'kill "$teachers" 2>/dev/null || true\n'


def sbatch_script(placement: Placement, cluster: ClusterConfig) -> str:
    """Return the script that ``sbatch`` takes."""
    directives = {
        "job-name": placement.name,
        "nodes": str(placement.nodes),
        "gpus-per-node": str(cluster.gpus_per_node),
        "mem": "0",  # all of each machine's
        "time": cluster.time_limit,
        "signal": f"B:TERM@{cluster.grace_s}",
        "output": _log_of(placement),
        "partition": cluster.partition,
        "account": cluster.account,
    }
    # machines are taken whole: without that a job has one core of each, for one task
    asked = ["--exclusive", *(f"--{name}={value}" for name, value in directives.items() if value)]
    asked += cluster.directives
    head = _HEAD.format(
        directives="\n".join(f"#SBATCH {words}" for words in asked),
        setup=cluster.setup or ":",
        environment=_exports(),
    )
    marker = shlex.quote(str(placement.run_dir / "run.json"))
    parts = [_START.format(marker=marker) + _head_step(placement), _NOBODY]
    parts += [_policy_step(placement, cluster, index) for index in range(placement.policy_replicas)]
    first = placement.policy_replicas * placement.policy_nodes
    for engines in placement.engines:
        parts.append(_engines_step(placement, cluster, engines, first))
        first += engines.nodes
    tail = _TAIL.format(
        run_dir=shlex.quote(str(placement.run_dir)),
        grace_s=cluster.grace_s,
        max_restarts=cluster.max_restarts,
        policies_needed=placement.policies_needed,
        teachers_end=_TEACHERS_END if placement.teachers.count else "",
    )
    start = textwrap.indent("\n".join(parts), "  ")
    return f"{head}\nstart() {{\n{start}}}\n\n{tail}"


def _log_of(placement: Placement) -> str:
    """Return the job's log as a directive says it: "%" begins what SLURM fills in."""
    output = str(placement.run_dir).replace("%", "%%")
    return shlex.quote(f"{output}.slurm-%j.log")


def _exports() -> str:
    from cosmos_app.quiet import QUIET

    return "\n".join(f"export {name}={value}" for name, value in sorted(QUIET.items()))


def _head_step(placement: Placement) -> str:
    command = placement.head_command("$COSMOS_HOST", "$COSMOS_RESUME")
    return (
        'COSMOS_HOST=$(address_of "${nodes[0]}")\nexport COSMOS_HOST\n'
        'srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --gpus=0 '
        f"{' '.join(command)} &\n"
        "head=$!\n"
    )


def _policy_step(placement: Placement, cluster: ClusterConfig, index: int) -> str:
    first, count = index * placement.policy_nodes, placement.policy_nodes
    role = placement.role_command("policy", f"policy-{index}", cluster.join_s)
    torchrun = [
        "python",
        "-m",
        "cosmos_app.torchrun",
        f"--nnodes={count}",
        f"--nproc-per-node={placement.ranks_per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-id={placement.name}-policy-{index}",
        f"--rdzv-endpoint=$meeting:{cluster.rendezvous_port + index}",
        # torchrun would compare addresses with that of the host name, which may be 127.0.1.1
        "--rdzv-conf=is_host=$((SLURM_NODEID == 0))",
        "-m",
        "cosmos_app",
        *role,
    ]
    # where the others go on without it, one that died joins them again
    kept = _kept(f"policy-{index}", placement) if placement.is_elastic else []
    return (
        f'meeting=$(address_of "${{nodes[{first}]}}")\n'
        f"{' '.join([*kept, 'srun', '--overlap'])} "
        f"--nodes={count} --ntasks={count} --ntasks-per-node=1 "
        f'--nodelist="$(IFS=,; echo "${{nodes[*]:{first}:{count}}}")" '
        f"--gpus-per-task={placement.ranks_per_node} --kill-on-bad-exit=1 "
        f"{_on_its_host(torchrun)} &\n"
        "steps+=($!)\n"
        "policies+=($!)\n"
    )


def _engines_step(
    placement: Placement, cluster: ClusterConfig, engines: Engines, first: int
) -> str:
    replica = f"{engines.role}-$SLURM_PROCID"
    role = placement.role_command(engines.role, replica, cluster.join_s)
    return (
        f"srun --overlap --nodes={engines.nodes} --ntasks={engines.count} "
        f"--ntasks-per-node={min(engines.count, engines.per_node)} "
        f'--nodelist="$(IFS=,; echo "${{nodes[*]:{first}:{engines.nodes}}}")" '
        f"--gpus-per-task={engines.gpus} --kill-on-bad-exit=0 "
        f"{_on_its_host([*_kept(replica, placement), 'cosmos-app', *role])} &\n"
        f"engines[{engines.role}]=$!\n"
        + ("teachers=$!\n" if engines is placement.teachers else "")
        + "steps+=($!)\n"
    )


def _kept(replica: str, placement: Placement) -> list[str]:
    """Return what stands before the command of a replica that is started again when it dies."""
    return ["python", "-m", "cosmos_app.kept", replica, str(placement.restarts)]


def _on_its_host(command: Sequence[str]) -> str:
    """Return a command, in words of a shell, that knows the address of the machine it runs on."""
    inner = f"COSMOS_HOST=$(hostname -I | cut -d' ' -f1) exec {' '.join(command)}"
    escaped = inner.replace("'", "'\\''").replace("$meeting", "'\"$meeting\"'")
    return f"bash -c '{escaped}'"
