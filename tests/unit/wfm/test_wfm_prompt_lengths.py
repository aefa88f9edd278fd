"""Prompts that are longer than a text encoder is given, as runs and forecasts say it."""

import io
import json
import logging
import tarfile

import pytest
import torch
from PIL import Image

from cosmos_wfm import (
    DiffusionRl,
    DiffusionRlConfig,
    DiffusionSftConfig,
    ImageCaptionsConfig,
    LoraTuning,
    SamplerConfig,
    ShardCaptionsConfig,
    forecast_run,
    load_outline,
    train_sft,
)
from cosmos_wfm.prompt_lengths import evenly_spaced

LONG = "red square " * 400


def same_text(adapter, first, second):
    rows = [adapter.encode_text([prompt]) for prompt in (first, second)]
    return all(torch.equal(rows[0][name], value) for name, value in rows[1].items())


def ending(num, last):
    return "q" + " q" * (num - 2) + f" {last}"


def test_what_counts_as_too_long_is_what_the_pipeline_cuts(family, family_adapter, model_dirs):
    adapter, most = family_adapter, family_adapter.max_prompt_tokens
    words = next(n for n in range(2, 3 * most) if adapter.prompt_tokens([ending(n, "q")])[0] > most)
    assert adapter.prompt_tokens([ending(words - 1, "q")])[0] <= most
    beyond = words + (6 if family == "cosmos" else 0)  # what ends its chat is cut first

    assert not same_text(adapter, ending(words - 1, "q"), ending(words - 1, "z"))
    assert same_text(adapter, ending(beyond, "q"), ending(beyond, "z"))
    prompts = ["a red square", LONG]
    assert load_outline(model_dirs(family)).prompt_tokens(prompts) == adapter.prompt_tokens(prompts)


@pytest.fixture
def sft(model_dirs, tmp_path):
    for number in range(3):
        Image.new("RGB", (32, 32)).save(tmp_path / f"{number}.png")
        prompt = LONG if number else "a red square"
        (tmp_path / f"{number}.json").write_text(json.dumps({"prompt": prompt}))
    return DiffusionSftConfig(
        model=str(model_dirs("sana")),
        data=ImageCaptionsConfig(path=str(tmp_path), height=32, width=32),
        output=str(tmp_path / "out"),
        num_steps=2,
        batch_size=3,
        tuning=LoraTuning(rank=2, alpha=4),
    )


def test_a_run_says_once_how_many_captions_are_cut_and_a_forecast_too(sft, caplog):
    [said] = forecast_run(sft).cut
    with caplog.at_level(logging.WARNING, "cosmos_wfm"):
        train_sft(sft)

    assert said.startswith(
        "2 of 3 captions are longer than the 300 tokens that the text encoder of"
    )
    assert [record.getMessage() for record in caplog.records] == [said]


def test_rl_says_it_of_its_prompts(model_dirs, tmp_path, caplog):
    (tmp_path / "prompts.txt").write_text(f"a red square\n{LONG}\n")
    recipe = DiffusionRlConfig(
        model=str(model_dirs("wan")),
        prompts=str(tmp_path / "prompts.txt"),
        output=str(tmp_path / "out"),
        rewards={"brightness": 1.0},
        groups_per_step=1,
        sampler=SamplerConfig(num_steps=1, height=32, width=32),
        tuning=LoraTuning(rank=2, alpha=4),
    )
    with caplog.at_level(logging.WARNING, "cosmos_wfm"):
        DiffusionRl(recipe)

    [said] = forecast_run(recipe).cut
    assert said.startswith("1 of 2 prompts are longer than the 512 tokens")
    assert caplog.messages == [said]


def test_captions_of_shards_are_read_without_their_pictures(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(3):
            for kind, data in (("png", b"no picture"), ("txt", f"text {number}".encode())):
                member = tarfile.TarInfo(f"{number}.{kind}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))

    data = ShardCaptionsConfig(path=str(tmp_path / "a.tar")).build()

    assert data.captions(10) == ["text 0", "text 1", "text 2"]
    assert data.captions(2) == ["text 0", "text 1"]


def test_of_many_some_are_looked_at_evenly_spaced():
    assert evenly_spaced(range(10), 4) == [0, 2, 5, 7]
    assert evenly_spaced(range(3), 4) == [0, 1, 2]
    assert evenly_spaced([], 4) == []
