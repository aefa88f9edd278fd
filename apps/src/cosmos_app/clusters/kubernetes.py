"""A run as one JobSet: a head pod, an indexed Job for each policy replica, a Job for each engine.

JobSet (jobset.x-k8s.io/v1alpha2) gives pods names that resolve, and starts the set again, from the
newest checkpoint, when a policy replica is lost. The pod of a rollout or teacher that dies is
replaced by its Job, after pauses that grow, and so is that of an elastic policy on one machine; a
pod of which a process is suspended for ten minutes has died. A Job that has no retries left starts
the set again too. It fails for good when a recipe is refused or the run was stopped (exit codes 2
and 3), and is over, and its pods go, when the head has finished.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from cosmos_app.cluster_config import ClusterConfig
from cosmos_app.clusters.placement import Placement
from cosmos_app.errors import REFUSED, STOPPED
from cosmos_app.quiet import QUIET

_CONTAINER = "cosmos"
_TOKEN_FOLDER = "/etc/cosmos"
_MOST_PODS = 1000  # of a rollout or teacher: nodes are drained too
# An eviction asks a head to stop: its code says then that it was stopped, but nobody meant the run.
_FINAL = (
    {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {
        "action": "FailJob",
        "onExitCodes": {
            "containerName": _CONTAINER,
            "operator": "In",
            "values": [REFUSED, STOPPED],
        },
    },
)
_JOB_INDEX = "metadata.annotations['jobset.sigs.k8s.io/job-index']"


def jobset_manifest(placement: Placement, cluster: ClusterConfig) -> str:
    """Return the manifest that ``kubectl apply`` takes."""
    # torchrun's ranks on other machines would wait for one that is replaced alone
    comes_and_goes = placement.is_elastic and placement.policy_nodes == 1
    jobs = [
        _job("head", 1, _pods([_head(placement)], cluster, gpus=0), retries=0),
        *(
            _job(
                f"policy-{index}",
                1,
                _pods(_policy(placement, cluster, index), cluster, gpus=placement.ranks_per_node),
                retries=placement.restarts if comes_and_goes else 0,
                nodes=placement.policy_nodes,
            )
            for index in range(placement.policy_replicas)
        ),
    ]
    for engines in placement.engines:
        pods = _pods(_engine(placement, cluster, engines.role), cluster, gpus=engines.gpus)
        jobs.append(_job(engines.role, engines.count, pods, retries=_MOST_PODS))
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": placement.name, "namespace": cluster.namespace},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": placement.name},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["head"]},
            "failurePolicy": {
                "maxRestarts": cluster.max_restarts,
                "rules": [
                    {
                        "name": "final",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": jobs,
        },
    }
    return yaml.safe_dump(manifest, sort_keys=False, width=1000)


def _head(placement: Placement) -> str:
    command = placement.head_command("$COSMOS_HOST", f"dashboard.token_file={_TOKEN_FOLDER}/token")
    marker = shlex.quote(str(placement.run_dir / "run.json"))
    # The first start makes the run, a later one of the same set goes on with it.
    return f"if [ -e {marker} ]; then again=--resume; fi; exec {' '.join(command)} ${{again:-}}"


def _policy(placement: Placement, cluster: ClusterConfig, index: int) -> Sequence[str]:
    first = f"{placement.name}-policy-{index}-0-0.{placement.name}"
    return [
        "exec python -m cosmos_app.torchrun",
        f"--nnodes={placement.policy_nodes}",
        "--node-rank=$JOB_COMPLETION_INDEX",
        f"--nproc-per-node={placement.ranks_per_node}",
        f"--master-addr={first}",
        f"--master-port={cluster.rendezvous_port + index}",
        "-m cosmos_app",
        *placement.role_command("policy", f"policy-{index}", cluster.join_s),
    ]


def _engine(placement: Placement, cluster: ClusterConfig, role: str) -> Sequence[str]:
    command = placement.role_command(role, f"{role}-$REPLICA_INDEX", cluster.join_s)
    return ["exec cosmos-app", *command]


def _job(
    name: str, replicas: int, pods: Mapping[str, Any], *, retries: int, nodes: int = 1
) -> dict[str, Any]:
    spec = {
        "completionMode": "Indexed",
        "parallelism": nodes,
        "completions": nodes,
        "backoffLimit": retries,
        "podFailurePolicy": {"rules": [*_FINAL]},
        "template": {"spec": pods},
    }
    return {"name": name, "replicas": replicas, "template": {"spec": spec}}


def _unexpanded(command: str) -> str:
    """Return what Kubernetes, which expands $(NAME) and makes $ of $$, makes a command of."""
    return re.sub(r"\$(?=[$(])", "$$", command)


def _probe() -> dict[str, Any]:
    """Return what finds, in ten looks, one a minute, that a process of a container is suspended."""
    looks = ["bash", "-c", "! grep -qs '^State:.T' /proc/[0-9]*/status"]
    return {
        "exec": {"command": looks},
        "periodSeconds": 60,
        "failureThreshold": 10,
        "timeoutSeconds": 30,
    }


def _pods(words: Sequence[str], cluster: ClusterConfig, *, gpus: int) -> dict[str, Any]:
    fields = {"COSMOS_HOST": "status.podIP", "REPLICA_INDEX": _JOB_INDEX}
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": cluster.image,
        "workingDir": cluster.mount,
        "command": ["bash", "-c", _unexpanded(" ".join(words))],
        "env": [
            *({"name": name, "value": value} for name, value in sorted(QUIET.items())),
            *(
                {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
                for name, path in fields.items()
            ),
        ],
        "volumeMounts": [
            {"name": "shared", "mountPath": cluster.mount},
            {"name": "token", "mountPath": _TOKEN_FOLDER, "readOnly": True},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
        "livenessProbe": _probe(),
    }
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": cluster.grace_s,
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": cluster.volume_claim}},
            {"name": "token", "secret": {"secretName": cluster.secret, "defaultMode": 0o400}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
