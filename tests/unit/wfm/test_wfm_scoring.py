"""A reward that raises, hangs or is no number costs that sample's reward, in training too."""

import math
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from cosmos_parallel import AdamWConfig, CheckpointStore, LearnerConfig, ParallelConfig, build_mesh
from cosmos_wfm import (
    AwmConfig,
    DdrlConfig,
    DiffusionRl,
    DiffusionRlConfig,
    FlowGrpoConfig,
    LoraTuning,
    NftConfig,
    NoRewardsError,
    RewardServiceError,
    RewardTimeoutError,
    SamplerConfig,
    take_rl_steps,
    train_rl,
)
from cosmos_wfm.rewards import weighted_reward
from cosmos_wfm.rl_algorithms import advantages_of
from cosmos_wfm.scoring import GuardedScorer, Scores
from cosmos_wfm.step_rewards import StepRewards

NAN = math.nan
WAIT_S = 60.0


def pixels_of(*numbers):
    """A micro-batch whose samples are known by their pixels."""
    return torch.tensor(numbers).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)


def scores_of(scorer, *numbers, deadline_s=WAIT_S, **options):
    guarded = GuardedScorer(scorer, deadline_s, **options)
    return guarded(pixels_of(*numbers), [f"p{n:g}" for n in numbers]).result(WAIT_S)


def earned(scores):
    """The values of scores, -1 for those that are none."""
    return [-1.0 if math.isnan(value) else value for value in scores.values]


def means(pixels):
    return pixels.flatten(1).mean(1).tolist()


def raises_at_2(pixels, prompts):
    if "p2" in prompts:
        raise KeyError("two")
    return means(pixels)


def fails_later_at_2(pixels, prompts):
    later = Future()
    if "p2" in prompts:
        later.set_exception(RewardServiceError("answered 500"))
    else:
        later.set_result(means(pixels))
    return later


def test_a_sample_that_is_not_finite_earns_nothing_by_8_bit_pictures():
    pixels = torch.zeros(3, 3, 16, 16)
    pixels[0] = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    pixels[1, 0, 0, 0] = NAN
    scorer = GuardedScorer(weighted_reward({"compressibility": 1.0}), WAIT_S)
    scores = scorer(pixels, ["p0", "p1", "p2"]).result(WAIT_S)

    assert [math.isnan(value) for value in scores.values] == [False, True, False]
    assert scores.values[0] < scores.values[2]
    assert scores.problems == ("what was drawn of 'p1' is not finite",)


@pytest.mark.parametrize(
    ("scorer", "values", "said"),
    [
        (lambda pixels, prompts: means(pixels), [1.0, 2.0, 3.0], ""),
        (lambda pixels, prompts: pixels.flatten(1).mean(1), [1.0, 2.0, 3.0], ""),
        (raises_at_2, [1.0, -1.0, 3.0], "KeyError: 'two'"),
        (fails_later_at_2, [1.0, -1.0, 3.0], "RewardServiceError: answered 500"),
        (lambda pixels, prompts: [1.0, NAN, 3.0], [1.0, -1.0, 3.0], "nan for a sample of 'p2'"),
        (lambda pixels, prompts: None, [-1.0] * 3, "a NoneType for 1 samples"),
        # too few of three is wrong, one of one is right
        (lambda pixels, prompts: means(pixels)[:1], [1.0, 2.0, 3.0], ""),
        (lambda pixels, prompts: exit(3), [-1.0] * 3, "SystemExit: 3"),
    ],
)
def test_a_sample_whose_reward_fails_has_none_and_the_others_keep_theirs(scorer, values, said):
    scores = scores_of(scorer, 1.0, 2.0, 3.0)
    assert earned(scores) == values
    assert said in " ".join(scores.problems)
    assert bool(scores.problems) == (-1.0 in values)


@pytest.mark.parametrize("is_later", [False, True])
def test_a_sample_whose_reward_hangs_has_none_and_the_others_keep_theirs(is_later):
    released = threading.Event()

    def scorer(pixels, prompts):
        hangs = "p2" in prompts
        if hangs and is_later:
            return Future()
        if hangs:
            released.wait(WAIT_S)
        return means(pixels)

    scores = scores_of(scorer, 1.0, 2.0, 3.0, deadline_s=0.4)
    released.set()
    assert earned(scores) == [1.0, -1.0, 3.0]
    assert len(scores.problems) == 1
    assert "0.4 s" in scores.problems[0]


