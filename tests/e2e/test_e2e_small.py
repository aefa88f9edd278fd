"""The whole system on the reference engine: same numbers as a loop, resumed or not."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from judges import Judge, judging, url_of
from processes import descendants
from real_runs import SMALL, Run, Runner, assert_balanced
from s3_server import s3_server
from safetensors.torch import load_file

from cosmos_app.cli import main
from cosmos_app.event_log import read_events
from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model
from cosmos_core.simulation import Span, StepTaken, read_log

ON_POLICY = ("staleness.depth=0", "staleness.bound=0")
# a random model is never right, but its answers have lengths
BY_LENGTH = "reward.rewards=[{kind='length', target=0, limit=32}]"
# plain descent does not turn the smallest differences into steps of full size, as Adam does
MOVING = (BY_LENGTH, "learner.optimizer={kind='sgd', lr=0.1}")
# bit for bit there are none, and what Adam has gathered must be kept as well
WHOLE = (*SMALL, *ON_POLICY, BY_LENGTH, "trainer.steps=8")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def exported(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.output / "export" / "model" / "model.safetensors")


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def assert_moved(run: Run) -> None:
    """Hold that its weights are not those it began with: those are equal in any two runs."""
    assert difference(load_file(run.output / "model" / "model.safetensors"), exported(run)) > 1e-3


def assert_speeds(run: Run, num_ranks: int, tokens: list[int]) -> None:
    """Every replica tells of each step how fast each of its ranks was."""
    for record in run.metrics("policy"):
        values = record["values"]
        if "tokens_per_s_per_rank" in values:
            trained = values["tokens_per_s_per_rank"] * values["train_s"] * num_ranks
            assert trained == pytest.approx(tokens[record["step"]])
            assert values["useful_tokens"] == 1.0, "rows are packed"
            assert values["mfu"] == 0.0, "no peak is known of a CPU"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Eight steps of one policy to which nothing happens, without a checkpoint on the way."""
    folder = tmp_path_factory.mktemp("whole")
    run = Runner(folder, forks=True).complete(*WHOLE)
    assert_moved(run)
    return run


def test_a_run_stopped_by_ctrl_c_and_resumed_gives_the_weights_of_one_that_was_not(
    runner: Runner, whole: Run
) -> None:
    run = runner.start(*WHOLE, name="parts")
    run.wait_for(lambda: run.steps_done() >= 2)
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 3, run.logs()
    done = run.steps_done()
    assert 2 <= done < 8
    assert_balanced(run.report["books"])
    again = runner.complete(*WHOLE, name="parts", flags=["--resume"])
    assert [r["step"] for r in again.metrics("controller")] == list(range(8))
    assert difference(exported(whole), exported(again)) == 0.0
    steps = [record["values"] for record in again.metrics("policy") if "loss" in record["values"]]
    assert {values["useful_tokens"] for values in steps} == {1.0}, "rows are packed, not padded"


