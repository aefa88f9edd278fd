"""The whole system with real vLLM, or SGLang: versions inside a response, kills, learning."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from capabilities import skip_without
from processes import descendants, is_alive, title_of
from real_runs import QUICKSTART, Run, Runner, assert_balanced
from versions_of_runs import kept_logprobs, model_of_version, reference_logprobs, versions_of

from cosmos_app.samples import read_trajectories
from cosmos_core.trajectory import Trajectory

pytest.importorskip("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# Two rollout replicas with real vLLM; a dozen small steps on an untrained model.
VLLM = (
    "warmup.steps=0",
    "trainer.groups_per_step=16",
    "trainer.samples_per_group=4",
    "trainer.checkpoint_every=0",
    "data.arithmetic.held_out=32",
    "rollout.slots=8",
)

SGLANG = os.environ.get("COSMOS_SGLANG_PYTHON")  # by scripts/sglang_environment.sh
ENGINES = {
    "vllm-keep": (),  # by default
    "vllm-recompute": ("rollout.engine.kv=recompute",),
    "sglang-recompute": (
        f"rollout.engine={{kind='sglang', interpreter='{SGLANG}', device='cpu', dtype='float32', "
        "context_length=256, memory_share=0.1, kv='recompute', extra={max_total_tokens=8192, "
        "attention_backend='torch_native', sampling_backend='pytorch'}}",
    ),
}


def switched(run: Run) -> Iterator[Trajectory]:
    """Yield the recorded training samples whose tokens are of more than one version."""
    for path in sorted((run.output / "trajectories").glob("*.bin")):
        for trajectory in read_trajectories(path):
            if len(versions_of(trajectory)) > 1 and trajectory.group.startswith("train."):
                yield trajectory


@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_of_one_response_have_the_logprobs_of_the_versions_that_sampled_them(
    engine: str, runner: Runner, tmp_path: Path
) -> None:
    if engine == "sglang-recompute" and SGLANG is None:
        skip_without("sglang")
    reward = tmp_path / "reward.py"
    reward.write_text("def ones(sample):\n    return sample.response.count('1') / 48\n")
    run = runner.start(
        *VLLM,
        *ENGINES[engine],
        f"reward.rewards=[{{kind='python', function='{reward}:ones', name='ones'}}]",
        "rollout.replicas=1",
        "rollout.record=true",
        "rollout.sampling.max_new_tokens=48",
        # a new version finds responses under way, however slow the trainer is: their step is
        # admitted before it comes
        "staleness.depth=2",
        "staleness.bound=3",
        "trainer.steps=4",
        "trainer.checkpoint_every=1",
        "trainer.keep_checkpoints=100",
        "learner.optimizer.lr=3e-3",
        "learner.optimizer.schedule.num_warmup_steps=0",
        "validation.before=false",
        "validation.after=false",
    )
    assert run.finish(deadline_s=900) == 0, run.logs()
    assert run.report["steps"] == 4
    assert_balanced(run.report["books"])
    if "keep" not in engine:  # what the policy computes has no keys and values of old weights
        assert run.report["mismatch"][0] < 1e-3, "the policy gives its tokens what the engine gave"
    assert 0.0 < run.report["stall_ms"][0] <= run.report["stall_ms"][1]
    chosen = sorted(switched(run), key=lambda t: -t.num_tokens)[:12]
    assert chosen, "no response went over a version switch"
    needed = set[int]().union(*map(versions_of, chosen))
    models = {version: model_of_version(run, version, tmp_path) for version in needed}
    from_stale, from_anew = 0.0, 0.0
    for trajectory in chosen:
        recorded = torch.tensor(trajectory.logprobs[trajectory.trainable])
        anew, stale = reference_logprobs(models, trajectory)
        own = kept_logprobs(models, trajectory) if "keep" in engine else anew
        assert float((recorded - own).abs().max()) < 1e-3
        from_stale = max(from_stale, float((recorded - stale).abs().max()))
        from_anew = max(from_anew, float((recorded - anew).abs().max()))
    assert from_stale > 1e-2, "the versions must differ for this to say anything"
    if "keep" in engine:
        assert from_anew > 2e-3, "keys and values of old weights are not those of new ones"


def stop_engines(run: Run) -> None:
    """Have the engines of both rollouts hang, in processes of their own; the rollouts live."""
    for name in ("rollout-0", "rollout-1"):
        cores = [pid for pid in descendants(run.child(name)) if "EngineCore" in title_of(pid)]
        assert cores, f"{name} has no engine process"
        for pid in cores:
            os.kill(pid, signal.SIGSTOP)


def test_engines_that_hang_and_kills_lose_nothing(runner: Runner) -> None:
    deadlines = ("bus.lease_s=10", "launch.hung_s=5", "weight_sync.deadline_s=10")
    # one that is begun anew takes many steps while the other still hangs in a load
    run = runner.start(*VLLM, "trainer.steps=4000", *deadlines)
    run.wait_for(lambda: run.steps_done() >= 3)
    # an engine that hangs in its start has longer to go on
    run.wait_for(lambda: len({record["replica"] for record in run.metrics("rollout")}) == 2)
    hanging = [run.child(name) for name in ("rollout-0", "rollout-1")]
    stop_engines(run)
    run.wait_for(lambda: not any(map(is_alive, hanging)))  # who hangs is killed, or ends itself
    before = run.steps_done()
    run.wait_for(lambda: run.steps_done() >= before + 4)  # more than was in flight
    run.wait_for(lambda: bool(run.children("rollout-1")))
    os.kill(run.child("rollout-1"), signal.SIGKILL)
    before = run.steps_done()
    run.wait_for(lambda: run.steps_done() >= before + 2)
    os.kill(run.child("controller"), signal.SIGKILL)
    before = run.steps_done()
    run.wait_for(lambda: run.steps_done() >= before + 20)
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 3, run.logs()
    report = run.report
    num_steps = report["books"]["consumed"] // 16
    assert [r["step"] for r in run.metrics("controller")] == list(range(num_steps))
    assert_balanced(report["books"])
    assert report["books"]["consumed"] == num_steps * 16
    deaths = [(i["name"], i["how"], i["outcome"]) for i in report["incidents"]]
    hung = {"signal 9 (SIGKILL), as it hung", "exit code 1"}  # in mid-generation, or in a load
    assert sorted(name for name, how, _ in deaths if how in hung) == ["rollout-0", "rollout-1"]
    assert {death for death in deaths if death[1] not in hung} == {
        ("rollout-1", "signal 9 (SIGKILL)", "restarted"),
        ("controller", "signal 9 (SIGKILL)", "restarted"),
    }
    assert {outcome for *_, outcome in deaths} == {"restarted"}
    assert "rollout-1 died" in run.text
    assert "compute different models" not in run.text
    assert "controller died" in run.text


ASKED = ("481", "9034", "57218", "60", "3517", "82640", "719", "2095", "46", "8153", "30972", "628")


def test_the_quickstart_learns_and_its_export_answers_in_transformers(runner: Runner) -> None:
    runner.forks = False
    run = runner.start("trainer.steps=60", recipe=QUICKSTART)
    assert run.finish(deadline_s=1500) == 0, run.logs()
    report = run.report
    accuracies = {int(version): value for version, value in report["accuracies"].items()}
    assert max(accuracies) == report["steps"]
    assert accuracies[max(accuracies)] - accuracies[0] >= 0.15
    assert report["num_loads"] > 1.5 * report["steps"]  # by both replicas; a newer one may overtake
    assert report["staleness"][1] <= 1
    assert 0 < report["publish_ms"][0] <= report["publish_ms"][1] < 1000
    assert 0 < report["served_s"][0] <= report["served_s"][1]
    assert_balanced(report["books"])

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(report["export"])
    model = AutoModelForCausalLM.from_pretrained(report["export"]).eval()
    answers = {
        digits: tokenizer.decode(
            model.generate(**tokenizer(f"{digits}=", return_tensors="pt"), max_new_tokens=8)[0],
            skip_special_tokens=True,
        )
        for digits in ASKED
    }
    right = sum(text == f"{digits}={digits[::-1]}" for digits, text in answers.items())
    assert right >= 9, answers
