"""RL on pictures and videos, with rollouts by the real vLLM: a model learns from what it sees."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from capabilities import needs
from clips import write_clip
from real_runs import Run, Runner, assert_balanced
from seeing import (
    COLOURS,
    can_cut_pictures,
    seeing_environment,
    write_pictures,
    write_seeing_model,
)
from transformers import AutoModelForImageTextToText, AutoTokenizer

from cosmos_app.samples import read_trajectories
from cosmos_app.shown_samples import parse_shown_sample
from cosmos_core.metrics import read_metrics
from cosmos_core.videos import is_video
from cosmos_parallel import (
    AdamWConfig,
    Learner,
    LearnerConfig,
    ModelConfig,
    ParallelConfig,
    PictureReader,
    SftBatchConfig,
    build_mesh,
    export_hf,
    fit,
    load_causal_lm,
    load_sft_data,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    needs("torchvision", can_cut_pictures()),
]
QUESTION = "Which colour?"


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def shown(folder: Path) -> list[tuple[str, dict[str, object]]]:
    """Write two pictures and a video of each colour; return colours, and fields of rows."""
    found: list[tuple[str, dict[str, object]]] = []
    for colour, names in write_pictures(folder / "pictures", ((28, 28), (56, 28))).items():
        found += [(colour, {"images": [f"pictures/{name}"]}) for name in names]
        write_clip(folder / f"{colour}.mp4", [COLOURS[colour]] * 8, size=(28, 28))
        found.append((colour, {"videos": [f"{colour}.mp4"]}))
    return found


def rows_of_two(folder: Path) -> list[dict[str, object]]:
    """Write two pictures of each colour; return rows that show both."""
    pictures = write_pictures(folder / "pictures", ((28, 28), (56, 28)))
    return [
        {"prompt": QUESTION, "answer": "r", "images": [f"pictures/{name}" for name in names]}
        for names in pictures.values()
    ]


def half_taught(folder: Path, sights: list[tuple[str, dict[str, object]]]) -> Path:
    """Return a model that answers with a colour's first letter, every other time the right one."""
    write_seeing_model(folder / "random")
    rows = [
        {"prompt": QUESTION, "response": answer[0], **sight}
        for colour, sight in sights
        if "images" in sight  # this process has no torchvision to cut up videos with
        for answer in (colour, *COLOURS)
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder / "random")
    reader = PictureReader.of(folder / "random")
    data = load_sft_data(write_rows(folder / "any.jsonl", rows), tokenizer, reader=reader)
    mesh = build_mesh(ParallelConfig())
    model = load_causal_lm(folder / "random", mesh, ModelConfig(dtype="float32"))
    learner = Learner(model, LearnerConfig(optimizer=AdamWConfig(lr=3e-3)))
    fit(learner, data, SftBatchConfig(batch_size=len(rows)), steps=range(60))
    export_hf(model, folder / "model", mesh, tokenizer_dir=folder / "random")
    return folder / "model"


def start_seeing(runner: Runner, *settings: str) -> Run:
    """Start a run whose processes find what cuts pictures up."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in seeing_environment().items():
            patch.setenv(name, value)
        return runner.start(*settings)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("seeing")
    sights = shown(folder)
    model = half_taught(folder, sights)
    rows = [{"prompt": QUESTION, "answer": colour[0], **sight} for colour, sight in sights]
    data = write_rows(folder / "rows.jsonl", rows)
    started = start_seeing(
        Runner(folder, forks=True),
        f"model.path={model}",
        f"data.path={data}",
        f"data.held_out_path={data}",
        "staleness.depth=0",
        "staleness.bound=0",
        "trainer.steps=10",
        f"trainer.groups_per_step={len(rows)}",
        "trainer.checkpoint_every=0",
        "learner.optimizer={kind='adamw', lr=5e-4}",
        "rollout.replicas=1",
        f"rollout.slots={len(rows)}",
        "rollout.sampling.max_new_tokens=3",
        "rollout.engine.context_length=96",
    )
    assert started.finish(deadline_s=600.0) == 0, started.logs()
    return started


def test_a_model_learns_what_it_is_shown(run: Run) -> None:
    report = run.report
    rewards = [
        record.values["reward"]
        for record in read_metrics(run.output / "metrics.jsonl")
        if record.role == "controller" and "reward" in record.values
    ]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.1  # 0.44 to 0.8; by chance it is 0.33
    assert report["accuracies"]["10"] > 0.5
    assert report["books"]["consumed"] == 10 * 9
    assert_balanced(report["books"])
    model, rows = run.output / "export" / "model", run.output / "data" / "train.jsonl"
    answered = subprocess.run(
        [sys.executable, Path(__file__).with_name("seeing_answers.py"), model, rows],
        env={**os.environ, **seeing_environment()},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    right = int(answered.stdout)
    assert right / 9 == pytest.approx(report["accuracies"]["10"])


def test_engine_and_trainer_see_alike_in_every_version(run: Run) -> None:
    """Of older pictures' embeddings, or a vision part left behind, the engine would see another."""
    mismatches = [
        record.values["mismatch_abs"]
        for record in read_metrics(run.output / "metrics.jsonl")
        if "mismatch_abs" in record.values
    ]
    assert len(mismatches) == 10
    assert max(mismatches) < 1e-2  # tokens that stand for pictures are never sampled


