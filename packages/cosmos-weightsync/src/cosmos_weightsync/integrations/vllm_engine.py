"""The engine behind vLLM's backend ``"cosmos"``: lives in each worker, receives and commits.

Only `cosmos_weightsync.integrations.vllm.register` names this module, and vLLM imports it when
the backend is used. Plain users of vLLM's interface need nothing else: ``update_weights`` with
``{"version": v}`` stages inside the pause if nobody staged before.

```
init ─► senders' layout ─► discover (this worker's boxes) ─► stage, again and again ─► commit
        (network)          (model in load format)            (network, engine runs)    (paused)
```
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import ConfigurationError, TransferError, VersionError
from cosmos_weightsync.integrations.vllm_infos import InitInfo, UpdateInfo
from cosmos_weightsync.integrations.vllm_layout import Fill, Step, WorkerLayout, discover_layout
from cosmos_weightsync.integrations.vllm_reload import Filler, Reload
from cosmos_weightsync.layout import Layout, ShardSpec
from cosmos_weightsync.planning import plan_transfer
from cosmos_weightsync.receiver import ReceiverConfig, StagedVersion, WeightReceiver
from cosmos_weightsync.receiver_session import ReceiverSession
from cosmos_weightsync.versions import version_number

__all__ = ["CosmosWeightTransferEngine", "load_version"]


class CosmosWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives the slices that this worker uses, and puts them where its loader would."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The arguments are vLLM's and differ between its versions.
        super().__init__(*args, **kwargs)
        self._init_info = InitInfo()
        self._senders: Layout | None = None
        self._layout: WorkerLayout | None = None
        self._known: tuple[object, WorkerLayout] | None = None
        self._receiver: WeightReceiver | None = None
        self._received_as: tuple[ReceiverConfig, Sequence[ShardSpec]] | None = None
        self._task: threading.Thread | None = None
        self._failure: Exception | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Use these senders from now on. What was staged from others is served on.

        Raises:
            WeightSyncError: they cannot be reached, or do not have what the model needs.
            ConfigurationError: an option makes no sense, or this engine moves experts between
                its workers as it runs.
        """
        init_info.receiver_config()
        if self._task is not None and self._task.is_alive():
            self.shutdown()
        self._layout = None
        if self.parallel_config.enable_eplb:
            raise ConfigurationError(
                "enable_eplb moves experts between workers, whose slices would then be others'; "
                "make the engine without it"
            )
        self._init_info = init_info
        self._senders = None
        if init_info.describe == "background":
            self._begin(self._describe)
            return
        self._describe()
        self.discover()

    def serve(self, init_info: InitInfo) -> str:
        """Serve from now on what is staged later; return where. Readers wait for it.

        Raises:
            ConfigurationError: there is no address to serve at.
        """
        if self._receiver is None:
            config = init_info.receiver_config()
            self._receiver = WeightReceiver(wanted=(), config=config)
            self._received_as = config, ()
        return self._receiver.endpoint

    def discover(self) -> str:
        """Find out what this worker needs of what the senders have; returns a report.

        Senders with the same tensors as before, cut in whatever way, need no second look. The
        model must not run meanwhile, which vLLM's calls to workers ensure. It serves on with the
        weights it has, whatever comes out.

        Raises:
            UnknownTensorError: the engine's loader refuses a tensor, or misses one.
            UncoveredRegionError: the senders have a part of a tensor only.
        """
        if self._senders is None:
            raise VersionError("init_weight_transfer_engine with the senders' endpoints first")
        info = self._init_info
        offered = (info.missing, _signature(self._senders))
        if self._known is None or self._known[0] != offered:
            with set_current_vllm_config(self.vllm_config):
                found = discover_layout(self.model, self._senders, missing=info.missing)
            self._known = (offered, found)
        layout = self._known[1]
        plan_transfer(self._senders, Layout.from_ranks([layout.specs]))
        self._receiver = self._receiver_of(layout)
        self._layout = layout
        return layout.report()

    def begin_stage(self, version: int, timeout_s: float) -> None:
        """Stage in a background thread; returns at once.

        Raises:
            VersionError: a staging is still running, or there are no senders.
        """
        receiver, _ = self._connected()
        self._begin(partial(receiver.stage, version, timeout_s=timeout_s))

    def stage_state(self) -> dict[str, Any]:
        """How the work in the background goes, as plain values."""
        if self._task is not None and self._task.is_alive():
            return {"state": "running"}
        if self._failure is not None:
            kind, words = type(self._failure).__name__, str(self._failure)
            return {"state": "failed", "kind": kind, "error": words}
        receiver = self._receiver if self._layout is not None else None
        staged = receiver.staged if receiver is not None else None
        if receiver is None or staged is None:
            return {"state": "idle" if self._senders is None else "described"}
        return {
            "state": "staged",
            "version": staged.version,
            "num_bytes": staged.num_bytes,
            "wire_bytes": staged.wire_bytes,
            "seconds": staged.seconds,
            "digest": staged.digest,
            "endpoint": receiver.endpoint if self._init_info.serve_host else "",
        }

    @property
    def layout(self) -> WorkerLayout:
        """What this worker fetches.

        Raises:
            VersionError: nothing was discovered yet.
        """
        return self._connected()[1]

    def start_weight_update(self) -> None:
        """Nothing to prepare: the model is touched by `receive_weights` only."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Commit. Overridden because vLLM's own synchronises an accelerator, which may not be."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Put the staged version to use, staging it first if nobody did.

        Every worker of the engine commits the same version, or none does.

        Raises:
            TransferError: a worker could not stage it; all go on with what they had.
            VersionError: the version is no whole number.
        """
        receiver, layout = self._connected()
        version = version_number(update_info.version)
        deadline = Deadline.after(update_info.timeout_s)
        if self._task is not None:
            self._task.join(deadline.remaining("the staging"))
        while True:
            versions = _exchange(_staged_or_reason(receiver, version, deadline))
            reasons = [found for found in versions if isinstance(found, str)]
            if reasons:
                raise TransferError(reasons[0])
            if len(set(versions)) == 1:
                break
            version = max(found for found in versions if isinstance(found, int))
        tensors = {
            (shard.spec.name, shard.spec.box): shard.tensor for shard in receiver.staged_shards()
        }
        load_version(self.model, self.model_config, layout, tensors)
        receiver.commit()

    def finish_weight_update(self) -> None:
        """Nothing is left to do: `receive_weights` made the model ready to run."""

    def shutdown(self) -> None:
        """Hang up on the senders, and on whoever fetches from here."""
        receiver, self._receiver = self._receiver, None
        self._layout = None
        if receiver is not None:
            receiver.close()
        if self._task is not None:
            self._task.join(10.0)
            self._task = None

    def _receiver_of(self, layout: WorkerLayout) -> WeightReceiver:
        """The one there was, if it fits, as others fetch from it; else another."""
        config, specs = self._init_info.receiver_config(), layout.specs
        before, self._receiver = self._receiver, None
        received_as, self._received_as = self._received_as, (config, specs)
        if before is None or received_as is None or received_as[0] != config:
            if before is not None:
                before.close()
            return WeightReceiver(self._init_info.endpoints, wanted=specs, config=config)
        if received_as[1] != specs:
            before.want(specs)
        before.connect(self._init_info.endpoints)
        return before

    def _connected(self) -> tuple[WeightReceiver, WorkerLayout]:
        if self._receiver is None or self._layout is None:
            raise VersionError("init_weight_transfer_engine with the senders' endpoints first")
        return self._receiver, self._layout

    def _begin(self, work: Callable[[], object]) -> None:
        if self._task is not None and self._task.is_alive():
            raise VersionError("a staging is still running")
        self._failure = None
        self._task = threading.Thread(target=self._run, args=(work,), name="weight-stager")
        self._task.daemon = True
        self._task.start()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - handed over to stage_state, in another thread
            self._failure = error

    def _describe(self) -> None:
        info = self._init_info
        deadline = Deadline.after(info.connect_timeout_s)
        sessions: list[ReceiverSession] = []
        try:
            for endpoint in self._describers():  # Kept one by one: a failure closes those before.
                sessions += [ReceiverSession(endpoint, info.token, deadline)]
            sessions.sort(key=lambda session: session.rank)
            senders = [session for session in sessions if session.role == "sender"]
            ranks = [session.rank for session in senders]
            if not sessions or (senders and ranks != list(range(senders[0].num_ranks))):
                raise ConfigurationError(
                    f"endpoints of sender ranks {ranks} were given, not of all"
                )
            self._senders = Layout.merge([session.layout for session in sessions])
        finally:
            for session in sessions:
                session.close()

    def _describers(self) -> list[str]:
        """Who tells what tensors there are; senders that all others ask too, only once."""
        info = self._init_info
        return info.described_by if info.described_by and self._known is None else info.endpoints


