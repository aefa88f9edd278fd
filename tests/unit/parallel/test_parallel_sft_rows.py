"""Rows and chats: every form of a data set gives the same examples."""

import copy
import json

import pytest
from sft_examples import only_example

from cosmos_parallel import (
    SftDataError,
    SftFormat,
    encode_examples,
    load_sft_data,
    read_rows,
)

ROWS = [{"prompt": "1+2=", "response": "3"}, {"prompt": "2+2=", "response": "4"}]


def write_json(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def write_parquet(path, rows=ROWS):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def save_to_disk(path, rows=ROWS, **splits):
    datasets = pytest.importorskip("datasets")
    if not splits:
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
        return path
    members = {name: datasets.Dataset.from_list(found) for name, found in splits.items()}
    datasets.DatasetDict(members).save_to_disk(str(path))
    return path


def hub_like(path):
    write_parquet(path / "data" / "train-00000-of-00002.parquet", ROWS[:1])
    write_parquet(path / "data" / "train-00001-of-00002.parquet", ROWS[1:])
    write_parquet(path / "data" / "test-00000-of-00001.parquet", ROWS[:1])
    return path


FORMS = {
    "json": lambda path: write_json(path / "rows.jsonl"),
    "parquet": lambda path: write_parquet(path / "rows.parquet"),
    "saved": lambda path: save_to_disk(path / "saved"),
    "saved_dict": lambda path: save_to_disk(path / "saved", train=ROWS, test=ROWS[:1]),
    "hub": lambda path: hub_like(path / "hub"),
    "folder": lambda path: write_json(path / "folder" / "part.jsonl").parent,
    "folder_of_split": lambda path: write_json(path / "set" / "train" / "part.jsonl").parents[1],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_rows(tmp_path, form, capfd):
    rows = [dict(row) for _, row in read_rows(FORMS[form](tmp_path))]
    assert rows == ROWS


@pytest.mark.parametrize("form", ["saved_dict", "hub"])
def test_a_split_is_chosen_by_name(tmp_path, form):
    path = FORMS[form](tmp_path)
    assert [dict(row) for _, row in read_rows(path, "test")] == ROWS[:1]
    with pytest.raises(SftDataError, match=r"no (files of )?split 'dev'"):
        list(read_rows(path, "dev"))


def test_a_split_whose_name_begins_with_another_is_chosen_by_all_of_it(tmp_path):
    # sets of words have another order in each process; some of these names are hit by any
    kinds = [f"{name}_{kind}" for name in ("train", "test") for kind in ("sft", "gen", "a", "b")]
    for index, kind in enumerate(kinds):
        write_json(tmp_path / "data" / f"{kind}-00000-of-00001.jsonl", [{"index": index}])
    for index, kind in enumerate(kinds):
        found = [dict(row) for _, row in read_rows(tmp_path, kind)]
        assert found == [{"index": index}]


def test_what_cannot_be_read_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(SftDataError, match=r"bad.parquet cannot be read as Parquet"):
        list(read_rows(tmp_path / "bad.parquet"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SftDataError, match=r"no \.jsonl or \.parquet file at all"):
        list(read_rows(tmp_path / "empty"))


def spell(tokenizer, example) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(example.token_ids.tolist()))


def test_fields_may_have_other_names(tmp_path, tokenizer):
    rows = [{"question": "a", "output": "b", "prompt": None}]
    path = write_parquet(tmp_path / "rows.parquet", rows)
    data = load_sft_data(path, tokenizer, SftFormat(prompt="question", response="output"))
    assert spell(tokenizer, data.examples[0]) == "ab</s>"
    with pytest.raises(SftDataError, match=r"rows.parquet row 1: field 'prompt' is NoneType"):
        load_sft_data(path, tokenizer)


MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<a>"
    "{%- generation %}{{ m.content }}</s>{% endgeneration -%}"
    "{% else %}<u>{{ m.content }}</s>{% endif %}{% endfor %}"
)


def test_a_template_that_marks_what_is_generated_is_taken_at_its_word(tokenizer):
    marked = copy.deepcopy(tokenizer)
    marked.chat_template = MARKED
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bc"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e"},
    ]
    theirs = only_example({"messages": messages}, marked)
    ours = only_example({"messages": messages}, tokenizer)
    assert theirs.token_ids.tolist() == ours.token_ids.tolist()
    assert theirs.trainable.tolist() == ours.trainable.tolist()
    marked.chat_template = "{{ messages[0].content }}{% generation %}{% endgeneration %}"
    with pytest.raises(SftDataError, match="marks nothing as generated"):
        only_example({"messages": messages}, marked)