def test_a_run_says_how_long_publications_held_the_learner_up_and_when_they_were_served(
    whole: Run,
) -> None:
    stalled = [r["values"].get("publish_s") for r in whole.metrics("policy")]
    assert len([s for s in stalled if s is not None and 0 < s < 5]) == 8
    served = {
        r["step"]: r["values"]["served_s"]
        for r in whole.metrics("rollout")
        if "served_s" in r["values"]
    }
    assert {*range(1, 8)} <= served.keys()  # each step waits for the version before it
    assert all(0 <= seconds < 60 for seconds in served.values())
    assert whole.report["served_s"] == [
        sorted(served.values())[len(served) // 2],
        max(served.values()),
    ]
    assert whole.report["served_s_of"] == {"rollout-0": whole.report["served_s"]}
    assert whole.report["publish_ms_of"] == {"policy-0": whole.report["publish_ms"]}


def test_a_run_writes_what_its_replicas_did_when_as_simulations_do(whole: Run) -> None:
    """Synchronous, so that its engine is empty while it trains; all 8 steps are there.

    It is validated before the first one, for which its policy waits.
    """
    log = read_log(sorted((whole.output / "spans").iterdir()))
    spans = [record for record in log if isinstance(record, Span)]
    policy = [span for span in spans if span.replica == "policy-0"]
    rollout = [span for span in spans if span.replica == "rollout-0"]
    assert len(policy) + len(rollout) == len(spans)
    assert {span.activity for span in policy} == {
        *("eval", "wait_data", "fwd_bwd", "optim", "push_exposed", "checkpoint"),
    }
    assert policy[0].activity == "eval"
    assert sum(span.activity == "eval" for span in policy) == 1
    in_all_s, of_one_s = whole.report["validated_s"]
    assert in_all_s == of_one_s > 0.0
    assert policy[0].end_s - policy[0].start_s < of_one_s + 0.01, "its policy may join later"
    assert {"decode", "swap", "idle_no_work", "gated_staleness"} <= {s.activity for s in rollout}
    for lane in (policy, rollout):
        ends = [span.end_s for span in lane]
        assert [span.start_s for span in lane[1:]] == ends[:-1], "without gaps"
    steps = [record for record in log if isinstance(record, StepTaken)]
    assert [step.step for step in steps] == list(range(8))
    empty_s = sum(s.end_s - s.start_s for s in rollout if s.activity == "gated_staleness")
    trained_s = sum(step.end_s - step.start_s for step in steps[:-1])
    assert empty_s > 0.5 * trained_s
    generated = sum(span.tokens for span in rollout)
    assert generated >= sum(sample.num_tokens for step in steps for sample in step.samples)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An object store that processes find by their environment."""
    with s3_server("bucket") as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found["endpoint_url"])
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", found["key"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", found["secret"])
        yield "s3://bucket"


def saved_versions(run: Run) -> list[int]:
    """Return the versions that the controller was told checkpoints of."""
    events = read_events(run.output / "events.jsonl")
    return [e["step"] + 1 for e in events if e["type"] == "CheckpointSaved" and e["path"]]


def assert_went_on_from_the_newest_checkpoint(run: Run, policy: str) -> None:
    """The policy came back with what was saved last, and no step before that was taken again."""
    newest, first, back = 0, "", None
    for event in read_events(run.output / "events.jsonl"):
        if event["type"] == "CheckpointSaved" and event["path"]:
            newest = max(newest, event["step"] + 1)
        elif event["type"] == "ReplicaJoined" and event["replica"] == policy:
            first = first or event["incarnation"]
            if event["incarnation"] != first:
                back = event["version"]
                break
    assert newest >= 2
    assert back in (newest, newest + 2), "it may have been saved and not been told of"
    steps = [record["step"] for record in run.metrics("controller")]
    assert steps[:back] == list(range(back))
    assert min(steps[back:], default=back) >= back


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_policy_killed_in_a_run_costs_no_step_and_changes_no_weight(
    runner: Runner, whole: Run, replicas: int, bucket: str
) -> None:
    """It comes back from its last checkpoint; what it had trained since is trained again."""
    settings = (*WHOLE, f"policy.replicas={replicas}")
    checkpoints = ("trainer.checkpoint_every=2", "bus.lease_s=15")
    if replicas == 1:
        checkpoints += (f"trainer.checkpoints={bucket}/killed",)
    if replicas > 1:  # they add up in another order
        whole = runner.complete(*settings, *checkpoints, name="whole")
        assert_moved(whole)
    run = runner.start(*settings, *checkpoints, name="killed")
    run.wait_for(lambda: run.steps_done() >= 3 and bool(saved_versions(run)))
    os.kill(run.child(f"policy-{replicas - 1}"), signal.SIGKILL)
    assert run.finish() == 0, run.logs()
    assert sorted({r["step"] for r in run.metrics("controller")}) == list(range(8))
    assert_went_on_from_the_newest_checkpoint(run, f"policy-{replicas - 1}")
    assert_balanced(run.report["books"])
    deaths = {(i["name"], i["outcome"]) for i in run.report["incidents"]}
    assert (f"policy-{replicas - 1}", "restarted") in deaths
    assert difference(exported(whole), exported(run)) == 0.0
    if replicas == 1:
        assert not list((run.output / "checkpoints").iterdir())
        again = runner.complete(*settings, *checkpoints, "trainer.steps=10", name="elsewhere")
        assert f"goes on from the checkpoint of step 8 in {bucket}/killed" in again.text
        assert sorted({r["step"] for r in again.metrics("controller")}) == [8, 9]
        copied = CliRunner().invoke(main, ["export", str(again.output), str(run.output / "copy")])
        assert copied.exit_code == 0, copied.output
        assert difference(exported(again), load_file(run.output / "copy/model.safetensors")) == 0.0


def test_two_policy_ranks_and_two_policy_replicas_give_the_weights_of_one(runner: Runner) -> None:
    """With a critic, whose advantages are whitened over all of them, and two updates a step."""
    settings = (
        *SMALL, *ON_POLICY, *MOVING, "trainer.steps=3", "algorithm.kind=ppo", "algorithm.epochs=2",
    )  # fmt: skip
    one = runner.complete(*settings, "validation={samples=4, temperature=1}", name="one")
    ranks = runner.complete(*settings, "policy.ranks=2", name="ranks")
    replicas = runner.complete(*settings, "policy.replicas=2", name="replicas")
    assert difference(exported(one), exported(ranks)) < 1e-5
    assert difference(exported(one), exported(replicas)) < 1e-5
    assert_moved(one)
    of_all, of_the_best = one.report["accuracies"], one.report["best_of_several"]
    assert all(of_all[version] < of_the_best[version] for version in ("0", "3")), "held out"
    first, *_, last = (record["values"] for record in one.metrics("policy"))
    assert first["critic_value"] == 0.0
    assert last["critic_value"] != 0.0
    told = [record["values"] for record in one.metrics("policy") if "train_s" in record["values"]]
    tokens = [round(values["tokens_per_s_per_rank"] * values["train_s"]) for values in told]
    assert all(count > 2 * values["tokens"] for count, values in zip(tokens, told, strict=True))
    assert_speeds(one, 1, tokens)
    assert_speeds(ranks, 2, tokens)
    assert_speeds(replicas, 2, tokens)


def test_rewards_that_raise_or_give_nan_and_prompts_too_long_cost_themselves_and_are_counted(
    runner: Runner, tmp_path: Path
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def score(sample):\n"
        "    kind = sum(map(ord, sample.response)) % 7\n"
        "    if kind == 0:\n"
        "        raise RuntimeError('this response displeases me')\n"
        "    return float('nan') if kind == 1 else float(kind)\n"
    )
    data = tmp_path / "sums.jsonl"
    prompts = [f"{first}+{second}=" for first in range(6) for second in range(5)]
    rows = ["+".join("1" * 200), *prompts, "+".join("2" * 200)]  # the last are held out
    data.write_text("".join(json.dumps({"prompt": p, "answer": "3"}) + "\n" for p in rows))
    run = runner.complete(
        *SMALL,
        "trainer.steps=4",
        "staleness.depth=0",
        "staleness.bound=0",
        "data.path=" + str(data),
        "rollout.engine.context_length=128",
        "validation.before=false",
        f"reward.rewards=[{{kind='python', function='{reward}:score', name='mine'}}]",
    )
    report = run.report
    assert report["steps"] == 4
    assert_balanced(report["books"])
    assert report["books"]["dropped"]["prompt too long"] >= 1
    assert report["failures"].keys() == {"reward mine: RuntimeError", "reward mine: ValueError"}
    assert all(count > 0 for count in report["failures"].values())
    assert "reward mine: ValueError" in run.text
    assert "prompt too long" in run.text
    named = [e for e in read_events(run.output / "events.jsonl") if e["type"] == "GroupFailed"]
    assert all(e["reason"].startswith(f"PromptTooLongError: request {e['group']}") for e in named)
    assert {e["group"].partition(".")[0] for e in named} == {"train", "validation"}


def test_a_reward_that_hangs_at_one_prompt_costs_that_prompt_and_is_counted(
    runner: Runner, tmp_path: Path
) -> None:
    """Each of its four samples is given up each time the prompt is tried, and no other sample."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import time\n"
        "def score(sample):\n"
        "    if sample.prompt == 'hang':\n"
        "        time.sleep(3600)\n"
        "    return 1.0\n"
    )
    data = tmp_path / "words.jsonl"
    prompts = ["hang", *(f"word {number}" for number in range(24))]  # fewer than four steps take
    data.write_text("".join(json.dumps({"prompt": p, "answer": "3"}) + "\n" for p in prompts))
    run = runner.complete(
        *SMALL,
        "trainer.steps=4",
        f"data.path={data}",
        "data.held_out=0",
        f"reward.rewards=[{{kind='python', function='{reward}:score', name='mine'}}]",
        "reward.timeout_s=1.5",
        "reward.num_workers=4",
    )
    report = run.report
    assert (report["steps"], report["rewards"]) == (4, [1.0] * 4)
    assert_balanced(report["books"])
    assert report["books"]["consumed"] == 4 * 8
    assert report["books"]["dropped"].keys() == {"attempts used up"}
    assert report["failures"].keys() == {"reward mine: TimeoutError"}
    times = report["books"]["dropped"]["attempts used up"] * 5 * 4
    assert times <= report["failures"]["reward mine: TimeoutError"] < times + 5 * 4
    assert report["incidents"] == [], "a worker is replaced, and the rollout goes on"
    assert "reward mine: TimeoutError" in run.text


