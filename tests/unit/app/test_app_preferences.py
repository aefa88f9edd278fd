"""Preferences and distillation on given data: rows, steps, and where the losses begin and go."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch

from cosmos_algos import DistillationConfig, DpoConfig, KtoConfig, kto_baseline
from cosmos_app.errors import RunError
from cosmos_app.given.data_config import PreferenceDataConfig, SftDataConfig, sources_of
from cosmos_app.given.distillation import DistillationTask
from cosmos_app.given.divided import Divided, split_off
from cosmos_app.given.preference_data import (
    Encoder,
    PreferenceFormat,
    check_preference,
    load_marked,
    load_pairs,
    mismatched,
)
from cosmos_app.given.preferences import KtoTask, Layout, PairTask
from cosmos_app.given.tasks import supervised
from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model
from cosmos_parallel import (
    AdamWConfig,
    Learner,
    LearnerConfig,
    ParallelConfig,
    SftBatchConfig,
    SftDataError,
    answer_logits,
    build_mesh,
    load_causal_lm,
    scored,
    step_examples,
)

TINY = TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2, head_dim=32)
ALPHABET = "0123456789+=abcdefghijklmnopqrstuvwxyz {}\"':,"
TALKING = (
    "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
ASKED, ANSWER = [{"role": "user", "content": "c"}], {"role": "assistant", "content": "d"}
BATCH = SftBatchConfig(batch_size=4, max_tokens=64)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("tiny") / "model"
    build_tiny_model(directory, [ALPHABET], TINY, seed=0)
    return directory


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


def encoding(tokenizer):
    return Encoder(tokenizer=tokenizer)


def load(model_dir):
    return load_causal_lm(model_dir, build_mesh(ParallelConfig()))


def written(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def pair_rows(count=6):
    return [
        {"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": "abc"[: 1 + n % 3]}
        for n in range(count)
    ]


def texts(tokenizer, sample):
    ids = torch.tensor(sample.token_ids)
    judged = ids[torch.tensor(sample.trainable)]
    return tokenizer.decode(ids), tokenizer.decode(judged)


def test_a_pair_is_judged_by_its_answers_alone(tmp_path, tokenizer):
    path = written(tmp_path / "rows.jsonl", pair_rows(2))
    pairs = load_pairs(path, encoding(tokenizer), PreferenceFormat())
    assert [texts(tokenizer, sample) for sample in pairs[1]] == [
        ("<bos>1+1=2<eos>", "2<eos>"),
        ("<bos>1+1=ab<eos>", "ab<eos>"),
    ]
    assert (
        len(load_pairs(path, encoding(tokenizer), PreferenceFormat(max_tokens=7))) == 1
    )  # one is longer


def test_of_a_conversation_only_the_last_answer_is_judged(tmp_path, tokenizer):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
    prompt = [{"role": role, "content": content} for role, content in turns]
    row = {
        "prompt": prompt,
        "chosen": [{"role": "assistant", "content": "d"}],
        "rejected": [{"role": "assistant", "content": "e"}],
    }
    tokenizer.chat_template = TALKING
    try:
        (pair,) = load_pairs(
            written(tmp_path / "c.jsonl", [row]), encoding(tokenizer), PreferenceFormat()
        )
    finally:
        tokenizer.chat_template = None
    assert [texts(tokenizer, sample)[1] for sample in pair] == ["d<eos>", "e<eos>"]


def test_earlier_answers_are_shown_as_a_template_that_forgets_thoughts_writes_them(
    tmp_path, tokenizer
):
    told = copy.deepcopy(tokenizer)
    thinks = "{{ '=' if loop.last and m['role'] == 'assistant' }}{{ m['content'] }}"
    told.chat_template = TALKING.replace("{{ m['content'] }}", thinks)
    roles = ("user", "assistant", "user")
    prompt = [{"role": role, "content": text} for role, text in zip(roles, "123", strict=True)]
    row = {"prompt": prompt, **ANSWERS}
    path = written(tmp_path / "c.jsonl", [row])
    (pair,) = load_pairs(path, encoding(told), PreferenceFormat())
    assert [texts(told, sample) for sample in pair] == [
        ("u1<eos>a2<eos>u3<eos>a=d<eos>", "=d<eos>"),
        ("u1<eos>a2<eos>u3<eos>a=e<eos>", "=e<eos>"),
    ]


ANSWERS = {
    name: [{"role": "assistant", "content": text}]
    for name, text in (("chosen", "d"), ("rejected", "e"))
}


def test_a_prompt_that_answers_repeat_is_asked_once(tmp_path, tokenizer):
    told = copy.deepcopy(tokenizer)
    told.chat_template = TALKING
    asked = [{"role": "user", "content": "c"}]
    rows = [
        {"prompt": "c", **ANSWERS},
        {"prompt": asked, **ANSWERS},
        {"prompt": "c", **{name: asked + answer for name, answer in ANSWERS.items()}},
        {"prompt": asked, **{name: asked + answer for name, answer in ANSWERS.items()}},
        {name: asked + answer for name, answer in ANSWERS.items()},
    ]
    pairs = load_pairs(written(tmp_path / "rows.jsonl", rows), encoding(told), PreferenceFormat())
    assert [texts(told, better) for better, _ in pairs] == [("uc<eos>ad<eos>", "d<eos>")] * 5


def test_answers_in_a_conversation_are_judged_with_the_tools_of_their_row(tmp_path, tokenizer):
    told = copy.deepcopy(tokenizer)
    told.chat_template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + TALKING
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    path = written(tmp_path / "rows.jsonl", [{"prompt": "c", "tools": [tool], **ANSWERS}])
    ((better, worse),) = load_pairs(path, encoding(told), PreferenceFormat())
    assert texts(told, better) == ("fuc<eos>ad<eos>", "d<eos>")
    assert texts(told, worse) == ("fuc<eos>ae<eos>", "e<eos>")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, r"rows.jsonl:1: field 'rejected' is missing"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
        (
            {"prompt": ASKED, "chosen": [ANSWER]},
            r":1: field 'rejected' is missing; a row has it as messages",
        ),
        (
            {"chosen": [*ASKED, ANSWER], "rejected": None},
            r":1: field 'rejected' is NoneType; a row has it as messages, or",
        ),
        (
            {"prompt": ASKED[0], "chosen": [ANSWER], "rejected": []},
            r":1: field 'prompt' is dict; before messages it must be text, or messages too",
        ),
    ],
)
def test_a_row_that_is_no_pair_is_named(tmp_path, tokenizer, row, message):
    told = copy.deepcopy(tokenizer)
    told.chat_template = TALKING
    with pytest.raises(SftDataError, match=message):
        load_pairs(written(tmp_path / "rows.jsonl", [row]), encoding(told), PreferenceFormat())
    with pytest.raises(SftDataError, match=message):  # as it is before anything starts
        check_preference(row, "rows.jsonl:1", PreferenceFormat(), is_marked=False)


@pytest.mark.parametrize("answer", [[], [{"role": "user", "content": "e"}]])
def test_an_answer_that_the_assistant_does_not_give_is_named(tmp_path, tokenizer, answer):
    told = copy.deepcopy(tokenizer)
    told.chat_template = TALKING
    row = {"prompt": ASKED, "chosen": [ANSWER], "rejected": answer}
    path = written(tmp_path / "rows.jsonl", [row])
    with pytest.raises(SftDataError, match=r":1: field 'rejected' has no message of the assistant"):
        load_pairs(path, encoding(told), PreferenceFormat())


def test_an_answer_to_nothing_is_judged_from_its_second_token_on(tmp_path, tokenizer):
    from tokenizers import processors

    bare = copy.deepcopy(tokenizer)  # puts nothing before a text, as that of Qwen
    bare.backend_tokenizer.post_processor = processors.Sequence([])
    path = written(tmp_path / "rows.jsonl", [{"prompt": "", "chosen": "bc", "rejected": "d"}])
    ((better, worse),) = load_pairs(path, encoding(bare), PreferenceFormat())
    assert texts(bare, better) == ("bc<eos>", "c<eos>")
    assert texts(bare, worse) == ("d<eos>", "<eos>")


def test_data_that_is_not_there_is_not_called_what_it_is_not(tmp_path, tokenizer):
    with pytest.raises(SftDataError, match=r"^cannot read data .*none.jsonl: No such file"):
        load_pairs(tmp_path / "none.jsonl", encoding(tokenizer), PreferenceFormat())


def test_a_sample_without_a_mark_is_named(tmp_path, tokenizer):
    for mark in ("yes", 2, 1.0, None):
        path = written(tmp_path / "rows.jsonl", [{"prompt": "a", "response": "b", "label": mark}])
        with pytest.raises(SftDataError, match=r"rows.jsonl:1: field 'label' must be true or fal"):
            load_marked(path, encoding(tokenizer), PreferenceFormat())


def test_rows_kept_back_leave_some_to_train_on(tmp_path, tokenizer):
    data = PreferenceDataConfig(path=written(tmp_path / "rows.jsonl", pair_rows(6)), held_out=2)
    read = lambda path, rows: load_pairs(path, encoding(tokenizer), rows)  # noqa: E731
    train, held_out = split_off(sources_of(data)[0], read)
    assert (len(train), len(held_out)) == (4, 2)
    with pytest.raises(RunError, match="has 6 rows: none would be left to train on"):
        split_off(sources_of(replace(data, held_out=6))[0], read)
    short = replace(data, held_out=2, rows=PreferenceFormat(max_tokens=7))  # <bos>0+0=0<eos>
    with pytest.raises(RunError, match=r"has 6 rows, 4 of them longer than data.rows.max_tokens=7"):
        split_off(sources_of(short)[0], read)


def take(learner, task, step):
    batches = task.batches(step, rank=0, size=1)
    return learner.step(batches, task.loss, filler=task.filler, scorers=task.scorers)


def total(task, model, batch):
    return float(task.loss(model, scored(batch, task.scorers)).total.detach())


def pair_task(tmp_path, model_dir, tokenizer, algorithm):
    path = written(tmp_path / "rows.jsonl", pair_rows(6))
    pairs = load_pairs(path, encoding(tokenizer), PreferenceFormat())
    layout = Layout(batch=BATCH, vocab_size=len(tokenizer))
    reference = load(model_dir).requires_grad_(False)
    return PairTask(Divided.of(pairs[:4], pairs[4:]), reference, algorithm, layout)


def test_dpo_begins_at_log_two_and_prefers_what_it_was_shown(tmp_path, model_dir, tokenizer):
    task = pair_task(tmp_path, model_dir, tokenizer, DpoConfig(beta=0.5))
    config = LearnerConfig(optimizer=AdamWConfig(lr=1e-2))
    learner = Learner(load(model_dir), config)
    reports = [take(learner, task, step) for step in range(12)]
    assert reports[0].loss == pytest.approx(math.log(2.0), rel=1e-5)  # the policy is the reference
    assert reports[0].weight == 4  # pairs
    assert reports[-1].loss < 0.8 * reports[0].loss
    figures = task.figures(reports[-1])
    assert figures["accuracy"] == 1.0
    assert figures["margin"] == pytest.approx(figures["chosen"] - figures["rejected"], rel=1e-5)
    held_out = task.held_out(rank=0, size=1)[""]
    assert learner.evaluate(held_out, task.loss, scorers=task.scorers).weight == 2


def test_the_shares_of_two_ranks_make_the_loss_of_one(tmp_path, model_dir, tokenizer):
    task = pair_task(tmp_path, model_dir, tokenizer, DpoConfig())
    moved = load(model_dir)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(1.05)
    totals = [
        sum(total(task, moved, batch) for batch in batches)
        for batches in (
            task.batches(0, rank=0, size=1),
            task.batches(0, rank=0, size=2) + task.batches(0, rank=1, size=2),
        )
    ]
    assert totals[0] == pytest.approx(totals[1], rel=1e-5)
    assert total(task, moved, task.filler) == 0.0


def test_a_prompt_with_the_answer_to_another_is_no_longer_than_samples_may_be(tmp_path, tokenizer):
    rows = [
        {"prompt": "1234=", "response": "5", "label": True},
        {"prompt": "1=", "response": "23456", "label": False},
    ]
    path = written(tmp_path / "rows.jsonl", rows)
    marked = load_marked(path, encoding(tokenizer), PreferenceFormat(max_tokens=9))
    others = mismatched(marked, longest=9)
    assert texts(tokenizer, others[0]) == ("<bos>1234=234", "234")
    assert texts(tokenizer, others[1]) == ("<bos>1=5<eos>", "5<eos>")
    assert texts(tokenizer, mismatched(marked)[0]) == ("<bos>1234=23456<eos>", "23456<eos>")


def test_kto_estimates_its_divergence_with_a_model_of_as_many_positions_as_samples_have(
    tmp_path, tokenizer
):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 9, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    rows = [
        {"prompt": "1234=", "response": "5", "label": True},
        {"prompt": "1=", "response": "23456", "label": False},
    ]
    path = written(tmp_path / "rows.jsonl", rows)
    marked = load_marked(path, encoding(tokenizer), PreferenceFormat(max_tokens=9))
    layout = Layout(batch=BATCH, vocab_size=len(tokenizer), longest=9)
    reference = load(tmp_path / "m").requires_grad_(False)
    task = KtoTask(Divided.of(marked), reference, KtoConfig(), layout)
    learner = Learner(load(tmp_path / "m"), LearnerConfig())
    task.prepare(learner, 0)
    assert take(learner, task, 0).loss == pytest.approx(0.5, rel=1e-5)


def test_kto_begins_at_a_half_and_takes_its_baseline_from_other_answers(
    tmp_path, model_dir, tokenizer
):
    rows = [{"prompt": f"{n}+=", "response": str(n), "label": n % 2 == 0} for n in range(4)]
    rows[1]["label"], rows[2]["label"] = 0, 1  # as some data sets have them
    path = written(tmp_path / "rows.jsonl", rows)
    marked = load_marked(path, encoding(tokenizer), PreferenceFormat())
    assert [sample.desirable for sample in marked] == [True, False, True, False]
    others = mismatched(marked)
    assert texts(tokenizer, others[3]) == ("<bos>3+=0<eos>", "0<eos>")
    layout = Layout(batch=BATCH, vocab_size=len(tokenizer))
    algorithm = KtoConfig(beta=0.5)
    task = KtoTask(Divided.of(marked), load(model_dir).requires_grad_(False), algorithm, layout)
    learner = Learner(load(model_dir), LearnerConfig(optimizer=AdamWConfig(lr=1e-2)))
    losses = []
    for step in range(8):
        task.prepare(learner, step)
        report = take(learner, task, step)
        losses.append(report.loss)
    assert losses[0] == pytest.approx(0.5, rel=1e-5)
    assert losses[-1] < losses[0]
    task.prepare(learner, 8)
    others = mismatched([marked[index] for index in step_examples(4, BATCH, 8)])
    found = learner.evaluate([task._collate(others)], task._ratio_sums, scorers=[task._reference])
    expected = kto_baseline(torch.tensor(found.loss * 4), torch.tensor(4.0))
    assert task.figures(report)["divergence"] == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize(
    "algorithm",
    [
        DistillationConfig(),
        DistillationConfig(beta=0.5, top_k=4),
        DistillationConfig(beta=1.0, temperature=2.0),
    ],
)
def test_a_student_comes_nearer_to_its_teacher_on_packed_rows(tmp_path, model_dir, algorithm):
    rows = [{"prompt": f"{n}+{n}=", "response": str(2 * n)} for n in range(6)]
    data = SftDataConfig(path=written(tmp_path / "rows.jsonl", rows), held_out=2)
    batch = SftBatchConfig(batch_size=4, max_tokens=32, layout="packed", bucket=1)
    examples = supervised(data, batch, model_dir)
    teacher = load(model_dir).requires_grad_(False)
    with torch.no_grad():
        teacher.lm_head.weight.mul_(30.0)  # another distribution, surer of itself
    task = DistillationTask(examples, teacher, algorithm)
    student = load(model_dir)
    first = task.batches(0, rank=0, size=1)
    own = DistillationTask(examples, student, algorithm)
    assert total(own, student, first[0]) == pytest.approx(0.0, abs=1e-4)
    if algorithm.beta == 0.0:
        with torch.no_grad():
            goal, mine = (answer_logits(model, first[0].examples) for model in (teacher, student))
        p, q = goal.logits.double().softmax(-1), mine.logits.double().softmax(-1)
        expected = (p * (p / q).log()).sum(-1)[mine.mask].sum()
        assert total(task, student, first[0]) == pytest.approx(float(expected), rel=1e-4)
    learner = Learner(student, LearnerConfig(optimizer=AdamWConfig(lr=2e-2)))
    reports = [take(learner, task, step) for step in range(10)]
    assert reports[-1].loss < 0.8 * reports[0].loss