def test_people_are_shown_the_pictures_too(run: Run) -> None:
    (file,) = (run.output / "samples").glob("shown-*.jsonl")
    samples = [parse_shown_sample(line) for line in file.read_bytes().splitlines()]
    assert all(sample and len(sample.images) == 1 for sample in samples)
    pictures = [sample.images[0] for sample in samples if sample]
    assert all(is_video(one) or os.path.exists(one) for one in pictures)
    assert any(sample and QUESTION in sample.spans[0][2] for sample in samples)


def test_a_teacher_beside_the_rollouts_sees_what_they_saw(runner: Runner) -> None:
    write_seeing_model(runner.folder / "model")
    write_seeing_model(runner.folder / "teacher", seed=1)
    rows = rows_of_two(runner.folder)
    started = start_seeing(
        runner,
        f"model.path={runner.folder / 'model'}",
        f"model.teacher={runner.folder / 'teacher'}",
        f"data.path={write_rows(runner.folder / 'rows.jsonl', rows)}",
        "data.held_out=0", "validation.before=false", "validation.after=false",
        "algorithm.kind=on_policy_distillation", "rollout.record=true", "teacher.replicas=1",
        "trainer.steps=2", f"trainer.groups_per_step={len(rows)}", "rollout.replicas=1",
        "rollout.sampling.max_new_tokens=3", "rollout.engine.context_length=96",
        "teacher.engine={kind='vllm', dtype='float32', context_length=97, kv_cache_mib=16}",
    )  # fmt: skip
    assert started.finish(deadline_s=400.0) == 0, started.logs()
    reader = PictureReader.of(runner.folder / "teacher")
    assert reader is not None
    teacher = AutoModelForImageTextToText.from_pretrained(
        runner.folder / "teacher", dtype=torch.float32
    ).eval()
    recorded = list(read_trajectories(started.output / "trajectories" / "rollout-0.bin"))
    assert len(recorded) >= 2 * len(rows)
    for trajectory in recorded:
        assert len(trajectory.images) == 2
        assert trajectory.teacher is not None
        ids = torch.tensor([trajectory.token_ids.tolist()])
        with torch.no_grad():
            logits = teacher(input_ids=ids, **reader.inputs(ids, [trajectory.images])).logits
        expected = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
        np.testing.assert_allclose(
            trajectory.teacher.logprobs[1:],
            np.where(trajectory.trainable[1:], expected, 0.0),
            atol=1e-4,
        )


@pytest.mark.thorough
def test_a_policy_cut_into_stages_trains_on_pictures_and_is_served_as_it_is(
    runner: Runner,
) -> None:
    write_seeing_model(runner.folder / "model")
    rows = rows_of_two(runner.folder)
    started = start_seeing(
        runner,
        f"model.path={runner.folder / 'model'}",
        f"data.path={write_rows(runner.folder / 'rows.jsonl', rows)}",
        "data.held_out=0", "validation.before=false", "validation.after=false",
        "policy.ranks=2", "policy.parallel.pp=2", "algorithm.kind=dr_grpo",
        "learner.optimizer={kind='adamw', lr=1e-2}",
        "algorithm.objective.entropy_coefficient=0.1", "staleness={depth=0, bound=0}",
        "trainer.steps=3", f"trainer.groups_per_step={len(rows)}", "rollout.replicas=1",
        "rollout.sampling.max_new_tokens=3", "rollout.engine.context_length=96",
    )  # fmt: skip
    assert started.finish(deadline_s=400.0) == 0, started.logs()
    mismatches = [
        record.values["mismatch_abs"]
        for record in read_metrics(started.output / "metrics.jsonl")
        if "mismatch_abs" in record.values
    ]
    assert len(mismatches) == 3
    # 2 of 104 tokens stand for pictures, and are never sampled: of a model that knows nothing that
    # is 0.02; weights that are one version old make it 0.2
    assert max(mismatches) < 0.03
    kind = AutoModelForImageTextToText
    exported = kind.from_pretrained(started.output / "export" / "model", dtype=torch.float32)
    before = dict(kind.from_pretrained(runner.folder / "model").named_parameters())
    moved = {n for n, p in exported.named_parameters() if not torch.equal(p, before[n])}
    assert {"lm_head.weight", "model.visual.patch_embed.proj.weight"} <= moved
