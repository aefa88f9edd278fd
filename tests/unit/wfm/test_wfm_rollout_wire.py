"""Samples go to another process and back as they were; a step is divided among ranks once each."""

import json
import math
from concurrent.futures import Future

import pytest
import torch

from cosmos_wfm import (
    DiffusionRlConfig,
    DisaggregatedConfig,
    FullTuning,
    LoraTuning,
    NoisyStep,
    Prompt,
    Rollout,
    RolloutMessage,
    RolloutOrder,
    RolloutReplica,
    SamplerConfig,
    Scores,
    StepParts,
    WfmConfigError,
    load_adapter,
    local_scorer,
    pack_order,
    pack_rollout,
    parse_order,
    parse_rollout,
    tiny_sd3_pipeline,
)
from cosmos_wfm.rl import step_parts
from cosmos_wfm.speed import DrawingCost


def rollout(num_steps):
    trajectory = torch.randn(num_steps + 1, 2, 4, 3, 3)
    rewards = Future()
    rewards.set_result(Scores(values=(1 / 3, math.nan), problems=("KeyError: 'x'",)))
    steps = [
        NoisyStep(
            latents=trajectory[number],
            following=trajectory[number + 1],
            sigma=0.9,
            next_sigma=0.3 / 7,
            noise_level=0.7,
            log_probs=torch.randn(2),
        )
        for number in range(num_steps)
    ]
    return Rollout(
        numbers=range(1, 5, 2),
        prompts=["a red square", Prompt("ein blaues Quadrat\n", {"tag": "color"})],
        latents=trajectory[-1],
        steps=steps,
        text={"encoder_hidden_states": torch.randn(2, 5, 6).bfloat16()},
        negative={"encoder_hidden_states": torch.zeros(2, 5, 6)} if num_steps else None,
        rewards=rewards,
        cost=DrawingCost(sample_s=2.5, reward_s=0.5, peak_memory_mib=100.0),
    )


@pytest.mark.parametrize("num_steps", [0, 2])
def test_samples_come_back_bit_for_bit(num_steps):
    sent = rollout(num_steps)
    message = parse_rollout(pack_rollout(RolloutMessage(step=3, place=1, rollout=sent)))
    came = message.rollout

    assert (message.step, message.place) == (3, 1)
    assert (list(came.numbers), came.prompts) == ([1, 3], sent.prompts)
    assert [prompt.metadata for prompt in came.prompts] == [{}, {"tag": "color"}]
    earned = came.rewards.result(0.0)
    assert (earned.values[0], earned.problems) == (1 / 3, ("KeyError: 'x'",))
    assert math.isnan(earned.values[1])
    assert came.cost == sent.cost
    assert torch.equal(came.latents, sent.latents)
    assert torch.equal(came.text["encoder_hidden_states"], sent.text["encoder_hidden_states"])
    assert (came.negative is None) == (num_steps == 0)
    for mine, theirs in zip(came.steps, sent.steps, strict=True):
        assert (mine.sigma, mine.next_sigma, mine.noise_level) == (0.9, 0.3 / 7, 0.7)
        assert torch.equal(mine.latents, theirs.latents)
        assert torch.equal(mine.following, theirs.following)
        assert torch.equal(mine.log_probs, theirs.log_probs)


@pytest.mark.parametrize("data", [b"", b"{}", b'{"step": 1}\n', b"no JSON\n"])
def test_bytes_that_are_no_samples_are_refused(data):
    with pytest.raises(ValueError, match="no micro-batch of samples"):
        parse_rollout(data)


def test_an_order_comes_as_it_was_given():
    order = RolloutOrder(step=3, place=1, numbers=(2, 5), version=2)
    assert parse_order(pack_order(order)) == order


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"step": 1, "numbers": [0]}'])
def test_bytes_that_are_no_order_are_refused(data):
    with pytest.raises(ValueError, match="no order of samples"):
        parse_order(data)


