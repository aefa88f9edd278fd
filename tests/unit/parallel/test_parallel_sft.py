"""Supervised data, batches and loss, against a plain loop over single examples."""

import copy
import json

import numpy as np
import pytest
import torch
from sft_examples import only_example

from cosmos_parallel import (
    AdamWConfig,
    Learner,
    LearnerConfig,
    ParallelConfig,
    SftBatchConfig,
    SftData,
    SftDataError,
    SftExample,
    SftFormat,
    build_mesh,
    empty_batch,
    fit,
    lay_out,
    load_causal_lm,
    load_sft_data,
    sft_loss,
    step_batches,
    validate,
)


@pytest.fixture
def mesh():
    return build_mesh(ParallelConfig())


def spell(tokenizer, example) -> str:
    """Write trained tokens in brackets."""
    tokens = tokenizer.convert_ids_to_tokens(example.token_ids.tolist())
    return "".join(
        f"[{token}]" if kept else token
        for token, kept in zip(tokens, example.trainable, strict=True)
    )


def test_prompt_is_not_trained_and_the_response_ends(tokenizer):
    example = only_example({"prompt": "1+2=", "response": "3"}, tokenizer)
    assert spell(tokenizer, example) == "1+2=[3][</s>]"
    assert (example.token_ids.dtype, example.trainable.dtype) == (np.int32, np.bool_)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("</s> $A", "</s>[b][</s>]"),  # as OPT's, whose first token is its last too
        ("$A </s>", "[b][</s>]"),  # as T5's
    ],
)
def test_an_empty_prompt_keeps_what_the_tokenizer_puts_before_it(tokenizer, form, expected):
    from tokenizers.processors import TemplateProcessing

    framed = copy.deepcopy(tokenizer)
    end = ("</s>", tokenizer.eos_token_id)
    framed.backend_tokenizer.post_processor = TemplateProcessing(single=form, special_tokens=[end])
    assert spell(framed, only_example({"prompt": "", "response": "b"}, framed)) == expected


def test_an_end_that_is_written_in_the_prompt_stays(tokenizer):
    example = only_example({"prompt": "<u>a</s>", "response": "b"}, tokenizer)
    assert spell(tokenizer, example) == "<u>a</s>[b][</s>]"


def test_an_end_that_is_written_in_the_response_is_not_written_again(tokenizer):
    example = only_example({"prompt": "a", "response": "b</s>"}, tokenizer)
    assert spell(tokenizer, example) == "a[b][</s>]"


def test_every_answer_of_a_conversation_is_trained_and_nothing_else(tokenizer):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bc"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e"},
    ]
    example = only_example({"messages": messages}, tokenizer)
    assert spell(tokenizer, example) == "<u>a</s><a>[b][c][</s>]<u>d</s><a>[e][</s>]"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"data.jsonl:2: is not JSON"),
        ("[" * 100_000, r"data.jsonl:2: is not JSON: maximum recursion depth"),
        ("[1]", r"data.jsonl:2: is a JSON list; files are JSON lines \(one object in each line"),
        ('{"prompt": "a"}', r"data.jsonl:2: field 'response' is missing.*found: prompt"),
        ('{"prompt": 1, "response": "a"}', r"field 'prompt' is int"),
        ('{"messages": "a"}', r"field 'messages' is str; it must be a list"),
        ('{"messages": [{"role": "user"}]}', r"must be a list.*message 0 is {'role': str}"),
        ('{"messages": [{"role": "a", "content": []}]}', r"{'role': str, 'content': list}"),
        ('{"messages": [{"role": "gpt", "content": "a"}]}', r"no message of the ass.*roles: gpt;"),
        ('{"prompt": "\\ud83d", "response": "a"}', r"data.jsonl:2: .* has broken Unicode"),
    ],
)
def test_a_bad_line_is_named(tmp_path, tokenizer, line, message):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n' + line + "\n")
    with pytest.raises(SftDataError, match=message):
        load_sft_data(path, tokenizer)


def test_a_byte_order_mark_is_no_text(tmp_path, tokenizer):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n', encoding="utf-8-sig")
    assert len(load_sft_data(path, tokenizer).examples) == 1


def test_missing_and_empty_files_are_errors(tmp_path, tokenizer):
    with pytest.raises(SftDataError, match="No such file"):
        load_sft_data(tmp_path / "none.jsonl", tokenizer)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(SftDataError, match="has no example"):
        load_sft_data(tmp_path / "empty.jsonl", tokenizer)


