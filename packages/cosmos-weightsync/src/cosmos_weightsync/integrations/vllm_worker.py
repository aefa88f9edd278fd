"""What vLLM's workers can be asked for beside its own weight-transfer interface."""

from typing import Any

from cosmos_weightsync.errors import WeightSyncError
from cosmos_weightsync.layout import Layout

__all__ = ["WorkerExtension"]


class WorkerExtension:
    """Methods that vLLM mixes into its worker, so that staging runs while it generates.

    vLLM's own calls return nothing to the client and belong to a paused engine; these return at
    once, and leave the model as it was.
    """

    weight_transfer_engine: Any  # vLLM's worker has it; its type differs between versions.

    def cosmos_serve(self, init_info: dict[str, Any]) -> dict[str, Any]:
        """Serve from now on what is staged later; return the ``endpoint``."""
        engine = self.weight_transfer_engine
        try:
            return {"state": "serving", "endpoint": engine.serve(engine.init_info_cls(**init_info))}
        except WeightSyncError as error:
            return {"state": "failed", "kind": type(error).__name__, "error": str(error)}

    def cosmos_stage(self, version: int, timeout_s: float) -> None:
        """Begin to stage ``version`` or a newer one in the background."""
        self.weight_transfer_engine.begin_stage(version, timeout_s)

    def cosmos_staged(self) -> dict[str, Any]:
        """How it goes: ``state`` is idle, running, described, staged or failed."""
        return self.weight_transfer_engine.stage_state()

    def cosmos_discover(self) -> dict[str, Any]:
        """Find out what this worker needs of what the senders have."""
        try:
            return {"state": "discovered", "report": self.weight_transfer_engine.discover()}
        except WeightSyncError as error:
            return {"state": "failed", "kind": type(error).__name__, "error": str(error)}

    def cosmos_layout(self) -> dict[str, Any]:
        """What this worker fetches of what the senders have, as `Layout.to_json` writes it."""
        return Layout.from_ranks([self.weight_transfer_engine.layout.specs]).to_json()
