"""Prompt data: what is read, in which order, and what a wrong file is told."""

import json
from pathlib import Path

import pytest

from cosmos_core.videos import VideoSampling, video_reference
from cosmos_rollout import (
    PromptConfig,
    PromptDataError,
    PromptFile,
    PromptRow,
    PromptSet,
    PromptTextError,
    prompt_text,
    prompt_tokens,
    read_prompts,
)


def write(path: Path, *rows) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_rows_keep_their_fields_and_number_themselves(tmp_path):
    path = write(
        tmp_path / "data.jsonl",
        {"prompt": "1+1=", "answer": 2, "level": "easy"},
        "",
        {"id": "q7", "messages": [{"role": "user", "content": "hi"}]},
    )
    first, second = read_prompts(path)
    assert first == PromptRow(prompt_id="1", prompt="1+1=", answer="2", fields={"level": "easy"})
    assert second.prompt_id == "q7"
    assert second.messages == ({"role": "user", "content": "hi"},)
    assert (prompt_text(first), prompt_text(second), second.answer) == ("1+1=", "hi", None)


def test_parquet_gives_the_rows_of_json(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    path = write(tmp_path / "data.jsonl", *rows)
    assert read_prompts(tmp_path / "data.parquet") == read_prompts(path)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (['{"prompt": "a"}', "{oops"], r"data\.jsonl:2: column 2: not JSON"),
        (['{"text": 0, "answer": 1}'], ":1: needs either .* found answer, text"),
        (['{"prompt": "a", "messages": []}'], "needs either 'prompt' or 'messages'"),
        (['{"prompt": ""}'], "field 'prompt' has to be a text, found ''"),
        (['{"prompt": 3}'], "field 'prompt' has to be a text, found 3"),
        (['{"messages": [{"role": "user"}]}'], "field 'messages', turn 0: needs texts"),
        (['{"prompt": "a", "answer": [1]}'], "field 'answer' .* found list"),
        (['{"prompt": "a", "answer": NaN}'], "field 'answer' is nan, which nobody could say"),
        (['{"prompt": ' + "[" * 100_000], ":1: cannot be read: maximum recursion"),
        (['{"prompt": "a", "n": ' + "1" * 5000 + "}"], ":1: cannot be read: Exceeds the limit"),
        (["[1]"], "a row has to be an object, found list"),
        ([], "the file has no rows"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_told_where_and_what(tmp_path, rows, words):
    with pytest.raises(PromptDataError, match=words):
        read_prompts(write(tmp_path / "data.jsonl", *rows))


def test_a_missing_or_strange_file_is_named(tmp_path):
    with pytest.raises(PromptDataError, match=r"no prompt file .*nothing\.jsonl"):
        read_prompts(tmp_path / "nothing.jsonl")
    strange = tmp_path / "data.csv"
    strange.write_text("a,b")
    with pytest.raises(PromptDataError, match=r"data\.csv: prompts are read from"):
        read_prompts(strange)


def rows(count: int) -> list[PromptRow]:
    return [PromptRow(prompt_id=str(i), prompt=f"p{i}") for i in range(count)]


def test_each_epoch_visits_every_row_once_in_an_order_of_its_own():
    prompts = PromptSet(rows(10), seed=3)
    epochs = [[prompts.row(10 * epoch + i).prompt_id for i in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == [str(i) for i in range(10)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_follows_from_the_ordinal_and_the_seed_alone():
    one, other = PromptSet(rows(10), seed=3), PromptSet(rows(10), seed=3)
    forward = [one.row(i).prompt_id for i in range(30)]
    assert [other.row(i).prompt_id for i in reversed(range(30))] == forward[::-1]
    assert [PromptSet(rows(10), seed=4).row(i).prompt_id for i in range(30)] != forward


def test_the_held_out_split_is_never_trained_on(tmp_path):
    path = write(
        tmp_path / "data.jsonl",
        *({"prompt": f"p{i}", "split": "validation" if i % 3 == 0 else "train"} for i in range(9)),
    )
    train, held_out = PromptConfig(path=path).build()
    assert held_out is not None
    assert [held_out.row(i).prompt for i in range(4)] == ["p0", "p3", "p6", "p0"]
    assert {row.prompt for row in train} == {"p1", "p2", "p4", "p5", "p7", "p8"}


def test_a_validation_file_is_used_as_it_is(tmp_path):
    path = write(tmp_path / "train.jsonl", {"prompt": "a"})
    other = write(tmp_path / "test.jsonl", {"prompt": "b"}, {"prompt": "c"})
    train, held_out = PromptConfig(path=path, validation_path=other).build()
    assert held_out is not None
    assert ([r.prompt for r in train], [r.prompt for r in held_out]) == (["a"], ["b", "c"])
    assert PromptConfig(path=path).build()[1] is None


def test_nothing_left_to_train_on_is_an_error(tmp_path):
    path = write(tmp_path / "data.jsonl", {"prompt": "a", "split": "validation"})
    with pytest.raises(PromptDataError, match="no row is left to train on"):
        PromptConfig(path=path).build()


class Letters:
    """A tokenizer of single letters that puts a 0 in front and brackets around turns."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(letter) for letter in text]

    def decode(self, token_ids, *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, conversation, *, add_generation_prompt: bool, tokenize: bool):
        turns = "".join(f"[{turn['role'][0]}:{turn['content']}]" for turn in conversation)
        return turns + "[a:" * add_generation_prompt


def test_a_text_gets_special_tokens_and_a_conversation_the_template_only():
    text = PromptRow(prompt_id="1", prompt="ab")
    chat = PromptRow(prompt_id="2", messages=({"role": "user", "content": "b"},))
    assert prompt_tokens(text, Letters()) == (0, ord("a"), ord("b"))
    assert "".join(map(chr, prompt_tokens(chat, Letters()))) == "[u:b][a:"


def test_turns_keep_what_the_template_knows_of_tools(tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        {"role": "user", "content": "?", "tool_calls": None, "name": None},  # as in a table
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "name": "add", "tool_call_id": "1"},
    ]
    (row,) = read_prompts(write(tmp_path / "data.jsonl", {"id": None, "messages": turns}))
    assert row.messages == (
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        turns[2],
    )
    assert row.prompt_id == "1"


SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {argument: {"type": "integer"}}},
        },
    }
    for name, argument in (("add", "a"), ("look", "where"))
]


class Shows(Letters):
    """Puts the tools before the turns."""

    def apply_chat_template(self, conversation, *, tools, add_generation_prompt, tokenize):
        return f"{json.dumps(tools)}{conversation[0]['content']}"


@pytest.mark.parametrize("tools", [SCHEMAS, json.dumps(SCHEMAS)], ids=["list", "text"])
def test_the_tools_of_a_row_are_shown_by_the_template(tmp_path, tools):
    turns = [{"role": "user", "content": "?"}]
    (row,) = read_prompts(write(tmp_path / "d.jsonl", {"messages": turns, "tools": tools}))
    assert "".join(map(chr, prompt_tokens(row, Shows()))) == f"{json.dumps(SCHEMAS)}?"
    assert row.fields["tools"] == tools  # rewards find them, as the row has them


@pytest.mark.parametrize("tools", ["{", 3, ["add"], {"name": "add"}])
def test_tools_that_are_no_schemas_are_refused(tmp_path, tools):
    row = {"messages": [{"role": "user", "content": "?"}], "tools": tools}
    with pytest.raises(PromptDataError, match=r":1: field 'tools' has to be a list of schemas"):
        read_prompts(write(tmp_path / "d.jsonl", row))
    assert read_prompts(write(tmp_path / "e.jsonl", {"prompt": "a", "tools": tools}))


def test_rows_of_parquet_have_no_arguments_of_other_rows_tools(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [
        {
            "tools": [schema],
            "messages": [
                {"role": "user", "content": "?"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "f", "arguments": {argument: 1}}}],
                },
            ],
        }
        for schema, argument in zip(SCHEMAS, ("a", "where"), strict=True)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    for row, written in zip(read_prompts(tmp_path / "d.parquet"), rows, strict=True):
        assert list(row.tools) == written["tools"]
        assert list(row.messages) == written["messages"]


def test_a_prompt_that_the_tokenizer_or_its_template_refuses_says_so_for_the_books():
    class Strict(Letters):
        def apply_chat_template(self, conversation, *, add_generation_prompt, tokenize):
            raise RuntimeError("System role not supported")

        def encode(self, text, *, add_special_tokens=True):
            raise TypeError("TextEncodeInput must be Union[TextInputSequence]")

    chat = PromptRow(prompt_id="7", messages=({"role": "system", "content": "b"},))
    with pytest.raises(PromptTextError, match=r"prompt 7 .*System role") as refused:
        prompt_tokens(chat, Strict())
    assert refused.value.drop_as
    with pytest.raises(PromptTextError, match=r"prompt 8 .*TextEncodeInput"):
        prompt_tokens(PromptRow(prompt_id="8", prompt="\ud83d"), Strict())


MARK = {"type": "image"}
VIDEO = {"type": "video"}
WORDS = {"type": "text", "text": "?"}


@pytest.mark.parametrize(
    ("raw", "content"),
    [
        ({"prompt": "?", "images": ["1.png"]}, [MARK, WORDS]),
        ({"prompt": "?", "image": "1.png"}, [MARK, WORDS]),
        (
            {"messages": [{"role": "user", "content": [WORDS, {**MARK, "image": "1.png"}]}]},
            [WORDS, MARK],
        ),
        (
            {"messages": [{"role": "user", "content": [WORDS, MARK]}], "images": ["1.png"]},
            [WORDS, MARK],
        ),
    ],
)
def test_a_row_with_a_picture_has_a_mark_in_its_place_and_a_path(tmp_path, raw, content):
    (row,) = read_prompts(write(tmp_path / "data.jsonl", {**raw, "answer": "red"}))
    assert row == PromptRow(
        prompt_id="1",
        messages=({"role": "user", "content": content},),
        images=(str(tmp_path / "1.png"),),
        answer="red",
    )
    assert prompt_text(row) == "?"


@pytest.mark.parametrize(
    ("raw", "content"),
    [
        ({"prompt": "?", "videos": ["1.mp4"]}, [VIDEO, WORDS]),
        ({"prompt": "?", "video": "1.mp4"}, [VIDEO, WORDS]),
        (
            {"messages": [{"role": "user", "content": [WORDS, VIDEO]}], "videos": ["1.mp4"]},
            [WORDS, VIDEO],
        ),
        (
            {"messages": [{"role": "user", "content": [{**VIDEO, "video": "1.mp4"}, WORDS]}]},
            [VIDEO, WORDS],
        ),
    ],
)
def test_a_row_with_a_video_has_a_mark_in_its_place_and_a_reference(tmp_path, raw, content):
    (row,) = read_prompts(write(tmp_path / "data.jsonl", {**raw, "answer": "red"}))
    clip = video_reference("1.mp4", tmp_path, VideoSampling())
    assert row == PromptRow(
        prompt_id="1",
        messages=({"role": "user", "content": content},),
        images=(clip,),
        answer="red",
    )


def test_references_of_pictures_and_videos_are_in_the_order_of_the_marks(tmp_path):
    turn = {"role": "user", "content": [VIDEO, MARK, WORDS, VIDEO]}
    kept = video_reference("2.mp4", tmp_path, VideoSampling(fps=4.0, max_frames=8))
    videos = [{"path": "1.mp4", "fps": 1, "max_frames": 4}, kept]
    raw = {"messages": [turn], "images": ["1.png"], "videos": videos}
    (row,) = read_prompts(write(tmp_path / "data.jsonl", raw))
    first = video_reference("1.mp4", tmp_path, VideoSampling(fps=1.0, max_frames=4))
    assert row.images == (first, str(tmp_path / "1.png"), kept)
    assert row.messages == (turn,)
    assert not row.fields


def test_parts_without_pictures_are_one_text_for_any_template(tmp_path):
    turn = {"role": "user", "content": [{"type": "text", "text": "a"}, WORDS]}
    (row,) = read_prompts(write(tmp_path / "data.jsonl", {"messages": [turn], "images": []}))
    assert row == PromptRow(prompt_id="1", messages=({"role": "user", "content": "a?"},))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"prompt": "?", "images": 7}, ":1: field 'messages': a picture is a path.*found int"),
        ({"prompt": "?", "images": ["1.png"], "image": "2.png"}, ":1: has both 'images' and 'im"),
        ({"prompt": "?", "video": {"path": "1.mp4", "fps": 0}}, "field 'messages': .* at fps > 0"),
        ({"prompt": "?", "images": ["http://a/1.png"]}, ":1: field 'messages': .* network"),
        (
            {"messages": [{"role": "user", "content": [MARK]}]},
            ":1: field 'messages': message 0: has a picture without a source",
        ),
        ({"messages": [{"role": "user", "content": 7}]}, "turn 0: needs texts"),
    ],
)
def test_pictures_and_videos_that_are_named_wrongly_are_told_where(tmp_path, raw, words):
    with pytest.raises(PromptDataError, match=words):
        read_prompts(write(tmp_path / "data.jsonl", raw))


def test_a_mark_in_front_of_a_file_is_no_part_of_its_first_row(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [row.prompt for row in read_prompts(path)] == ["a", "b"]
    assert [row.prompt for row in PromptFile(path)] == ["a", "b"]


def test_a_line_that_is_not_utf8_is_told_where(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(PromptDataError, match=r"data\.jsonl:2: not UTF-8"):
        read_prompts(path)
