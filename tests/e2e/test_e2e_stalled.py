"""A learner on given data that gets no further ends itself, and its run goes on."""

import json
from pathlib import Path

import pytest
from blocked_saves import block_reading
from PIL import Image
from real_runs import ROOT, Runner
from seeing import write_seeing_model

STALL_S = 8.0
NUM_STEPS, NUM_ROWS = 40, 80
SETTINGS = (
    f"trainer.steps={NUM_STEPS}",
    "trainer.validate_every=0",
    "trainer.retention.keep_best=0",
    "trainer.checkpoint_every=5",
    "trainer.batch.batch_size=2",
    "data.held_out=0",
    f"launch.stall_s={STALL_S}",
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def write_rows(folder: Path) -> list[Path]:
    """Write rows that show a picture each; return the pictures."""
    folder.mkdir()
    pictures = [folder / f"{number}.png" for number in range(NUM_ROWS)]
    rows = [
        {"prompt": "Which colour?", "response": "r", "images": [str(picture)]}
        for picture in pictures
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for picture in pictures:
        Image.new("RGB", (28, 28), (255, 0, 0)).save(picture)
    return pictures


def test_a_learner_that_never_has_its_data_ends_itself_and_goes_on_from_a_checkpoint(
    runner: Runner, tmp_path: Path
) -> None:
    pictures = write_rows(tmp_path / "data")
    write_seeing_model(tmp_path / "model")
    run = runner.start(
        *SETTINGS,
        f"data.path={tmp_path}/data/rows.jsonl",
        f"model.path={tmp_path}/model",
        recipe=ROOT / "configs" / "sft.toml",
    )
    run.wait_for(lambda: any(run.output.glob("checkpoints/step-*")))
    kept = [block_reading(picture) for picture in pictures]
    log = run.output / "logs" / "policy-0.log"
    run.wait_for(lambda: "so it ends" in log.read_text())
    for picture, there in zip(pictures, kept, strict=True):
        there.rename(picture)

    assert run.finish() == 0, run.logs()
    said = (
        "policy-0: a pass over its data, or reading them (launch.stall_s), took more than "
        f"{STALL_S:g} s, so it ends"
    )
    told, found, _ = log.read_text().partition(said)
    assert found, run.logs()
    assert "images.py" in told, "where it was is said"
    died = [(i["name"], i["how"], i["outcome"]) for i in run.report["incidents"]]
    assert died == [("policy-0", "exit code 1", "restarted")]
    assert len(run.report["losses"]) == NUM_STEPS
