"""The whole system with real vLLM, or SGLang: versions inside a response, kills, learning."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from capabilities import skip_without
from processes import descendants, is_alive, title_of
from real_runs import QUICKSTART, Run, Runner, assert_balanced
from versions_of_runs import RECORDED, distances_over_switches, furthest

from cosmos_app.event_log import read_events

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
        *RECORDED,
        "rollout.sampling.max_new_tokens=48",
        # a new version finds responses under way, however slow the trainer is: their step is
        # admitted before it comes
        "staleness.depth=2",
        "staleness.bound=3",
        "trainer.steps=4",
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
    kv = "keep" if "keep" in engine else "recompute"
    distances = distances_over_switches(run, kv, tmp_path)
    for version, of_tokens in distances.own.items():
        assert max(of_tokens) < 1e-3, version
    assert furthest(distances.stale) > 1e-2, "the versions must differ for this to say anything"
    if kv == "keep":
        assert furthest(distances.anew) > 2e-3, "keys and values of old weights are not of new ones"


def stop_engines(run: Run) -> None:
    """Have the engines of both rollouts hang, in processes of their own; the rollouts live."""
    for name in ("rollout-0", "rollout-1"):
        cores = [pid for pid in descendants(run.child(name)) if "EngineCore" in title_of(pid)]
        assert cores, f"{name} has no engine process"
        for pid in cores:
            os.kill(pid, signal.SIGSTOP)


def first_groups(run: Run) -> dict[str, list[float]]:
    """Return how long each process of each rollout took from joining to its first group."""
    waits: dict[str, list[float]] = {"rollout-0": [], "rollout-1": []}
    for record in run.metrics("rollout"):
        if "first_group_s" in record["values"]:
            waits[record["replica"]].append(record["values"]["first_group_s"])
    return waits


def assert_new_ones_generated_soon(run: Run) -> None:
    """Each that began anew had its weights, and finished a group, within seconds of joining."""
    waits = first_groups(run)
    assert len(waits["rollout-0"]) >= 2
    assert len(waits["rollout-1"]) >= 3
    *_, after_the_kill = waits["rollout-1"]
    assert 0.0 < after_the_kill < 10.0, waits
    middle_s, most_s = run.report["first_group_s"]
    assert 0.0 < middle_s < 10.0
    assert most_s == max(max(of_one) for of_one in waits.values())


def test_engines_that_hang_and_kills_lose_nothing(runner: Runner) -> None:
    deadlines = ("bus.lease_s=10", "launch.hung_s=5", "weight_sync.deadline_s=10")
    # one that is begun anew takes many steps while the other still hangs in a load
    run = runner.start(*VLLM, "trainer.steps=4000", *deadlines)
    run.wait_for(lambda: run.steps_done() >= 3)
    # an engine that hangs in its start has longer to go on
    run.wait_for(lambda: all(first_groups(run).values()))
    hanging = [run.child(name) for name in ("rollout-0", "rollout-1")]
    stop_engines(run)
    run.wait_for(lambda: not any(map(is_alive, hanging)))  # who hangs is killed, or ends itself
    before = run.steps_done()
    run.wait_for(lambda: run.steps_done() >= before + 4)  # more than was in flight
    run.wait_for(lambda: len(first_groups(run)["rollout-1"]) >= 2)
    os.kill(run.child("rollout-1"), signal.SIGKILL)
    before = run.steps_done()
    run.wait_for(lambda: run.steps_done() >= before + 2)
    os.kill(run.child("controller"), signal.SIGKILL)
    before = run.steps_done()
    run.wait_for(
        lambda: run.steps_done() >= before + 20 and len(first_groups(run)["rollout-1"]) >= 3
    )
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 3, run.logs()
    assert_new_ones_generated_soon(run)
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


HELD_OUT = 256
ASKED = ("481", "9034", "57218", "60", "3517", "82640", "719", "2095", "46", "8153", "30972", "628")


def assert_validated_beside_training(run: Run, versions: Sequence[int]) -> None:
    """All tokens of the answers are of the versions that were due, and training waited for none.

    But for those of version 0, which are given before the first step.
    """
    found = [e for e in read_events(run.output / "events.jsonl") if e["type"] == "GroupFinished"]
    for version in versions:
        answers = [e for e in found if e["group"].startswith(f"validation.{version}.")]
        assert len({e["group"] for e in answers}) == HELD_OUT
        assert {(e["oldest_version"], e["newest_version"]) for e in answers} == {(version, version)}
    in_all_s, before_s = run.report["validated_s"]
    assert in_all_s - before_s < 1.0, run.report["validated_s"]


def test_the_quickstart_learns_and_its_export_answers_in_transformers(runner: Runner) -> None:
    runner.forks = False
    run = runner.start("trainer.steps=60", "validation.every=20", recipe=QUICKSTART)
    assert run.finish(deadline_s=1500) == 0, run.logs()
    report = run.report
    accuracies = {int(version): value for version, value in report["accuracies"].items()}
    assert len(accuracies) == 4
    assert max(accuracies) == report["steps"]
    assert_validated_beside_training(run, sorted(accuracies))
    assert accuracies[max(accuracies)] - accuracies[0] >= 0.15
    assert report["num_loads"] > 1.5 * report["steps"]  # by both replicas; a newer one may overtake
    assert report["staleness"][1] <= 1
    assert 0 < report["publish_ms"][0] <= report["publish_ms"][1] < 1000
    assert report["served_s_of"].keys() == {"rollout-0", "rollout-1"}
    of_each = report["served_s_of"].values()
    assert all(0 < middle <= most < 10 for middle, most in of_each), report["served_s_of"]
    assert report["served_s"][1] == max(most for _, most in of_each)
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
