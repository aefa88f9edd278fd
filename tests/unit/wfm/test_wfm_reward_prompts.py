"""What rewards that are models look for in a picture, as its prompt or its metadata says it."""

import pytest
import torch
import transformers

from cosmos_wfm import RewardRequestError
from cosmos_wfm.model_rewards.gen_eval import FoundObject, GenEval, share_right
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


def test_a_colour_that_cannot_be_told_is_refused():
    dog = FoundObject(name="dog", colour="black", x=0.2, y=0.5)
    with pytest.raises(RewardRequestError, match="'teal' is no colour that can be checked"):
        share_right([{"class": "dog", "color": "teal"}], [dog])