def test_a_service_that_does_not_answer_is_not_asked_again_for_each_sample():
    calls = []

    def scorer(pixels, prompts):
        calls.append(len(prompts))
        raise RewardTimeoutError("no scores in 1800 s")

    assert earned(scores_of(scorer, 1.0, 2.0)) == [-1.0, -1.0]
    assert calls == [2]


def test_a_call_that_takes_long_is_left_to_end_while_others_are_drawn():
    released, asked = threading.Event(), []

    def scorer(pixels, prompts):
        asked.append(list(prompts))
        released.wait(WAIT_S)
        return means(pixels)

    guarded = GuardedScorer(scorer, WAIT_S, patience_s=0.05)
    first = guarded(pixels_of(1.0), ["p1"])
    second, third = guarded(pixels_of(2.0), ["p2"]), guarded(pixels_of(3.0), ["p3"])
    assert not first.done()
    assert third.cancel()
    released.set()
    assert [future.result(WAIT_S) for future in (first, second)] == [
        Scores(values=(1.0,)),
        Scores(values=(2.0,)),
    ]
    assert asked == [["p1"], ["p2"]]  # one after the other, and none that nobody wants


def test_calls_have_one_thread_without_gradient_which_ends_with_the_scorer():
    threads = set()

    def scorer(pixels, prompts):
        threads.add(threading.current_thread())
        assert not torch.is_grad_enabled()
        return means(pixels)

    guarded = GuardedScorer(scorer, WAIT_S)
    for number in (1.0, 2.0):
        assert guarded(pixels_of(number), ["p"]).result(WAIT_S).values == (number,)
    (thread,) = threads
    del guarded
    thread.join(WAIT_S)
    assert not thread.is_alive()


# Two groups of three; of the third and of the group of one nothing is trained.
LEFT = StepRewards(values=torch.tensor([1.0, 3.0, NAN, NAN, 5.0, NAN]).double(), group_size=3)


@pytest.mark.parametrize(
    ("algorithm", "first"),
    [
        # (1 - 2) / (sqrt(2) + 1e-4): of the two that have one
        (FlowGrpoConfig(), -0.70706),
        # of all rewards that are trained on, and not of the one that is alone
        (NftConfig(), -0.70706),
        (AwmConfig(), -0.70706),
        (DdrlConfig(form="shortcut"), -0.70711),
        # -exp(-1) / mean of exp(-1) and exp(-3), plus 1
        (DdrlConfig(), 1.0 - 2.0 * math.exp(-1) / (math.exp(-1) + math.exp(-3))),
    ],
)
def test_advantages_are_those_of_the_samples_that_have_a_reward(algorithm, first):
    found = advantages_of(algorithm, LEFT)
    assert found[:2].tolist() == pytest.approx([first, -first], abs=2e-5)
    assert found[2:].isnan().all()


def test_what_was_drawn_is_what_is_trained_and_what_is_left_out():
    assert LEFT.figures() == {
        "reward": 3.0,
        "reward_std": 2.0,
        "groups_without_signal": 0.0,
        "samples_trained": 2.0,
        "samples_left_out": 4.0,
        "rewards_failed": 3.0,
    }
    none = StepRewards(values=torch.full((4,), NAN), group_size=2)
    assert none.figures() == {
        "samples_trained": 0.0,
        "samples_left_out": 4.0,
        "rewards_failed": 4.0,
    }


@pytest.fixture
def recipe(model_dirs, tmp_path):
    (tmp_path / "prompts.txt").write_text("a red square\na blue square\n")
    return DiffusionRlConfig(
        model=str(model_dirs("sd3")),
        prompts=str(tmp_path / "prompts.txt"),
        prompt_order="file",
        output=str(tmp_path / "out"),
        rewards={},
        num_steps=2,
        groups_per_step=2,
        samples_per_group=3,
        micro_batch_size=4,
        sampler=SamplerConfig(num_steps=2, height=16, width=16),
        tuning=LoraTuning(rank=2, alpha=6),
        learner=LearnerConfig(optimizer=AdamWConfig(lr=1e-2)),
        reward_deadline_s=2.0,
    )