def test_a_run_whose_launcher_was_killed_leaves_nothing_running_and_is_resumed_to_the_same_weights(
    runner: Runner, whole: Run
) -> None:
    every = "trainer.checkpoint_every=2"
    runner.forks = False  # so that they descend from the launcher
    run = runner.start(*WHOLE, every, name="orphans")
    run.wait_for(lambda: run.steps_done() >= 4)
    family = descendants(run.process.pid)
    assert len(family) >= 5  # Redis, the controller, a policy, a rollout and its rewards
    os.kill(run.process.pid, signal.SIGKILL)
    _ = run.process.communicate(timeout=60)
    deadline = time.monotonic() + 60.0
    while left := [pid for pid in family if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    again = runner.complete(*WHOLE, every, name="orphans", flags=["--resume"])
    assert difference(exported(whole), exported(again)) == 0.0
    assert_balanced(again.report["books"])


def test_your_own_data_and_model_run_by_the_same_recipe(runner: Runner, tmp_path: Path) -> None:
    """The README's command: a JSON-lines file and a Hugging Face directory, one rollout.

    With a service that gives each sample half a point.
    """
    rows = [{"prompt": f"say {word}:", "answer": word} for word in ("yes", "no", "maybe") * 8]
    data = tmp_path / "my.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tmp_path / "my-hf-model"
    config = TinyModelConfig(hidden_size=32, num_layers=1, num_heads=2, tie_embeddings=True)
    build_tiny_model(model, [json.dumps(row) for row in rows], config, seed=1)
    before = (model / "model.safetensors").read_bytes()
    with judging() as service:
        run = runner.complete(
            *(override for override in SMALL if not override.startswith("rollout.replicas")),
            f"data.path={data}",
            f"model.path={model}",
            f"reward.rewards=[{{kind='service', url='{url_of(service)}'}}]",
            "trainer.steps=2",
            flags=["--rollouts", "1", "--restarts", "1", "--json"],
        )
    report = run.report
    assert report["steps"] == 2
    assert report["rewards"] == [0.5, 0.5]
    assert json.loads((run.output / "config.json").read_text())["launch"]["restarts"] == 1
    assert {sample["answer"] for sample in Judge.seen} == {"yes", "no", "maybe"}
    assert (run.output / "export" / "model" / "tokenizer.json").exists()
    assert (model / "model.safetensors").read_bytes() == before, "a model you bring is only read"
    assert not (run.output / "warm_model").exists()


def test_two_data_sets_are_trained_on_by_their_shares_and_measured_apart(
    runner: Runner, tmp_path: Path
) -> None:
    """One compares, the other only counts tokens, a third is never trained on."""
    words = ("yes", "no", "maybe")
    for name, count in (("said", 24), ("free", 24), ("exam", 5)):
        lines = [
            {"prompt": f"{name} {words[i % 3]}:", "answer": words[i % 3]} for i in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = runner.complete(
        *SMALL,
        f"data.sets=[{{name='said', path='{tmp_path}/said.jsonl', share=3}},"
        f" {{name='free', path='{tmp_path}/free.jsonl', share=1}},"
        f" {{name='exam', held_out_path='{tmp_path}/exam.jsonl'}}]",
        "data.held_out=2",
        "reward.rewards=[{kind='exact'}, {kind='length', target=0, limit=32}]",
        "reward.sets={exact=['said', 'exam']}",
        # a step has the eight prompts that were issued for it, and none that was faster
        "staleness.depth=0",
        "staleness.bound=0",
        "trainer.steps=3",
        flags=["--json"],
    )
    trained = run.metrics("policy")
    steps = [r["values"] for r in trained if "data_set/said" in r["values"]]
    assert len(steps) == 3
    for values in steps:
        # of eight prompts six are of the set with three quarters
        means = 0.75 * values["data_set/said"] + 0.25 * values["data_set/free"]
        assert values["reward"] == pytest.approx(means)
        assert values["reward/length"] < 0.0 <= values["reward/exact"]
    validations = run.metrics("validation")
    assert [r["step"] for r in validations] == [0, 3]
    for record in validations:
        sets = {name: value for name, value in record["values"].items() if "/" in name}
        assert sets.keys() == {"data_set/said", "data_set/free", "data_set/exam"}
        assert record["values"]["num_prompts"] == 2 + 2 + 5
        mean = (
            2 * sets["data_set/said"] + 2 * sets["data_set/free"] + 5 * sets["data_set/exam"]
        ) / 9
        assert record["values"]["reward"] == pytest.approx(mean)
    assert run.report["data_sets"].keys() == {"said", "free", "exam"}
    assert_balanced(run.report["books"])
