"""Checkpoints that ranks write together: killed, out of disk, and in an S3-compatible store."""

import json
import signal
from pathlib import Path

import pytest
from process_trees import run_tree

s3fs = pytest.importorskip("s3fs")

from s3_server import s3_server  # noqa: E402

SCRIPT = Path(__file__).with_name("checkpoint_ranks.py")
KILLED = -signal.SIGKILL
CASES = {"second": [0, KILLED], "first": [KILLED, 0], "both": [KILLED, KILLED]}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    with s3_server("bucket") as settings:
        run_tree(SCRIPT, directory, json.dumps(settings), deadline_s=280)
        store = s3fs.S3FileSystem(**settings, use_listings_cache=False)
        names = [each.rpartition("/")[2] for each in store.ls("bucket/run")]
        (directory / "s3-names.json").write_text(json.dumps(names))
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("who", CASES)
def test_a_kill_during_a_save_of_two_ranks_leaves_the_one_before_whole(written, who):
    found = json.loads((written / f"{who}.json").read_text())
    assert found["codes"] == CASES[who]
    # who is left says so, and where that is the first rank removes what was written
    assert len(found["said"]) == CASES[who].count(0)
    assert all(said.startswith("CheckpointWriteError: ") for said in found["said"])
    assert len(found["left"]) == (who != "second")
    for rank in ("1x1r1-0", "1x2r1-0", "1x2r1-1"):
        resumed = found[rank]
        step = resumed["step"]
        assert resumed["all"][-1] == step
        assert (resumed["extra"], resumed["values"]) == (str(step), [step])
    assert not [name for name in found["1x2r1-0"]["after"] if name.startswith(".")]
    assert f"step-{step + 1:08d}" in found["1x2r1-0"]["after"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_rank_is_an_error_of_the_save_on_all(written, rank):
    said = (written / f"full-{rank}.txt").read_text()
    assert said.startswith("CheckpointWriteError: checkpoint ")
    assert ": rank 1: RuntimeError: " in said
    found = json.loads((written / f"full-{rank}.json").read_text())
    assert found["steps"] == [1]
    if rank == 0:  # which removes what was written
        assert found["names"] == ["step-00000001"]


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "what"), [(0, "File too large"), (1, "another rank says why")])
def test_a_full_disk_of_one_rank_is_an_error_of_the_export_on_all(written, rank, what):
    said = (written / f"exported-{rank}.txt").read_text()
    assert said.startswith("ExportError: cannot export to ")
    assert what in said
    assert (written / "exported" / "model.safetensors").is_file()  # by the next


@pytest.mark.slow
def test_ranks_load_the_checkpoint_that_the_first_sees_or_none_does(written):
    first, second = (json.loads((written / f"unlike-{rank}.json").read_text()) for rank in (0, 1))
    other = "another rank could not use /unlike-seen-{}; see its log"
    newest = "checkpoint /unlike-seen-{}/step-00000002 {}"
    damaged = "is damaged: manifest.json: "
    # loaded, and asked for: the second has none, a damaged one, a whole one; the first a damaged
    assert first["said"][:6] == [other.format(0), "step 2"] * 2 + ["step 2"] * 2
    assert second["said"][0] == newest.format(1, "does not exist")
    assert second["said"][2].startswith(newest.format(1, damaged))
    assert second["said"][1::2] == ["step 2"] * 3 + [other.format(1)]
    assert (second["said"][4], second["said"][6]) == ("step 2", other.format(1))
    assert all(said.startswith(newest.format(0, damaged)) for said in first["said"][6:])
    assert first["values"] == second["values"] == [2.0]


@pytest.mark.slow
def test_whatever_one_rank_meets_is_an_error_of_the_save_on_all(written):
    said = [(written / f"unreachable-{rank}.txt").read_text() for rank in (0, 1)]
    assert "EOFError: nobody answers" in said[0]
    assert "another rank could not use" in said[1]
    assert all(each.startswith("CheckpointWriteError: checkpoint ") for each in said)
    for rank in (0, 1):
        found = json.loads((written / f"unreachable-{rank}.json").read_text())
        assert found == {"steps": [2], "step": 2}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1x1r1", "1x2r1"])
def test_what_two_ranks_save_to_s3_is_resumed_by_one_and_by_two(written, layout):
    trained = json.loads((written / "s3-trained.json").read_text())
    found = json.loads((written / f"s3-{layout}.json").read_text())
    # step 5 was written but for its manifest when its writer was killed
    assert (found["step"], found["extra"]) == (3, "cut")
    for mine, theirs in zip(found["reports"], trained, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert mine["lr"] == theirs["lr"]


@pytest.mark.slow
def test_half_a_save_to_s3_goes_with_the_next(written):
    assert (written / "s3-1.txt").read_text().startswith("CheckpointWriteError: ")
    assert json.loads((written / "s3-names.json").read_text()) == [
        "step-00000003.0",
        "step-00000005.1",
    ]
