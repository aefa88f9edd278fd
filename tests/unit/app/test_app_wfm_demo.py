"""The demonstration of world models, small: its parts, and all of it with a handful of steps."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")

from cosmos_app.wfm.demo.accuracy import colour_accuracy
from cosmos_app.wfm.demo.running import DemoSize, free_directory, run_demo
from cosmos_app.wfm.demo.shapes import NAMES, SHAPES, draw, prompts_of, write_shapes
from cosmos_wfm import ImageCaptionsConfig

_CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "wfm"


def test_shapes_have_the_colour_they_are_drawn_in():
    generator = np.random.default_rng(0)
    rows = []
    for colour in NAMES:
        pictures = [np.asarray(draw(s, colour, generator)) for s in SHAPES for _ in range(5)]
        rows.append(np.stack(pictures) / 127.5 - 1.0)
    pixels = torch.from_numpy(np.stack(rows)).float().permute(0, 1, 4, 2, 3)

    assert colour_accuracy(pixels, [f"a {name} shape" for name in NAMES]) == 1.0
    others = [f"a {name} shape" for name in (*NAMES[1:], NAMES[0])]
    assert colour_accuracy(pixels, others) == 0.0


def test_half_of_the_captions_are_wrong(tmp_path):
    write_shapes(tmp_path / "pairs", num_each=25, share_right=0.5, seed=0)
    data = ImageCaptionsConfig(path=str(tmp_path / "pairs"), height=16, width=16).build()
    right = [colour_accuracy(pixels[None, None], [prompt]) for prompt, pixels in data]

    assert len(data) == 25 * len(NAMES) * len(SHAPES)
    assert sum(right) / len(right) == pytest.approx(0.5, abs=0.09)  # three deviations of 300
    assert {prompt for prompt, _ in data} == set(prompts_of(SHAPES))


@pytest.mark.slow
def test_the_whole_demonstration_goes_through_with_a_few_steps(tmp_path, capsys):
    recipes = []
    for name, steps in (("tiny_shapes_sft", 600), ("tiny_shapes_nft", 40)):
        text = (_CONFIGS / f"{name}.toml").read_text()
        assert f"\nnum_steps = {steps}\n" in text
        recipes.append(tmp_path / f"{name}.toml")
        recipes[-1].write_text(text.replace(f"num_steps = {steps}\n", "num_steps = 1\n"))
    size = DemoSize(pictures_each=2, autoencoder_steps=2)

    assert run_demo(*recipes, tmp_path / "demo", seed=0, size=size) == 0

    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert report["gain"] == pytest.approx(report["after"] - report["before"])
    shown = capsys.readouterr().out.splitlines()
    for line, name in zip(shown[-2:], ("before", "after"), strict=True):
        assert line == str(tmp_path / "demo" / f"{name}.png")
        assert Path(line).read_bytes().startswith(b"\x89PNG")
    assert free_directory(tmp_path / "demo") == tmp_path / "demo-2"
