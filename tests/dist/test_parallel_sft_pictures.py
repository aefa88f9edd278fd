"""Supervised rows with pictures: what is read, what is trained on, and what a batch holds."""

import dataclasses
import json
import threading
from pathlib import Path

import datasets
import pytest
import torch
from PIL import Image
from seeing import reader_of, write_pictures, write_seeing_model
from transformers import AutoModelForImageTextToText, AutoTokenizer

from cosmos_core.images import read_image
from cosmos_parallel import (
    ParallelConfig,
    PictureReader,
    SftBatchConfig,
    SftDataError,
    SftExample,
    SftFormat,
    build_mesh,
    empty_batch,
    lay_out,
    load_causal_lm,
    load_sft_data,
    sft_loss,
    step_batches,
    store_sft_data,
    stored_sft_data,
)

RED, WIDE, BIG = "red-28x28.png", "blue-56x28.png", "green-56x56.png"
VOID = "<|vision_start|>{}<|vision_end|>"
PAD = "<|image_pad|>"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("seeing")
    write_seeing_model(directory)
    write_pictures(directory / "data")
    return directory


@pytest.fixture(scope="module")
def reader(model_dir) -> PictureReader:
    return reader_of(model_dir)


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return AutoTokenizer.from_pretrained(model_dir)


def written(model_dir: Path, *rows: dict) -> Path:
    path = model_dir / "data" / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def marked_spelling(tokenizer, example: SftExample) -> str:
    """Return the text of an example, what is trained on in brackets."""
    spelt, inside = "", False
    for token, trained in zip(example.token_ids, example.trainable, strict=True):
        if trained != inside:
            spelt += "]" if inside else "["
        spelt, inside = spelt + tokenizer.decode([int(token)]), bool(trained)
    return spelt + ("]" if inside else "")


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


ANSWERED = "<|im_start|>assistant\n[{}<|im_end|>\n]"


def test_every_way_to_name_a_picture_gives_the_tokens_it_takes(model_dir, reader, tokenizer):
    show, ask = {"type": "image"}, {"type": "text", "text": "hue?"}
    answer = {"role": "assistant", "content": "red"}
    path = written(
        model_dir,
        {"messages": [{"role": "user", "content": [show | {"image": WIDE}, ask]}, answer]},
        {"messages": [{"role": "user", "content": [ask, show]}, answer], "images": [WIDE]},
        {"messages": [{"role": "user", "content": "hue?"}, answer], "images": [RED, WIDE]},
        {"prompt": "hue?", "response": "red", "images": WIDE},
        {"prompt": "hue?", "response": "red", "image": WIDE},
        {"prompt": "hue?", "response": "red"},
    )
    data = load_sft_data(path, tokenizer, reader=reader)
    wide = VOID.format(PAD * 2)
    spelt = [marked_spelling(tokenizer, example) for example in data.examples]
    assert spelt[0] == turn("user", wide + "hue?") + ANSWERED.format("red")
    assert spelt[1] == turn("user", "hue?" + wide) + ANSWERED.format("red")
    assert spelt[2] == turn("user", VOID.format(PAD) + wide + "hue?") + ANSWERED.format("red")
    assert spelt[3] == spelt[4] == spelt[0]
    assert spelt[5] == "hue?[red<|im_end|>]"
    images = [[Path(image).name for image in example.images] for example in data.examples]
    assert images == [[WIDE], [WIDE], [RED, WIDE], [WIDE], [WIDE], []]

    store_sft_data(model_dir.parent / "store", path, model_dir, SftFormat())
    stored = stored_sft_data(model_dir.parent / "store", path, model_dir, SftFormat())
    assert stored is not None
    assert [marked_spelling(tokenizer, example) for example in stored.examples] == spelt
    for one, other in zip(stored.examples, data.examples, strict=True):
        assert (one.images, one.name if one.images else "") == (other.images, one.name)


