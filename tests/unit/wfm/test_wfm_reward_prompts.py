"""What rewards that are models look for in a picture, as its prompt or its metadata says it."""

import pytest
import torch
import transformers

from cosmos_wfm import RewardRequestError
from cosmos_wfm.model_rewards.gen_eval import FoundObject, GenEval, chances_of, share_right
from cosmos_wfm.model_rewards.judge import mark_of
from cosmos_wfm.model_rewards.ocr import quoted


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ('a sign that says "OPEN"', "OPEN"),
        ("a sign that says 'OPEN'", "OPEN"),
        ("a sign that says “It's OK”", "It's OK"),
        ('A baker\'s shop with a sign that reads "Fresh Bread"', "Fresh Bread"),
        ("the dogs' house, a baker's, with a sign 'OPEN'", "OPEN"),
        ('a wall with "DON\'T STOP" in white', "DON'T STOP"),
        ("a wall with 'DON'T STOP' in white", "DON'T STOP"),
    ],
)
def test_what_is_in_quotation_marks_is_told_from_apostrophes(prompt, text):
    assert quoted(prompt) == text


GEN_EVAL_COLOURS = {  # all that its prompts ask for, as CSS has them
    "red": (255, 0, 0),
    "orange": (255, 165, 0),
    "yellow": (255, 255, 0),
    "green": (0, 128, 0),
    "blue": (0, 0, 255),
    "purple": (128, 0, 128),
    "pink": (255, 192, 203),
    "brown": (165, 42, 42),
    "black": (0, 0, 0),
    "white": (255, 255, 255),
}


def test_all_ten_colours_of_gen_eval_are_seen(tmp_path):
    config = transformers.YolosConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=[64, 64],
        patch_size=16,
        num_detection_tokens=5,
        num_labels=3,
    )
    torch.manual_seed(0)
    transformers.YolosForObjectDetection(config).save_pretrained(tmp_path)
    pictures = torch.tensor(list(GEN_EVAL_COLOURS.values()))[:, :, None, None] / 255
    found = GenEval(str(tmp_path), threshold=0.0).find(pictures.expand(-1, -1, 40, 40))

    for colour, objects in zip(GEN_EVAL_COLOURS, found, strict=True):
        assert {each.colour for each in objects} == {colour}


def test_all_classes_of_a_detector_without_one_for_no_object_are_seen(tmp_path):
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_indices=[2, 3, 4],
    )
    config = transformers.RTDetrConfig(
        backbone_config=backbone,
        encoder_in_channels=[8, 16, 16],
        encoder_hidden_dim=16,
        encoder_ffn_dim=16,
        encoder_attention_heads=2,
        decoder_in_channels=[16, 16, 16],
        decoder_ffn_dim=16,
        decoder_layers=1,
        decoder_attention_heads=2,
        d_model=16,
        num_queries=5,
        num_denoising=0,
        id2label={0: "cat", 1: "dog", 2: "car"},
    )
    torch.manual_seed(0)
    model = transformers.RTDetrForObjectDetection(config)
    last = model.model.decoder.class_embed[-1]
    with torch.no_grad():
        last.weight.zero_()
        last.bias.copy_(torch.tensor([-3.0, -3.0, 1.0]))  # 0.73 of the last class, in each place
    model.save_pretrained(tmp_path)

    (found,) = GenEval(str(tmp_path), threshold=0.7).find(torch.full((1, 3, 64, 64), 0.5))
    assert [each.name for each in found] == ["car"] * 5


def test_a_class_for_no_object_is_none():
    logits = torch.tensor([[[1.0, 2.0, 3.0]]])
    assert chances_of(logits, 3).tolist() == [[pytest.approx([0.7311, 0.8808, 0.9526], abs=1e-4)]]
    assert chances_of(logits, 2).tolist() == [[pytest.approx([0.0900, 0.2447], abs=1e-4)]]


def test_a_colour_that_cannot_be_told_is_refused():
    dog = FoundObject(name="dog", colour="black", x=0.2, y=0.5)
    with pytest.raises(RewardRequestError, match="'teal' is no colour that can be checked"):
        share_right([{"class": "dog", "color": "teal"}], [dog])


@pytest.mark.parametrize(
    ("answer", "mark"),
    [
        ("On a scale from 0 to 10, this is a 7.", 0.7),
        ("On a scale of 1\u201310: 9", 0.9),
        ("10", 1.0),
        ("0, as it is not 10", 0.0),
    ],
)
def test_a_judge_that_says_the_scale_gives_the_mark_behind_it(answer, mark):
    assert mark_of(answer) == mark
