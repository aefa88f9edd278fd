"""A sample as JSON: what a client of a reward service writes is read back as it was."""

import json
from dataclasses import asdict

import pytest

from cosmos_rollout import RewardInput, RewardRequestError, sample_from_json


def test_a_sample_is_read_back_as_it_was():
    sample = RewardInput(
        prompt="Which colour?",
        response="red \N{ROSE}",
        answer="red",
        fields={"level": 3, "tests": ["assert f(2) == 4"], "nothing": None, "share": 0.1},
        num_prompt_tokens=4,
        num_response_tokens=2,
        finish_reason="length",
        messages=({"role": "user", "content": [{"type": "image"}]}, {"role": "assistant"}),
        images=("1.png", "data:image/png;base64,AA=="),
    )
    assert sample_from_json(json.dumps(asdict(sample)).encode()) == sample


def test_what_has_a_default_may_be_left_out():
    body = b'{"prompt": "1+1=", "response": "2"}'
    assert sample_from_json(body) == RewardInput(prompt="1+1=", response="2")


def test_an_answer_that_is_no_text_is_left_to_the_reward():
    sample = sample_from_json(b'{"prompt": "", "response": "2", "answer": 2}')
    assert sample.answer == 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is no JSON: "),
        (b"\xff", "the body is no JSON: "),
        (b"[" * 100_000, "the body is no JSON: "),
        (b'["prompt"]', "the body is no JSON object"),
        (b'{"prompt": ""}', "the sample has no 'response'"),
        (
            b'{"prompt": "", "response": "", "shine": 1}',
            "'shine', which is not known here; there are answer, fields",
        ),
        (b'{"prompt": 1, "response": ""}', "prompt has to be a text"),
        (b'{"prompt": "", "response": null}', "response has to be a text"),
        (b'{"prompt": "", "response": "", "fields": []}', "fields has to be an object"),
        (b'{"prompt": "", "response": "", "messages": ["a"]}', "messages has to be a list of obj"),
        (b'{"prompt": "", "response": "", "images": "a.png"}', "images has to be a list of texts"),
        (
            b'{"prompt": "", "response": "", "num_response_tokens": true}',
            "num_response_tokens has to be a whole number",
        ),
    ],
)
def test_what_is_no_sample_is_refused_with_what_is_wrong(body: bytes, words: str):
    with pytest.raises(RewardRequestError) as refused:
        sample_from_json(body)
    assert words in str(refused.value)