def load_version(
    model: nn.Module,
    model_config: ModelConfig,
    layout: WorkerLayout,
    tensors: Mapping[tuple[str, Box], Tensor],
) -> None:
    """Put one version into a model that is not running.

    Args:
        model: A loaded vLLM model.
        model_config: vLLM's.
        layout: What `discover_layout` found for this model.
        tensors: The version: a contiguous tensor for each of ``layout.specs``.
    """

    def filler(steps: tuple[Step | Fill, ...]) -> Filler:
        def fill(parameter: Tensor) -> None:
            for step in steps:
                if isinstance(step, Step):
                    step.apply(tensors[step.name, step.box], parameter)
                else:
                    step.apply(parameter)

        return fill

    fillers = {
        module: {name: filler(steps) for name, steps in parameters.items()}
        for module, parameters in layout.steps.items()
    }
    for module, name in layout.whole_targets:
        fillers.setdefault(module, {}).setdefault(name, filler(()))  # The loader fills it.
    whole_modules = {module for module, _ in layout.whole_targets}
    with torch.no_grad():
        reload = Reload(model, model_config)
        for module in fillers.keys() - whole_modules:
            reload.fill(module, fillers[module])
        if layout.whole:
            touched = {module: fillers[module] for module in whole_modules}
            reload.load_whole(_whole_tensors(layout, tensors), touched)
        reload.finish()


def _signature(senders: Layout) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """What the engine's loader sees of the senders."""
    return tuple(
        (name, entry.dtype, senders.shape_of(name)) for name, entry in senders.tensors.items()
    )


def _whole_tensors(
    layout: WorkerLayout, tensors: Mapping[tuple[str, Box], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    for spec in layout.specs:
        if spec.name in layout.whole:
            yield spec.name, tensors[spec.name, spec.box]


def _staged_or_reason(receiver: WeightReceiver, version: int, deadline: Deadline) -> int | str:
    """The version staged, or why there is none."""
    staged: StagedVersion | None = receiver.staged
    try:
        if staged is None or staged.version < version:
            staged = receiver.stage(version, timeout_s=deadline.remaining("the staging"))
    except Exception as error:  # noqa: BLE001 - the other workers have to learn of it too
        return f"{type(error).__name__}: {error}"
    return staged.version


def _exchange(found: int | str) -> list[int | str]:
    """What every worker of this engine found, in rank order."""
    group = get_world_group()
    if group.world_size == 1:
        return [found]
    gathered: list[int | str] = [0] * group.world_size
    torch.distributed.all_gather_object(gathered, found, group=group.cpu_group)
    return gathered