def test_a_template_that_writes_answers_without_their_prompts_is_refused(tokenizer):
    fickle = copy.deepcopy(tokenizer)
    fickle.chat_template = "{{ messages | length }}{{ messages[-1].content }}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(SftDataError, match=r"message 1: .* does not write the answer behind what"):
        only_example({"messages": messages}, fickle)
    fickle.chat_template = None
    with pytest.raises(SftDataError, match="no chat template"):
        only_example({"messages": messages}, fickle)
    fickle.chat_template = "{{ raise_exception('only users here') }}"
    with pytest.raises(SftDataError, match="only users here"):
        only_example({"messages": messages}, fickle)


def test_long_examples_are_dropped_and_counted(tmp_path, tokenizer):
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": "a" * n, "response": "b"} for n in (1, 10, 3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    data = load_sft_data(path, tokenizer, SftFormat(max_tokens=5))
    assert ([len(e.token_ids) for e in data.examples], data.num_dropped) == ([3, 5], 1)


def example(length: int, num_trained: int, seed: int = 0) -> SftExample:
    ids = np.random.default_rng(seed).integers(0, 64, length).astype(np.int32)
    mask = np.zeros(length, dtype=np.bool_)
    mask[length - num_trained :] = True
    return SftExample(token_ids=ids, trainable=mask)


