"""Only what changed, from the ranks of an FSDP2 trainer in processes of their own."""

import pytest
import torch

from cosmos_weightsync import PeerLostError, ReceiverConfig, WeightReceiver

pytestmark = pytest.mark.slow


def test_changes_arrive_exactly_and_a_killed_rank_leaves_the_version_before(
    start_trainer, tmp_path
):
    options = {"width": 203, "depth": 6}  # No dimension is divided evenly.
    trainer = start_trainer(2, "blocks", options, config={"wire_dtype": "bfloat16"})
    receivers = {
        transport: WeightReceiver(
            trainer.endpoints, config=ReceiverConfig(transport=transport, reuse="changes")
        )
        for transport in ("tcp", "process_group")
    }
    for version in (1, 2, 3):
        trainer.ask("step", scale=1e-5)
        trainer.ask("save", path=str(tmp_path / "wanted.pt"))
        trainer.ask("publish", version=version)
        wanted = torch.load(tmp_path / "wanted.pt")
        for receiver in receivers.values():
            staged = receiver.stage(version, timeout_s=60)
            for shard in receiver.staged_shards():
                assert torch.equal(shard.tensor, wanted[shard.spec.name].bfloat16())
            if version > 1:
                assert 0 < staged.wire_bytes < staged.num_bytes / 2
            receiver.commit()
    trainer.ask("step", scale=1e-5)
    trainer.ask("publish", version=4)
    trainer.ranks[1].kill()
    for receiver in receivers.values():
        with pytest.raises(PeerLostError):
            receiver.stage(4, timeout_s=30)
        assert receiver.version == 3
        receiver.close()
