"""Pictures become what a model's own processor makes of them, row by row."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from capabilities import needs
from PIL import Image
from process_trees import run_tree
from seeing import (
    FAMILIES,
    TEXT_SIZES,
    can_cut_pictures,
    reader_of,
    seeing_environment,
    write_pictures,
    write_seeing_family,
    write_seeing_model,
)
from tiny_models import write_random
from transformers import AutoTokenizer

from cosmos_core.images import read_image
from cosmos_core.videos import VideoSampling, video_reference
from cosmos_parallel import (
    BLANK_PICTURE,
    ModelConfig,
    PackingError,
    ParallelConfig,
    PictureError,
    PictureReader,
    build_mesh,
    check_packable,
    load_causal_lm,
    runs_packed_rows,
)

PIXELS = Path(__file__).with_name("processor_pixels.py")
START, END, MARK = 3, 4, 5
GREY = 0.276  # the largest deviation that pixels are divided by
TEXT = "<|im_start|>user\na<|vision_start|><|image_pad|><|vision_end|>b" * 2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("seeing")
    write_seeing_model(directory)
    write_pictures(directory / "pictures")
    noise = np.random.default_rng(0).integers(0, 255, (77, 100, 3), dtype=np.uint8)
    Image.fromarray(noise).save(directory / "pictures" / "noise-100x77.png")
    return directory


@pytest.fixture(scope="module")
def reader(model_dir) -> PictureReader:
    return reader_of(model_dir)


def shown(model_dir: Path, name: str) -> str:
    return str(model_dir / "pictures" / f"{name}.png")


def padded(*rows: list[int]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def test_a_mark_becomes_as_many_tokens_as_its_picture_takes(model_dir, reader):
    images = [shown(model_dir, "red-28x28"), shown(model_dir, "blue-56x28")]
    assert reader.expand([START, MARK, END, 20, MARK], images) == [
        *(START, MARK, END, 20),
        *(MARK, MARK),
    ]
    # 77 rows of 100 are made 84 of 112
    assert reader.expand([MARK], [shown(model_dir, "noise-100x77")]) == [MARK] * 12
    assert reader.expand([20, 21], []) == [20, 21]


def test_marks_and_pictures_must_be_as_many(model_dir, reader):
    with pytest.raises(
        PictureError, match=r"data:3: its tokens have 2 marks '<\|image_pad\|>' for"
    ):
        reader.expand([MARK, MARK], [shown(model_dir, "red-28x28")], "data:3")
    with pytest.raises(PictureError, match=r"prompt: cannot read the picture .*none.png"):
        reader.expand([MARK], [shown(model_dir, "none")])


def test_a_row_lacks_tokens_of_its_pictures(model_dir, reader):
    images = [[shown(model_dir, "red-56x56")], [shown(model_dir, "blue-28x28")]]
    token_ids = padded([MARK] * 4, [MARK] * 2)
    with pytest.raises(PictureError, match=r"b: has 2 tokens of .* the 1 that it shows take 1"):
        reader.inputs(token_ids, images, ["a", "b"])
    with pytest.raises(PictureError, match="no row has a picture"):
        reader.inputs(token_ids, [[], []])


def test_a_broken_picture_is_named_with_its_row(model_dir, reader):
    whole = model_dir / "whole.jpg"
    Image.open(shown(model_dir, "noise-100x77")).save(whole)
    (model_dir / "broken.jpg").write_bytes(whole.read_bytes()[:2000])
    broken = str(model_dir / "broken.jpg")
    assert len(reader.expand([MARK], [broken])) == 12  # its header is whole
    with pytest.raises(PictureError, match=r"line 7: .*broken.jpg"):
        reader.inputs(padded([MARK] * 12), [[broken]], ["line 7"])


def test_a_model_without_sight_has_no_reader(tmp_path):
    transformers.Qwen3Config(vocab_size=8).save_pretrained(tmp_path)
    assert PictureReader.of(tmp_path) is None
    # one whose pictures are no tokens
    transformers.MllamaConfig().save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert PictureReader.of(tmp_path) is None


@needs("torchvision", can_cut_pictures())
def test_inputs_are_those_of_the_model_s_own_processor(model_dir, reader, tmp_path):
    pictures = [shown(model_dir, name) for name in ("green-56x28", "noise-100x77")]
    run_tree(
        *(PIXELS, model_dir, TEXT, tmp_path / "out.pt", *pictures),
        deadline_s=200,
        environment=seeing_environment(),
    )
    found = torch.load(tmp_path / "out.pt")
    theirs, mine = found["theirs"], found["mine"]
    assert found["kind"] == "Qwen2VLImageProcessor"
    assert mine.keys() == theirs.keys() - {"attention_mask"}
    for key, value in mine.items():
        assert torch.equal(value, theirs[key]), key
    # without torchvision pictures are resampled by Pillow
    tokens = AutoTokenizer.from_pretrained(model_dir).encode(TEXT)
    assert reader.expand(tokens, pictures) == theirs["input_ids"][0].tolist()
    ours = reader.inputs(theirs["input_ids"], [pictures])
    assert torch.equal(ours["image_grid_thw"], theirs["image_grid_thw"])
    levels = (ours["pixel_values"] - theirs["pixel_values"]).abs() * 255 * GREY
    as_it_is, made_larger = levels.split(ours["image_grid_thw"].prod(dim=1).tolist())
    assert as_it_is.max() < 0.01
    assert made_larger.max() < 3
    assert made_larger.mean() < 0.05


@pytest.mark.parametrize("kind", FAMILIES)
def test_samples_of_text_in_a_row_do_not_see_each_other(tmp_path, kind):
    write_seeing_family(tmp_path, kind)
    model = load_causal_lm(tmp_path, build_mesh(ParallelConfig()))
    first, second = torch.arange(1, 8)[None], torch.arange(20, 25)[None]
    row = torch.cat([first, second], dim=1)
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    with torch.no_grad():
        alone = model(input_ids=second).logits
        together = model(input_ids=row, position_ids=positions, use_cache=False).logits[:, 7:]
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_other_models_that_see_are_not_packed(tmp_path):
    config = transformers.Gemma3Config(
        text_config=dict(TEXT_SIZES),
        vision_config={"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1},
    )
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    model = load_causal_lm(tmp_path, build_mesh(ParallelConfig()))
    assert not runs_packed_rows(model)
    with pytest.raises(PackingError, match="gemma3 models see pictures"):
        check_packable(model)


@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_rows_with_pictures_have_the_logits_of_padded_ones(model_dir, tmp_path, kind):
    write_seeing_family(tmp_path, kind)
    reader = reader_of(tmp_path)
    images = [
        [shown(model_dir, "red-56x56"), shown(model_dir, "blue-28x28")],
        [],
        [BLANK_PICTURE],
        [shown(model_dir, "noise-100x77")],
    ]
    rows = [
        reader.expand([20, MARK, END, 30, MARK, 9, 31], images[0]),
        [40, 41, 42],
        reader.blank_row(),
        reader.expand([50, START, MARK, END, 51, 52], images[3]),
    ]
    model = load_causal_lm(tmp_path, build_mesh(ParallelConfig()), ModelConfig())
    token_ids = padded(*rows)
    valid = padded(*[[True] * len(row) for row in rows])
    inputs = reader.inputs(token_ids, images)
    positions = reader.positions(token_ids, inputs)
    packed = inputs | {
        "mm_token_type_ids": inputs["mm_token_type_ids"][valid][None],
        "position_ids": positions[:, valid][:, None],
    }
    with torch.no_grad():
        expected = model(input_ids=token_ids, **inputs).logits[valid]
        logits = model(input_ids=token_ids[valid][None], use_cache=False, **packed).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert runs_packed_rows(model)


EYE = {"image_size": 56, "patch_size": 14, "num_hidden_layers": 1, "num_attention_heads": 2}
OTHERS = {
    "llava": (
        lambda: transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**TEXT_SIZES),
            vision_config=transformers.CLIPVisionConfig(**EYE, hidden_size=32),
            image_token_index=MARK,
            vision_feature_layer=-1,
        ),
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56}}
        | {"crop_size": 56},
        {"patch_size": 14, "vision_feature_select_strategy": "default"}
        | {"num_additional_image_tokens": 1, "image_token": "<|image_pad|>"},
        [MARK] * 16,
    ),
    # a picture is many tokens between two others, which are no picture
    "gemma3": (
        lambda: transformers.Gemma3Config(
            text_config=transformers.Gemma3TextConfig(**TEXT_SIZES, pad_token_id=0),
            vision_config=transformers.SiglipVisionConfig(**EYE, hidden_size=32),
            mm_tokens_per_image=4,
            image_token_index=MARK,
            boi_token_index=START,
            eoi_token_index=END,
        ),
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}},
        {"image_seq_length": 4},
        None,
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_families_take_what_their_processors_give(model_dir, tmp_path, kind):
    make, pixels, settings, expansion = OTHERS[kind]
    spelt = {"image_token": "<|image_pad|>", "boi_token": "<|vision_start|>"}
    marks = spelt | {"eoi_token": "<|vision_end|>"}
    tokenizer = AutoTokenizer.from_pretrained(model_dir, extra_special_tokens=marks)
    tokenizer.save_pretrained(tmp_path)
    write_random(make(), tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(pixels))
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    reader = reader_of(tmp_path)
    picture = shown(model_dir, "noise-100x77")
    processor = transformers.AutoProcessor.from_pretrained(tmp_path)
    text = f"a{processor.image_token}b"
    theirs = processor(text=[text], images=[read_image(picture)], return_tensors="pt")
    token_ids = reader.expand(tokenizer.encode(text), [picture], "row")
    assert token_ids == theirs["input_ids"][0].tolist()
    assert expansion is None or token_ids[1:-1] == expansion
    video = video_reference("a.mp4", tmp_path, VideoSampling())
    with pytest.raises(PictureError, match=f"a.mp4: {kind} models are shown no videos"):
        reader.expand(token_ids, [video])
    rows = padded(token_ids, reader.blank_row())
    inputs = reader.inputs(rows, [[picture], [BLANK_PICTURE]])
    assert torch.equal(inputs["pixel_values"][:1], theirs["pixel_values"])
    if "token_type_ids" in inputs:
        length = len(token_ids)
        assert torch.equal(inputs["token_type_ids"][:1, :length], theirs["token_type_ids"])
    model = load_causal_lm(tmp_path, build_mesh(ParallelConfig()))
    with torch.no_grad():
        alone = model(**{name: value for name, value in theirs.items() if name != "attention_mask"})
        both = model(input_ids=rows, **inputs)
    mine = both.logits[:1, : len(token_ids)]
    torch.testing.assert_close(mine, alone.logits, rtol=0, atol=1e-5)