def test_tools_reach_the_template(tokenizer):
    told = copy.deepcopy(tokenizer)
    told.chat_template = "{{ tools | length }}" + tokenizer.chat_template
    row = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    }
    assert spell(tokenizer, only_example(row, told)) == "1<u>a</s><a>b</s>"
    as_text = row | {"tools": json.dumps(row["tools"])}
    assert spell(tokenizer, only_example(as_text, told)) == "1<u>a</s><a>b</s>"
    for wrong in ("f", "{}", {"name": "f"}):
        with pytest.raises(SftDataError, match="'tools' must be a list of schemas, or the JSON"):
            only_example(row | {"tools": wrong}, told)


CALLING = (
    "{% for m in messages %}{% if 'tool_calls' in m %}<a>{{ m.content or '' }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}?{% endfor %}</s>"
    "{% else %}<{{ m.role[0] }}>{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def test_calls_of_tools_are_trained_also_where_a_table_has_nulls_for_other_messages(
    tokenizer, tmp_path
):
    calling = copy.deepcopy(tokenizer)
    calling.chat_template = CALLING
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    said = "<u>a</s><a>[f][?][</s>]<u>b</s><a>[c][</s>]"
    example = only_example({"messages": messages}, calling)
    assert marked_spelling(tokenizer, example) == said
    path = write_parquet(tmp_path / "rows.parquet", [{"messages": messages}])
    (example,) = load_sft_data(path, calling).examples
    assert marked_spelling(tokenizer, example) == said
    messages[1]["tool_calls"] = []
    with pytest.raises(SftDataError, match=r"list of 'tool_calls' needs no content"):
        only_example({"messages": messages}, calling)


def called(name, **arguments):
    """Return a row that calls one tool, which takes what it is called with."""
    properties = {argument: {"type": "string"} for argument in arguments}
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    known = {"name": name, "parameters": {"type": "object", "properties": properties}}
    return {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
        "tools": [{"type": "function", "function": known}],
        "answer": {"kept": None, "too": 1},
    }


@pytest.mark.parametrize("write", [write_parquet, save_to_disk])
def test_calls_in_a_table_have_no_arguments_of_other_tools(tmp_path, write):
    rows = [called("f", city="x"), called("g", query="y")]
    assert [dict(row) for _, row in read_rows(write(tmp_path / "rows.parquet", rows))] == rows


def test_nulls_that_were_written_as_json_stay(tmp_path):
    datasets = pytest.importorskip("datasets")
    text = datasets.Value("string")
    turn = {"role": text, "content": text, "tool_calls": datasets.Json()}
    rows = [{"messages": called("f", city=None, day="x")["messages"]}]
    features = datasets.Features({"messages": datasets.List(turn)})
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(tmp_path))
    ((_, row),) = read_rows(tmp_path)
    assert row["messages"][1]["tool_calls"] == rows[0]["messages"][1]["tool_calls"]