class Failing:
    """Gives each sample of a step a score by its number, and fails for some, known by pixels."""

    def __init__(self, fails):
        self.fails, self.pixels = fails, []

    def __call__(self, pixels, prompts):
        numbers = [self.number(sample) for sample in pixels]
        for number in numbers:
            if number in self.fails:
                self.fails[number]()
        return [float(number % 3) for number in numbers]

    def number(self, sample):
        """Samples are numbered as they are first seen, which is in their order."""
        for number, own in enumerate(self.pixels):
            if torch.equal(own, sample):
                return number
        self.pixels.append(sample.clone())
        return len(self.pixels) - 1


def fail():
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("algorithm", [NftConfig(kl=0.1), FlowGrpoConfig(clip=0.1, kl=0.1)])
def test_a_step_is_trained_on_the_samples_that_have_a_reward(recipe, algorithm, caplog):
    recipe = replace(recipe, algorithm=algorithm)
    # of the first group one sample has none; of the second two, so that nothing is trained of it
    released = threading.Event()
    scorer = Failing({1: fail, 3: lambda: released.wait(WAIT_S), 5: fail})
    report, figures = DiffusionRl(recipe, scorer=scorer).step(0)
    released.set()

    assert report.outcome == "updated"
    assert report.weight == report.metrics["samples"] == 2.0
    books = [figures[name] for name in ("samples_trained", "samples_left_out", "rewards_failed")]
    assert books == [2.0, 4.0, 3.0]
    assert figures["reward"] == pytest.approx(1.0)  # of 0, 2 and 1
    assert "step 1: 3 of 6 samples have no reward: RuntimeError: out of memory" in caplog.text
    assert "the scorer did not return in 2 s" in caplog.text


def test_a_group_of_two_trains_as_a_recipe_of_two_does(recipe):
    """One prompt of three samples, the last without reward, beside one of two: the same step."""
    three = replace(recipe, groups_per_step=1, samples_per_group=3, algorithm=FlowGrpoConfig())
    two = replace(three, samples_per_group=2, output=recipe.output + "2")
    runs = [
        DiffusionRl(three, scorer=Failing({2: fail})),
        DiffusionRl(two, scorer=Failing({})),
    ]
    (left, _), (alone, _) = (run.step(0) for run in runs)

    assert left.weight == alone.weight
    assert left.loss == pytest.approx(alone.loss, abs=1e-6)
    assert left.grad_norm == pytest.approx(alone.grad_norm, rel=1e-4)


def test_a_run_without_rewards_for_some_steps_ends_keeps_what_it_has_and_goes_on(recipe):
    recipe = replace(recipe, num_steps=5, steps_without_rewards=2)
    dead, seen = [], []

    def scorer(pixels, prompts):
        if dead:
            raise RuntimeError("out of memory")
        return means(pixels)

    def note(step, report, figures):
        seen.append((step, report.outcome, "reward" in figures))
        if step == 2:
            dead.append(True)

    run = DiffusionRl(recipe, scorer=scorer)
    expected = r"no sample of steps 3 to 4 has one: RuntimeError: out of memory; mend"
    with pytest.raises(NoRewardsError, match=expected):
        take_rl_steps(run, on_step=note)
    assert seen == [(1, "updated", True), (2, "updated", True), (3, "no_weight", False)]

    store = CheckpointStore(f"{recipe.output}/checkpoints", build_mesh(ParallelConfig()))
    assert store.latest() == 3
    store.close()
    dead.clear()
    train_rl(recipe, scorer=scorer, resume=True, on_step=note)
    assert [step for step, _, _ in seen[3:]] == [4, 5]


def test_rewards_may_come_later_and_fail_then(recipe):
    with ThreadPoolExecutor(1) as threads:
        run = DiffusionRl(
            recipe, scorer=lambda p, q: threads.submit(raises_at_2, p, ["p2"] * len(q))
        )
        report, figures = run.step(0)
    assert (report.outcome, figures["rewards_failed"]) == ("no_weight", 6.0)
