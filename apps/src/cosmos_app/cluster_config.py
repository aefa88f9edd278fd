"""The recipe's table ``[cluster]``: what a run asks a cluster for."""

from dataclasses import dataclass
from typing import Literal

LauncherName = Literal["local", "slurm", "kubernetes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """The machines of ``--launcher slurm`` and ``--launcher kubernetes``.

    The run directory, the model and the data lie on storage that all of them share.

    Attributes:
        gpus_per_node: of each machine.
        time_limit: longest run, ``hours:minutes:seconds``.
        grace_s: seconds before that limit at which the run is asked to stop, with a checkpoint.
        rendezvous_port: where the ranks of a policy replica meet; each replica takes the next one.
        join_s: how long a replica waits for the run to be there.
        partition: SLURM's; empty for its default.
        account: SLURM's; empty for its default.
        directives: more options of SLURM's ``sbatch``, each as ``--name=value``. They win over
            those that are always there, by which machines are taken whole.
        setup: shell line that readies a machine of SLURM's, such as the activation of an
            environment.
        image: container image of Kubernetes' pods, with cosmos-app in it.
        namespace: Kubernetes'.
        volume_claim: PersistentVolumeClaim, ReadWriteMany, with everything that is shared.
        mount: where it is mounted; relative paths of the recipe begin there.
        secret: Secret whose key ``token`` is the token of the controller's API.
        max_restarts: how often all processes are started again, from the newest checkpoint, when
            the head or a policy replica is lost; where policies are elastic, when too few are left.
    """

    gpus_per_node: int = 8
    time_limit: str = "24:00:00"
    grace_s: int = 300
    rendezvous_port: int = 29500
    join_s: int = 1800
    partition: str = ""
    account: str = ""
    directives: tuple[str, ...] = ()
    setup: str = ""
    image: str = "cosmos:latest"
    namespace: str = "default"
    volume_claim: str = "cosmos"
    mount: str = "/cosmos"
    secret: str = "cosmos"
    max_restarts: int = 3

    def __post_init__(self) -> None:
        """Check counts and directives.

        Raises:
            ValueError: naming what is too small or too large, or is no option of a script.
        """
        for name in ("gpus_per_node", "grace_s", "join_s"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts is {self.max_restarts}; it must not be negative")
        for words in self.directives:
            if not words.startswith("--") or "\n" in words:
                raise ValueError(
                    f"directives have {words!r}; want one option each, as '--qos=long'"
                )
        if not 1024 <= self.rendezvous_port <= 65000:
            raise ValueError(f"rendezvous_port is {self.rendezvous_port}; want 1024 to 65000")
