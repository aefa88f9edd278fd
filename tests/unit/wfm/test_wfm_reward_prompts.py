"""What rewards that are models look for in a picture, as its prompt or its metadata says it."""

import pytest

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