def test_a_replica_hands_rewards_what_a_prompt_set_says_beside_its_prompts(tmp_path):
    tiny_sd3_pipeline(num_layers=1).save_pretrained(tmp_path / "model")
    rows = [{"prompt": "red", "worth": 0.25}, {"prompt": "blue", "worth": 0.5}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = DiffusionRlConfig(
        model=str(tmp_path / "model"),
        prompts=str(tmp_path / "prompts.jsonl"),
        output="",
        rewards={"brightness": 1.0},
        groups_per_step=2,
        samples_per_group=2,
        sampler=SamplerConfig(num_steps=1, height=16, width=16),
        disaggregated=DisaggregatedConfig(),
    )

    def worth(pixels, prompts):
        scores = Future()
        scores.set_result([prompt.metadata["worth"] for prompt in prompts])
        return scores

    order = RolloutOrder(step=1, place=0, numbers=(1, 2, 3), version=1)
    drawn = RolloutReplica(config, worth).draw(order)
    came = parse_rollout(pack_rollout(drawn)).rollout
    assert came.rewards.result(0.0).values == (0.25, 0.5, 0.5)
    assert [prompt.metadata["worth"] for prompt in came.prompts] == [0.25, 0.5, 0.5]


@pytest.mark.parametrize("tuning", [FullTuning(), LoraTuning(rank=2, alpha=4)])
def test_a_replica_embeds_prompts_as_the_run_that_trains_on_them(model_dirs, tuning):
    # Cosmos projects embedded prompts inside its denoiser, which trains that, or before it
    config = DiffusionRlConfig(
        model=str(model_dirs("cosmos")),
        prompts="mock",
        output="",
        rewards={"brightness": 1.0},
        sampler=SamplerConfig(num_steps=1, height=32, width=32),
        tuning=tuning,
        disaggregated=DisaggregatedConfig(),
    )
    run = load_adapter(config.model)
    tuning.prepare(run, seed=config.seed)
    replica = RolloutReplica(config, local_scorer(config.rewards))
    order = RolloutOrder(step=0, place=0, numbers=(0,), version=0)
    first = replica.draw(order).rollout

    expected = run.encode_text(first.prompts)
    assert first.text.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(first.text[name], value)
    for weight in replica.weights.values():  # a version of them that is another one
        weight.mul_(1.5)
    changed = (replica.draw(order).rollout.latents - first.latents).abs().max()
    assert changed > 1e-4 if isinstance(tuning, FullTuning) else changed == 0  # B is 0 in LoRA


@pytest.mark.parametrize(
    ("ranks", "parts"),
    [
        (1, [[[0, 1], [2, 3], [4, 5]]]),
        (2, [[[0, 2], [4]], [[1, 3], [5]]]),
        (4, [[[0, 4]], [[1, 5]], [[2, 6]], [[3, 7]]]),  # 6 and 7 only keep step
    ],
)
def test_a_step_is_divided_among_ranks(ranks, parts):
    step = StepParts(num_samples=6, samples_per_group=3, micro_batch_size=2, num_ranks=ranks)
    found = [[list(numbers) for numbers in step.of_rank(rank)] for rank in range(ranks)]
    assert found == parts


def test_prompts_go_on_where_the_step_before_ended():
    step = StepParts(num_samples=6, samples_per_group=3, micro_batch_size=2, num_ranks=1)
    assert step.prompts("abc", 0, [0, 2, 3, 5]) == ["a", "a", "b", "b"]
    assert step.prompts("abc", 1, [0, 3]) == ["c", "a"]


def test_prompts_are_shuffled_anew_in_each_epoch_by_the_seed_alone():
    def stream(prompt_seed):
        parts = StepParts(
            num_samples=8,
            samples_per_group=2,
            micro_batch_size=4,
            num_ranks=1,
            prompt_seed=prompt_seed,
        )
        steps = [parts.prompts("abcdefghij", step, range(0, 8, 2)) for step in range(5)]
        return "".join(prompt for step in steps for prompt in step)

    first, second = stream(0)[:10], stream(0)[10:]
    assert sorted(first) == sorted(second) == list("abcdefghij")
    assert len({first, second, stream(1)[:10], "abcdefghij"}) == 4


@pytest.mark.parametrize(("order", "prompt_seed"), [("shuffled", 3), ("file", None)])
def test_the_order_of_prompts_is_the_recipes(order, prompt_seed):
    recipe = DiffusionRlConfig(
        model="m", prompts="p", prompt_order=order, output="o", rewards={"motion": 1.0}, seed=3
    )
    assert step_parts(recipe, 2).prompt_seed == prompt_seed


def test_settings_out_of_range_are_refused():
    with pytest.raises(WfmConfigError, match="replicas is 0; it must be 1 or more"):
        DisaggregatedConfig(replicas=0)
    with pytest.raises(WfmConfigError, match="restarts is -1; it must be 0 or more"):
        DisaggregatedConfig(restarts=-1)