def test_every_answer_of_a_conversation_is_trained_on_and_no_picture(model_dir, reader, tokenizer):
    said = [
        {"role": "user", "content": [{"type": "image", "image": WIDE}]},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "draw"},
        {"role": "assistant", "content": [{"type": "image", "image": RED}, {"text": "b"}]},
    ]
    path = written(model_dir, {"chat": said, "pictures": None})
    rows = SftFormat(messages="chat", images="pictures")
    (example,) = load_sft_data(path, tokenizer, rows, reader).examples
    assert marked_spelling(tokenizer, example) == (
        turn("user", VOID.format(PAD * 2))
        + ANSWERED.format("a")
        + turn("user", "draw")
        + "<|im_start|>assistant\n[<|vision_start|>]<|image_pad|>[<|vision_end|>b<|im_end|>\n]"
    )


def test_a_template_that_marks_answers_is_followed_past_pictures(model_dir, reader, tokenizer):
    marking = AutoTokenizer.from_pretrained(model_dir)
    marking.chat_template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}"
        "{{ message.content }}{% endgeneration %}{% else %}{% for part in message.content %}"
        "{{ '<|image_pad|>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
        "{% endfor %}"
    )
    said = [
        {"role": "user", "content": [{"type": "image", "image": BIG}, {"text": "x"}]},
        {"role": "assistant", "content": "yz"},
    ]
    path = written(model_dir, {"messages": said})
    (example,) = load_sft_data(path, marking, reader=reader).examples
    assert marked_spelling(tokenizer, example) == PAD * 4 + "x[yz]"


def test_a_saved_data_set_keeps_its_pictures_as_they_are_stored(model_dir, reader, tokenizer):
    picture = Image.new("RGB", (28, 56), (200, 0, 0))
    features = datasets.Features(
        prompt=datasets.Value("string"),
        response=datasets.Value("string"),
        images=datasets.List(datasets.Image()),
    )
    rows = [{"prompt": "hue?", "response": "red", "images": [picture]}]
    saved = datasets.Dataset.from_list(rows, features=features)
    saved.save_to_disk(str(model_dir / "saved"))
    saved.to_parquet(str(model_dir / "rows.parquet"))
    for path in (model_dir / "saved", model_dir / "rows.parquet"):
        (example,) = load_sft_data(path, tokenizer, reader=reader).examples
        assert sum(example.token_ids == reader.mark_id) == 2
        assert read_image(example.images[0]).getpixel((3, 3)) == (200, 0, 0)


def test_rows_with_wrong_pictures_are_named(model_dir, reader, tokenizer):
    def load(row: dict, **arguments) -> None:
        load_sft_data(written(model_dir, row), tokenizer, **arguments)

    row = {"prompt": "a", "response": "b", "images": ["none.png"]}
    with pytest.raises(SftDataError, match=r"rows.jsonl:1: cannot read the picture .*/none.png"):
        load(row, reader=reader)
    with pytest.raises(SftDataError, match=r"jsonl:1: has 1 pictures or videos, and the model"):
        load(row)
    with pytest.raises(SftDataError, match=r"rows.jsonl:1: has both 'images' and 'image'"):
        load(row | {"image": WIDE}, reader=reader)
    row = {"prompt": f"a{PAD}", "response": "b", "images": [RED]}
    with pytest.raises(SftDataError, match=r"rows.jsonl:1: its tokens have 2 marks"):
        load(row, reader=reader)
    row = {"prompt": "a", "response": "b", "images": [7]}
    with pytest.raises(SftDataError, match=r"rows.jsonl:1: 'images': a picture is a path"):
        load(row, reader=reader)
    said = [{"role": "user", "content": [{"type": "audio"}]}, {"role": "assistant", "content": "b"}]
    with pytest.raises(SftDataError, match=r"field 'messages': message 0, part 0: type 'audio'"):
        load({"messages": said}, reader=reader)


