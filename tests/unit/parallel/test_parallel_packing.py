"""Plans of micro-batches by hand and by their properties; packed rows against single samples."""

import copy
import random
import time

import pytest
import torch
import transformers

from cosmos_parallel import (
    PackingError,
    balanced_parts,
    build_mesh,
    check_packable,
    load_causal_lm,
    plan_micro_batches,
    runs_packed_rows,
    use_packed_attention,
)
from cosmos_parallel.mesh import ParallelConfig
from cosmos_parallel.packed_attention import PACKED_SDPA, PackedRows, packed_rows


@pytest.mark.parametrize(
    ("sizes", "num_parts", "parts"),
    [
        # differences 8-7, 6-5 and 4: joined to 4-1, then 3-1; 2 remain where 0 would be best
        ([8, 7, 6, 5, 4], 2, [[1, 3, 4], [0, 2]]),
        ([5, 5, 5, 5], 2, [[0, 2], [1, 3]]),
        ([3], 2, [[0], []]),
        ([], 3, [[], [], []]),
        ([4, 2], 1, [[0, 1]]),
    ],
)
def test_parts_by_largest_differencing(sizes, num_parts, parts):
    found = balanced_parts(sizes, num_parts)
    totals = [sum(sizes[i] for i in part) for part in found]
    assert totals == sorted(totals, reverse=True)
    expected = [sum(sizes[i] for i in part) for part in parts]
    assert totals == sorted(expected, reverse=True)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "num_ranks", "plan"),
    [
        ([7, 3, 5, 5, 2, 8], 10, 1, [[[0, 1], [2, 3], [4, 5]]]),
        # a sample over the budget has a micro-batch to itself
        ([30, 2, 2], 10, 1, [[[0], [1, 2]]]),
        # three ranks, two samples: the third has nothing
        ([4, 6], 10, 3, [[[1]], [[0]], []]),
        # 21 and 15 tokens, as differencing has it; both need two passes
        ([9, 9, 6, 6, 6], 12, 2, [[[0], [3, 4]], [[1], [2]]]),
        ([], 10, 2, [[], []]),
    ],
)
def test_plans_worked_out_by_hand(lengths, max_tokens, num_ranks, plan):
    found = plan_micro_batches(lengths, max_tokens=max_tokens, num_ranks=num_ranks)
    sizes = [sorted(sorted(lengths[i] for i in part) for part in rank) for rank in found]
    assert sizes == [sorted(sorted(lengths[i] for i in part) for part in rank) for rank in plan]


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_once_within_the_budget_and_ranks_even(seed):
    rng = random.Random(seed)
    num_ranks, max_tokens = rng.randint(1, 8), rng.randint(50, 2000)
    lengths = [rng.randint(1, 300) for _ in range(rng.randint(100, 300))]
    plan = plan_micro_batches(lengths, max_tokens=max_tokens, num_ranks=num_ranks)
    assert sorted(i for rank in plan for part in rank for i in part) == list(range(len(lengths)))
    for rank in plan:
        for part in rank:
            assert len(part) == 1 or sum(lengths[i] for i in part) <= max_tokens
    loads = [sum(lengths[i] for part in rank for i in part) for rank in plan]
    assert max(loads) - min(loads) <= 4  # of 15,000 to 45,000 tokens
    assert max(map(len, plan)) - min(map(len, plan)) <= 1
    # no more micro-batches than first-fit decreasing's bound of 11/9 of the best and a bit
    least = -(-sum(lengths) // max_tokens)
    assert sum(map(len, plan)) <= 11 / 9 * least + 2 * num_ranks or max_tokens < 300


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "message"),
    [([3, 0], 4, "sample 1 has 0 tokens"), ([3], 0, "max_tokens is 0")],
)
def test_impossible_plans_are_refused(lengths, max_tokens, message):
    with pytest.raises(PackingError, match=message):
        plan_micro_batches(lengths, max_tokens=max_tokens)


