"""On-policy distillation with teachers beside the rollouts: real runs, and one that hangs."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from openai_server import ServedEngine
from real_runs import SMALL, Run, Runner, assert_balanced
from transformers import AutoModelForCausalLM

from cosmos_app.control_files import read_teacher_token, teacher_urls
from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model
from cosmos_app.samples import read_trajectories
from cosmos_core.rundir import RunDirectory
from cosmos_core.trajectory import Trajectory
from cosmos_rollout import TransformersConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 6
MANY_STEPS = 40  # a few seconds, in which somebody can be asked and killed


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def opinionated(path: Path) -> None:
    """Make a fresh model, which finds all tokens about equally likely, prefer some."""
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.lm_head.weight.mul_(10.0)
    model.save_pretrained(path)


def tiny_pair(folder: Path) -> tuple[Path, Path]:
    """Build a student and a teacher over the same letters; return where they are."""
    size = TinyModelConfig(num_layers=1, hidden_size=32, num_heads=2)
    letters = ["0123456789+= "]
    student, teacher = folder / "student", folder / "teacher"
    build_tiny_model(student, letters, size, 0)
    build_tiny_model(teacher, letters, size, 1)
    opinionated(teacher)
    return student, teacher


def assert_scored(recorded: Sequence[Trajectory], teacher: Path, num_likeliest: int) -> None:
    """Compare the scores that samples carry with a pass of the teacher in double precision."""
    network = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64).eval()
    for trajectory in recorded:
        ids = torch.tensor(trajectory.token_ids.tolist())
        with torch.no_grad():
            table = network(ids[None]).logits[0, :-1].log_softmax(-1)
        expected = table[torch.arange(len(ids) - 1), ids[1:]].numpy()
        assert trajectory.teacher is not None
        np.testing.assert_allclose(
            trajectory.teacher.logprobs[1:],
            np.where(trajectory.trainable[1:], expected, 0.0),
            atol=1e-4,
        )
        best = table.topk(num_likeliest).values.numpy()
        np.testing.assert_allclose(
            trajectory.teacher.top_logprobs[1:],
            np.where(trajectory.trainable[1:, None], best, 0.0),
            atol=1e-4,
        )


def test_samples_are_scored_by_a_teacher_that_hangs_and_is_begun_anew(runner: Runner) -> None:
    student, teacher = tiny_pair(runner.folder)
    run = runner.start(
        *SMALL, f"trainer.steps={STEPS}", f"model.path={student}", f"model.teacher={teacher}",
        "algorithm.kind=on_policy_distillation", "rollout.record=true",
        "teacher.replicas=1", "teacher.engine.kind=transformers", "teacher.top_k=2",
        "learner.optimizer.lr=0.03", "validation.after=false", "validation.before=false",
        "launch.hung_s=8",
    )  # fmt: skip
    run.wait_for(lambda: run.steps_done() >= 1)
    os.kill(run.child("teacher-0"), signal.SIGSTOP)
    assert run.finish(deadline_s=400.0) == 0, run.logs()
    assert_balanced(run.report["books"])
    (incident,) = [one for one in run.report["incidents"] if one["name"] == "teacher-0"]
    assert (incident["how"], incident["outcome"]) == (
        "signal 9 (SIGKILL), as it hung",
        "restarted",
    )
    recorded = list(read_trajectories(run.output / "trajectories" / "rollout-0.bin"))
    assert len(recorded) >= STEPS * 32
    assert_scored(recorded[:: len(recorded) // 20], teacher, 2)
    # Reverse KL to the teacher, estimated on the student's own samples, falls.
    gaps = [
        float((t.logprobs - t.teacher.logprobs)[t.trainable].mean()) for t in recorded if t.teacher
    ]
    assert np.mean(gaps[-32:]) < 0.9 * np.mean(gaps[:32])


def all_listen(directory: RunDirectory) -> bool:
    """Whether no teacher of a run is starting, or starting again."""
    for url in teacher_urls(directory):
        try:
            httpx.get(f"{url}/models")
        except httpx.TransportError:
            return False
    return True


def assert_answers_the_run_alone(run: Run) -> None:
    """Ask a run's teachers to score, and what they have, by several tokens."""
    directory = RunDirectory.open(run.output)
    token = read_teacher_token(directory)
    assert len(token) >= 32
    run.wait_for(lambda: len(teacher_urls(directory)) == 2 and all_listen(directory))
    for url in teacher_urls(directory):
        for shown, status in (("guess", 401), (token[:-1], 401), (token, 200)):
            headers = {"Authorization": f"Bearer {shown}"}
            scores = {"prompt": [5, 6], "prompt_logprobs": 0}
            told = httpx.post(f"{url}/completions", json=scores, headers=headers)
            assert (told.status_code, "logprob" in told.text) == (status, status == 200)
            assert httpx.get(f"{url}/models", headers=headers).status_code == status
        assert httpx.get(f"{url}/models").status_code == 401