LENGTHS = [5, 31, 9, 2, 17, 12, 8, 25, 3, 14]
DATA = SftData(examples=tuple(example(n, max(1, n // 3), n) for n in LENGTHS))


def count(batches) -> int:
    return sum(batch.num_tokens for batch in batches)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_ranks_share_every_example_once(layout, size):
    config = SftBatchConfig(max_tokens=64, bucket=8, layout=layout)
    shares = [lay_out(DATA.examples, config, rank=rank, size=size) for rank in range(size)]
    assert sum(count(share) for share in shares) == sum(LENGTHS)
    for batch in (batch for share in shares for batch in share):
        assert batch.token_ids.numel() <= 64
        assert batch.token_ids.shape[1] % 8 == 0


def test_ranks_get_about_equal_numbers_of_tokens():
    data = [example(n, 1) for n in range(1, 101)]
    config = SftBatchConfig()
    sums = [count(lay_out(data, config, rank=rank, size=4)) for rank in range(4)]
    # 5050 / 4 = 1262.5; dealing without turning round would give 1300 to the first
    assert max(sums) - min(sums) <= 3


def test_packing_saves_padding():
    padded = lay_out(DATA.examples, SftBatchConfig(max_tokens=256, bucket=1))
    packed = lay_out(DATA.examples, SftBatchConfig(max_tokens=256, bucket=1, layout="packed"))
    assert sum(b.token_ids.numel() for b in packed) == sum(LENGTHS)
    assert sum(b.token_ids.numel() for b in padded) > sum(LENGTHS)


def test_packed_ranks_make_equally_many_passes():
    config = SftBatchConfig(max_tokens=32, bucket=8, layout="packed")
    # 126 tokens: two ranks of 63, two rows of at most 32 tokens each, however they are cut
    shares = [lay_out(DATA.examples, config, rank=rank, size=2) for rank in range(2)]
    assert len(shares[0]) == len(shares[1])
    assert abs(count(shares[0]) - count(shares[1])) <= 2


def test_an_example_of_one_token_has_a_column_to_predict(model_directory, mesh):
    one = SftExample(token_ids=np.array([3], np.int32), trainable=np.array([True]))
    config = SftBatchConfig(batch_size=1, bucket=1)
    (batch,) = step_batches(SftData(examples=(one,)), config, 0)
    result = sft_loss(load_causal_lm(model_directory("Qwen3"), mesh), batch)
    assert (result.total.item(), result.weight.item()) == (0.0, 0)


def test_an_example_longer_than_the_budget_is_a_batch_by_itself():
    batches = lay_out(DATA.examples, SftBatchConfig(max_tokens=16, bucket=1))
    assert batches[0].token_ids.shape == (1, 31)
    assert count(batches) == sum(LENGTHS)


def test_the_stream_is_a_function_of_the_step_and_passes_over_all_examples():
    config = SftBatchConfig(batch_size=4, seed=3)
    # 5 steps of 4 are two passes over 10 examples: everything is seen twice
    streams = [[step_batches(DATA, config, step) for step in range(5)] for _ in range(2)]
    assert sum(count(batches) for batches in streams[0]) == 2 * sum(LENGTHS)
    first, second = (torch.cat([b.token_ids.flatten() for s in st for b in s]) for st in streams)
    assert torch.equal(first, second)
    other = step_batches(DATA, SftBatchConfig(batch_size=4, seed=4), 0)
    assert not torch.equal(other[0].token_ids, streams[0][0][0].token_ids)


def reference_loss(model, data) -> tuple[float, int, int]:
    """A float64 loop: one example at a time, one position at a time."""
    total, weight, num_correct = 0.0, 0, 0
    for item in data.examples:
        ids = torch.tensor(item.token_ids, dtype=torch.int64)
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].double().log_softmax(-1)
        for t in range(1, len(ids)):
            if item.trainable[t]:
                total -= logprobs[t - 1, ids[t]].item()
                weight += 1
                num_correct += int(logprobs[t - 1].argmax() == ids[t])
    return total, weight, num_correct


@pytest.mark.parametrize(("kind", "tied"), [("Qwen3", True), ("Llama", False)])
@pytest.mark.parametrize(
    "config",
    [
        SftBatchConfig(),
        SftBatchConfig(max_tokens=40, bucket=1),
        SftBatchConfig(layout="packed"),
        SftBatchConfig(layout="packed", max_tokens=40, bucket=1),
    ],
    ids=["padded", "padded-small", "packed", "packed-small"],
)
def test_loss_is_the_sum_over_trained_tokens_in_every_layout(
    model_directory, mesh, kind, tied, config
):
    model = load_causal_lm(model_directory(kind, tied=tied), mesh)
    total, weight, num_correct = reference_loss(model, DATA)
    found = validate(Learner(model, LearnerConfig()), DATA, config)
    assert found.weight == weight
    assert found.loss == pytest.approx(total / weight, rel=1e-6)
    num_places = sum(batch.token_ids.numel() for batch in lay_out(DATA.examples, config))
    assert found.metrics == {
        "num_correct": num_correct,
        "num_tokens": sum(LENGTHS),
        "num_places": num_places,
    }
    assert all(p.grad is None for p in model.parameters())


def test_packed_and_padded_give_the_same_gradient(model_directory, mesh):
    gradients = []
    for layout in ("padded", "packed"):
        model = load_causal_lm(model_directory(), mesh)
        for batch in lay_out(DATA.examples, SftBatchConfig(layout=layout)):
            sft_loss(model, batch).total.backward()
        gradients.append([p.grad for p in model.parameters()])
    for padded, packed in zip(*gradients, strict=True):
        torch.testing.assert_close(padded, packed, rtol=1e-4, atol=1e-5)


def test_a_model_that_cannot_leave_columns_out_gives_the_same_loss(model_directory, mesh):
    model = load_causal_lm(model_directory(), mesh)

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, input_ids, use_cache):
            return self.inner(input_ids=input_ids, use_cache=use_cache)

    (batch,) = lay_out(DATA.examples, SftBatchConfig())
    torch.testing.assert_close(sft_loss(Whole(), batch).total, sft_loss(model, batch).total)


def test_the_empty_batch_has_a_gradient_of_zero(model_directory, mesh):
    model = load_causal_lm(model_directory(), mesh)
    result = sft_loss(model, empty_batch())
    result.total.backward()
    assert result.weight == 0
    assert all(not p.grad.any() for p in model.parameters())


def test_fit_learns_and_goes_on_where_it_was(model_directory, mesh, tokenizer):
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(5) for b in range(5)]
    data = SftData(examples=tuple(only_example(row, tokenizer) for row in rows))
    config = SftBatchConfig(batch_size=25)

    def losses_of(*parts: range) -> list[float]:
        learner = Learner(
            load_causal_lm(model_directory(), mesh),
            LearnerConfig(optimizer=AdamWConfig(lr=3e-3)),
        )
        losses = []
        for steps in parts:
            fit(
                learner,
                data,
                config,
                steps=steps,
                on_step=lambda step, report: losses.append(report.loss),
            )
        return losses

    losses = losses_of(range(40))
    assert losses[-1] < 0.5 * losses[0]
    assert losses_of(range(12), range(12, 40)) == losses