@pytest.mark.parametrize(("shortest", "longest", "most"), [(20, 32, 400), (8, 32, 320), (1, 8, 70)])
def test_many_long_samples_are_planned_at_once(shortest, longest, most):
    generator = random.Random(0)
    lengths = [generator.randint(shortest * 1000, longest * 1000) for _ in range(400)]
    begun = time.process_time()
    (parts,) = plan_micro_batches(lengths, max_tokens=32_768)
    assert time.process_time() - begun < 2.0  # it was minutes
    assert sorted(index for part in parts for index in part) == list(range(400))
    assert all(len(part) == 1 or sum(lengths[i] for i in part) <= 32_768 for part in parts)
    assert len(parts) <= most


def test_rows_fall_apart_into_blocks_of_like_length():
    starts = torch.tensor([[1, 0, 0, 0, 1, 0, 1, 0, 0]], dtype=torch.bool)
    rows = packed_rows(starts)
    assert [block.places.tolist() for block in rows.blocks] == [
        [[0, 1, 2, 3], [6, 7, 8, 8], [4, 5, 5, 5]]
    ]
    assert rows.home.tolist() == [0, 1, 2, 3, 8, 9, 4, 5, 6]
    assert all(block.mask is None for block in rows.blocks)


def test_long_and_short_samples_are_not_padded_to_each_other():
    starts = torch.zeros(1, 100, dtype=torch.bool)
    starts[0, [80, 90]] = True  # 80, 10 and 10 tokens
    assert [tuple(b.places.shape) for b in packed_rows(starts).blocks] == [(1, 80), (2, 10)]


SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = [
    ("Qwen3", {}),
    ("Llama", {}),
    ("Qwen2", {}),
    # windows of 4 inside samples of up to 40
    ("Mistral", {"sliding_window": 4}),
    ("Gemma3Text", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    ("Phi3", {}),
    # scores that are bounded, sinks, masks that are not told positions
    ("Gemma2", {"sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}),
    ("Afmoe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
]
LENGTHS = (5, 1, 17, 40, 3, 9, 2)


def build(family: str, settings: dict) -> transformers.PreTrainedModel:
    """Return a model whose attention is spelled out, as transformers' own is by default not."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SIZES | settings))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    # grouped products have no double kernel
    return model.train() if "experts" in str(vars(config)) else model.train().double()


def let_pack(model: transformers.PreTrainedModel) -> bool:
    """Have a copy of what `build` returns attend sample by sample."""
    if model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    return use_packed_attention(model)


def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 37, (length,), generator=generator) for length in LENGTHS]


def packed_inputs(parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(len(part)) for part in parts])
    return {"input_ids": torch.cat(parts)[None], "position_ids": positions[None]}


@pytest.mark.parametrize(("family", "settings"), MODELS, ids=lambda value: str(value)[:12])
def test_packed_logits_and_gradients_equal_those_of_samples_by_themselves(family, settings):
    single = build(family, settings)
    packed = copy.deepcopy(single)
    assert let_pack(packed)
    alone = [single(input_ids=part[None], use_cache=False).logits[0] for part in samples()]
    torch.cat(alone).square().sum().backward()
    together = packed(**packed_inputs(samples()), use_cache=False).logits[0]
    together.square().sum().backward()
    exact = together.dtype == torch.float64
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-7 if exact else 1e-5)
    for (name, mine), theirs in zip(packed.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad,
            theirs.grad,
            rtol=1e-6 if exact else 1e-4,
            atol=1e-6 if exact else 1e-5,
            msg=lambda text, n=name: f"{n}: {text}",
        )


def test_packed_logits_equal_single_ones_in_single_precision_and_under_recomputation():
    single = build("Qwen3", {}).float()
    packed = copy.deepcopy(single)
    let_pack(packed)
    packed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    alone = [single(input_ids=part[None], use_cache=False).logits[0] for part in samples()]
    together = packed(**packed_inputs(samples()), use_cache=False).logits[0]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)
    torch.cat(alone).sum().backward()
    together.sum().backward()
    for mine, theirs in zip(packed.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_several_rows_may_hold_several_samples_each():
    model = build("Qwen3", {})
    let_pack(model)
    parts = samples()
    rows = [torch.cat([parts[0], parts[2]]), torch.cat([parts[2], parts[0]])]
    positions = [torch.cat([torch.arange(5), torch.arange(17)])]
    positions += [torch.cat([torch.arange(17), torch.arange(5)])]
    both = model(
        input_ids=torch.stack(rows), position_ids=torch.stack(positions), use_cache=False
    ).logits
    torch.testing.assert_close(both[0, :5], both[1, 17:], rtol=0, atol=1e-12)
    torch.testing.assert_close(both[0, 5:], both[1, :17], rtol=0, atol=1e-12)


def test_padding_masks_and_generation_take_the_ordinary_way():
    model = build("Qwen3", {}).eval()
    model.set_attn_implementation("sdpa")
    packed = copy.deepcopy(model)
    let_pack(packed)
    ids = torch.randint(3, 37, (2, 6), generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    for inputs in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
        torch.testing.assert_close(packed(**inputs).logits, model(**inputs).logits, rtol=0, atol=0)
        settings = {"max_new_tokens": 5, "do_sample": False}
        assert packed.generate(**inputs, **settings).tolist() == (
            model.generate(**inputs, **settings).tolist()
        )


def test_a_loaded_model_packs_and_its_config_on_disk_does_not_say_so(model_directory, tmp_path):
    model = load_causal_lm(model_directory("Qwen3"), build_mesh(ParallelConfig()))
    assert model.config._attn_implementation == PACKED_SDPA
    model.save_pretrained(tmp_path)
    assert PACKED_SDPA not in (tmp_path / "config.json").read_text()


def test_a_model_with_an_attention_of_its_own_is_left_alone():
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=37, hidden_size=32, n_layer=1, n_head=4)
    model = transformers.BloomForCausalLM(config)
    assert not use_packed_attention(model)


def test_a_model_with_a_running_state_is_refused():
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    config = transformers.Qwen3NextConfig(
        **(SIZES | layers | {"num_experts": 2, "num_experts_per_tok": 1})
    )
    with torch.device("meta"):
        model = transformers.Qwen3NextForCausalLM(config)
    with pytest.raises(PackingError, match=r"qwen3_next has linear_attention layers"):
        check_packable(model)
    assert not runs_packed_rows(model)


def test_a_plain_model_runs_packed_rows_once_it_is_told_to():
    model = build("Qwen3", {})
    assert not runs_packed_rows(model)
    # not every model tells transformers' masks of its positions, and none says whether it does
    with pytest.raises(PackingError, match=r"attention of this qwen3 model \(eager\) is not told"):
        check_packable(model)
    let_pack(model)
    check_packable(model)
    assert runs_packed_rows(model)


def test_an_ordinary_mask_is_no_packed_row():
    assert not isinstance(torch.ones(1), PackedRows)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks at every input
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # which it does by itself
def test_compiled_layers_run_packed_rows_of_any_shape():
    plain = build("Qwen3", {}).float()
    let_pack(plain)
    compiled = copy.deepcopy(plain)
    for layer in compiled.model.layers:
        layer.compile(backend="aot_eager")
    graphs = []
    for kept in (slice(None), slice(2, 5), slice(2), slice(3, 6)):
        parts = samples()[kept]
        expected = plain(**packed_inputs(parts), use_cache=False).logits
        found = compiled(**packed_inputs(parts), use_cache=False).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        found.sum().backward()
        expected.sum().backward()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    # one length, then all of them: blocks of samples are no shapes of a layer
    assert graphs[1] == graphs[-1]
    for mine, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)