def test_one_of_two_teachers_that_is_killed_costs_no_sample(runner: Runner) -> None:
    student, teacher = tiny_pair(runner.folder)
    run = runner.start(
        *SMALL, f"trainer.steps={MANY_STEPS}", f"model.path={student}", f"model.teacher={teacher}",
        "algorithm.kind=on_policy_distillation", "rollout.record=true",
        "teacher.replicas=2", "teacher.engine.kind=transformers", "teacher.top_k=2",
        "validation.after=false", "validation.before=false",
    )  # fmt: skip
    run.wait_for(lambda: run.steps_done() >= 1)
    assert_answers_the_run_alone(run)
    os.kill(run.child("teacher-0"), signal.SIGKILL)
    assert run.finish(deadline_s=400.0) == 0, run.logs()
    (incident,) = run.report["incidents"]
    assert (incident["name"], incident["how"]) == ("teacher-0", "signal 9 (SIGKILL)")
    assert incident["outcome"] == "restarted"
    books = run.report["books"]
    assert_balanced(books)
    assert (books["consumed"], sum(books["dropped"].values())) == (MANY_STEPS * 8, 0)
    assert run.report["failures"] == {}
    recorded = list(read_trajectories(run.output / "trajectories" / "rollout-0.bin"))
    assert len(recorded) >= MANY_STEPS * 32
    assert_scored(recorded[:: len(recorded) // 200], teacher, 2)


def test_a_server_of_somebody_else_is_the_teacher_of_a_whole_run(runner: Runner) -> None:
    """It wants a token, and tells the log-probs of given tokens alone."""
    student, teacher = tiny_pair(runner.folder)
    key = runner.folder / "teacher.key"
    key.write_text("secret\n")
    served = ServedEngine(TransformersConfig(), teacher, key="secret")
    served.start()
    try:
        run = runner.start(
            *SMALL, "trainer.steps=3", f"model.path={student}", "rollout.record=true",
            "algorithm.kind=on_policy_distillation", f'teacher.urls=["{served.url}"]',
            "teacher.model=tiny", f"teacher.key_file={key}", "learner.optimizer.lr=0.03",
            "validation.after=false", "validation.before=false",
        )  # fmt: skip
        assert run.finish(deadline_s=400.0) == 0, run.logs()
    finally:
        served.stop()
    assert (run.report["incidents"], run.report["failures"]) == ([], {})
    assert_balanced(run.report["books"])
    recorded = list(read_trajectories(run.output / "trajectories" / "rollout-0.bin"))
    assert len(recorded) >= 3 * 32
    assert_scored(recorded[:: len(recorded) // 20], teacher, 0)


def test_a_server_with_other_tokens_ends_the_run_before_anything_is_learnt_from_it(
    runner: Runner,
) -> None:
    """One of two, and of a third nobody knows, as it is not there."""
    student, teacher = tiny_pair(runner.folder)
    other = runner.folder / "other"
    build_tiny_model(other, ["!0123456789+= "], TinyModelConfig(), 1)
    served = [ServedEngine(TransformersConfig(), path) for path in (teacher, other)]
    for one in served:
        one.start()
    nobody = "http://127.0.0.1:9/v1"
    urls = json.dumps([served[0].url, nobody, served[1].url])
    try:
        run = runner.start(
            *SMALL, f"model.path={student}", "algorithm.kind=on_policy_distillation",
            f"teacher.urls={urls}", "teacher.model=tiny", "validation.before=false",
        )  # fmt: skip
        assert run.finish(deadline_s=400.0) == 2, run.logs()
    finally:
        for one in served:
            one.stop()
    said = " ".join(run.text.split())
    assert f"{served[1].url} has other tokens than the recipe's model" in said
    assert f"whether {nobody} has the tokens of the recipe's model is not known" in run.logs()
    assert run.steps_done() == 0


def test_vllm_is_the_teacher_of_a_whole_run(runner: Runner) -> None:
    pytest.importorskip("vllm")
    student, teacher = tiny_pair(runner.folder)
    run = runner.start(
        *SMALL, "trainer.steps=3", f"model.path={student}", f"model.teacher={teacher}",
        "algorithm.kind=on_policy_distillation", "rollout.record=true", "teacher.replicas=1",
        "teacher.engine={kind='vllm', dtype='float32', kv_cache_mib=16}", "teacher.top_k=2",
        "validation.after=false", "validation.before=false",
    )  # fmt: skip
    assert run.finish(deadline_s=500.0) == 0, run.logs()
    assert run.report["incidents"] == []
    assert run.report["steps"] == 3
    books = run.report["books"]
    assert_balanced(books)
    assert (books["consumed"], sum(books["dropped"].values())) == (3 * 8, 0)
    recorded = list(read_trajectories(run.output / "trajectories" / "rollout-0.bin"))
    assert len(recorded) >= 3 * 32
    assert_scored(recorded, teacher, 2)