def test_a_picture_that_breaks_after_loading_is_named_by_its_row(model_dir, reader, tokenizer):
    picture = model_dir / "data" / "gone.png"
    picture.write_bytes((model_dir / "data" / RED).read_bytes())
    path = written(model_dir, {"prompt": "a", "response": "b", "images": ["gone.png"]})
    data = load_sft_data(path, tokenizer, reader=reader)
    picture.unlink()
    with pytest.raises(SftDataError, match=r"rows.jsonl:1: cannot read the picture .*gone.png"):
        lay_out(data.examples, SftBatchConfig(), reader=reader)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_next_step_s_pictures_are_read_meanwhile(model_dir, tokenizer, layout):
    reader = reader_of(model_dir)
    names = ["next-0.png", "next-1.png"]
    for name, source in zip(names, (WIDE, BIG), strict=True):
        (model_dir / "data" / name).write_bytes((model_dir / "data" / source).read_bytes())
    rows = [{"prompt": name, "response": "b", "images": [name]} for name in names]
    data = load_sft_data(written(model_dir, *rows), tokenizer, reader=reader)
    config = SftBatchConfig(batch_size=1, layout=layout)
    expected = [step_batches(data, config, step) for step in range(2)]
    data = dataclasses.replace(data, reader=reader_of(model_dir))
    found = [step_batches(data, config, 0)]
    for thread in [each for each in threading.enumerate() if each.name == "pictures"]:
        thread.join(30)
    for name in names:
        (model_dir / "data" / name).unlink()
    found.append(step_batches(data, config, 1))
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one.image_inputs.keys() == other.image_inputs.keys()
            for key, value in other.image_inputs.items():
                assert torch.equal(one.image_inputs[key], value)
    # one that is not there is named when its step comes
    data = dataclasses.replace(data, reader=reader_of(model_dir))
    with pytest.raises(SftDataError, match=r"rows.jsonl:[12]: cannot read the picture .*next-"):
        step_batches(data, config, 1)


@pytest.fixture(scope="module")
def examples(model_dir, reader, tokenizer) -> tuple[SftExample, ...]:
    path = written(
        model_dir,
        {"prompt": "hue?", "response": "blue", "images": [WIDE, RED]},
        {"prompt": "and one without?", "response": "none"},
        {"prompt": "size?", "response": "big", "images": [BIG]},
        {"prompt": "text", "response": "more of it"},
    )
    return load_sft_data(path, tokenizer, reader=reader).examples


def test_the_loss_is_that_of_each_row_alone_in_every_layout(model_dir, reader, examples):
    theirs = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32)
    total = torch.zeros(())
    for example in examples:
        token_ids = torch.tensor(example.token_ids)[None].long()
        inputs = reader.inputs(token_ids, [example.images]) if example.images else {}
        losses = torch.nn.functional.cross_entropy(
            theirs(input_ids=token_ids, **inputs).logits[0, :-1],
            token_ids[0, 1:],
            reduction="none",
        )
        total += losses[torch.tensor(example.trainable)[1:]].sum().detach()
    model = load_causal_lm(model_dir, build_mesh(ParallelConfig()))
    for config in (
        SftBatchConfig(),
        SftBatchConfig(max_tokens=60, bucket=1),
        SftBatchConfig(layout="packed"),
        SftBatchConfig(layout="packed", max_tokens=60, bucket=1),
    ):
        batches = lay_out(examples, config, reader=reader)
        found = [sft_loss(model, batch) for batch in batches]
        assert sum(float(each.total.detach()) for each in found) == pytest.approx(
            float(total), rel=1e-5
        )
        assert sum(int(each.weight) for each in found) == sum(e.trainable.sum() for e in examples)
        assert sum(b.num_tokens for b in batches) == sum(len(e.token_ids) for e in examples)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_batch_of_text_reaches_what_sees_with_gradients_of_zero(
    model_dir, reader, examples, layout
):
    (batch,) = lay_out([examples[1]], SftBatchConfig(layout=layout), reader=reader)
    for each, is_empty in ((batch, False), (empty_batch(reader), True)):
        model = load_causal_lm(model_dir, build_mesh(ParallelConfig()))
        loss = sft_loss(model, each)
        loss.total.backward()
        assert (int(loss.weight) == 0) is is_empty
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            if is_empty or ".visual." in name:
                assert not parameter.grad.any(), name
    assert batch.num_tokens == len(examples[1].token_ids)
    assert len(batch.token_ids) == 1  # no row of its own for what is only shown