def joining_tokenizer():
    """Return a tokenizer that has a token for two new lines, and a template with lines."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["</s>", "\n", "\n\n", *"uaxyz:"])}
    inner = Tokenizer(models.BPE(vocabulary, [("\n", "\n")]))
    inner.add_special_tokens(["</s>"])
    template = (
        "{% for m in messages %}{{ m.role[0] }}:\n{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}a:\n{% endif %}"
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", chat_template=template)


def test_an_answer_may_begin_with_what_joins_the_prompt():
    joining = joining_tokenizer()
    said = ["x", "\n\ny", "x", "\ny", "z", "y"]
    roles = ["user", "assistant"] * 3
    messages = [{"role": r, "content": text} for r, text in zip(roles, said, strict=True)]
    example = only_example({"messages": messages}, joining)
    tokens = joining.convert_ids_to_tokens(example.token_ids.tolist())
    assert tokens == [
        *("u", ":", "\n", "x", "</s>", "a", ":", "\n"),  # then what a model would generate
        *("\n\n", "y", "</s>"),
        *("u", ":", "\n", "x", "</s>", "a", ":", "\n"),
        *("\n", "y", "</s>"),
        *("u", ":", "\n", "z", "</s>", "a", ":", "\n"),
        *("y", "</s>"),
    ]
    learned = [tokens[index] for index in example.trainable.nonzero()[0]]
    assert learned == ["\n\n", "y", "</s>", "\n", "y", "</s>", "y", "</s>"]


def test_a_template_that_forgets_what_was_said_is_refused():
    forgetful = joining_tokenizer()
    forgetful.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:\n{{ m.content if loop.last else 'z' }}</s>"
        "{% endfor %}{% if add_generation_prompt %}a:\n{% endif %}"
    )
    messages = [
        {"role": role, "content": text} for role, text in (("user", "x"), ("assistant", "\ny"))
    ]
    with pytest.raises(SftDataError, match=r"message 1: .* does not write the answer behind what"):
        only_example({"messages": messages}, forgetful)


# thoughts stand in -+ behind the last question, and are left out before it, as by Qwen3
THINKING = (
    "{% set n = namespace(last=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set n.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<{{ 'a' if m.role == 'assistant' else 'u' }}>"
    "{% if m.role == 'assistant' and loop.index0 > n.last %}-{{ m.thought }}+{% endif %}"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
THOUGHTS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "thought": "1"},
    {"role": "tool", "content": "c"},
    {"role": "assistant", "content": "d", "thought": "2"},
    {"role": "user", "content": "e"},
    {"role": "assistant", "content": "f", "thought": "3"},
]


def test_answers_whose_thoughts_are_forgotten_later_are_trained_with_them_each_once(
    tmp_path, tokenizer
):
    thinking = copy.deepcopy(tokenizer)
    thinking.chat_template = THINKING
    row = {"messages": THOUGHTS}
    said = [marked_spelling(thinking, example) for example in encode_examples(row, thinking)]
    assert said == [
        "<u>a</s><a>[-][1][+][b][</s>]<u>c</s><a>[-][2][+][d][</s>]",
        "<u>a</s><a>b</s><u>c</s><a>d</s><u>e</s><a>[-][3][+][f][</s>]",
    ]
    path = write_json(tmp_path / "rows.jsonl", [ROWS[0], row, ROWS[1]])
    data = load_sft_data(path, thinking)
    assert [[len(e.token_ids) for e in of_row] for of_row in data.by_row()] == [[6], [18, 21], [6]]
    data = load_sft_data(path, thinking, SftFormat(max_tokens=18))
    assert ([len(of_row) for of_row in data.by_row()], data.num_dropped) == ([1, 1, 1], 1)
    data = load_sft_data(path, thinking, SftFormat(max_tokens=17))
    assert ([len(of_row) for of_row in data.by_row()], data.num_dropped) == ([1, 1], 2)


def test_a_conversation_may_begin_with_the_assistant(tokenizer):
    greeting = copy.deepcopy(tokenizer)
    greeting.chat_template = (
        "{% if messages[0].role != 'system' %}<s>default</s>{% endif %}" + tokenizer.chat_template
    )
    messages = [
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    said = "<a>[a][b][</s>]<u>c</s><a>[d][</s>]"
    assert marked_spelling(tokenizer, only_example({"messages": messages}, tokenizer)) == said
    example = only_example({"messages": messages}, greeting)
    assert marked_spelling(tokenizer, example) == "<s>default</s>" + said
    # one that prompts with something else than it writes before an answer
    greeting.chat_template = (
        "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<a>...{% endif %}"
    )
    with pytest.raises(SftDataError, match=r"put a message of the user before it"):
        only_example({"messages": messages}, greeting)
    greeting.chat_template = "{{ messages[0].content + none }}"
    with pytest.raises(SftDataError, match=r"template refuses the messages: can only concatenate"):
        only_example({"messages": messages}, greeting)


def marked_spelling(tokenizer, example) -> str:
    tokens = tokenizer.convert_ids_to_tokens(example.token_ids.tolist())
    kept = zip(tokens, example.trainable, strict=True)
    return "".join(f"[{token}]" if trained else token for token, trained in kept)
