"""Built-in rewards on pictures whose score is plain."""

import pytest
import torch

from cosmos_wfm import REWARDS, WfmConfigError, weighted_reward


def flat(colour, frames=1):
    return torch.tensor(colour).view(3, 1, 1, 1).expand(3, frames, 16, 16).clone()


def checkers():
    grid = (torch.arange(16)[:, None] + torch.arange(16)) % 2
    return grid.float().expand(3, 1, 16, 16).clone()


def test_brightness_is_the_mean():
    assert REWARDS["brightness"](flat((0.2, 0.4, 0.6)), "") == pytest.approx(0.4)


def test_a_flat_picture_is_smaller_as_jpeg_and_less_sharp_than_noise():
    noise = torch.rand(3, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    plain = flat((0.5, 0.5, 0.5))

    assert REWARDS["compressibility"](plain, "") > REWARDS["compressibility"](noise, "")
    assert REWARDS["incompressibility"](noise, "") == -REWARDS["compressibility"](noise, "")
    assert REWARDS["sharpness"](plain, "") == pytest.approx(0.0, abs=1e-10)
    # |4 · 1 - 4 · 0| everywhere.
    assert REWARDS["sharpness"](checkers(), "") == pytest.approx(16.0)


def test_even_motion_moves_and_does_not_flicker():
    even = torch.stack([flat((v, v, v))[:, 0] for v in (0.0, 0.1, 0.2)], dim=1)
    blinking = torch.stack([flat((v, v, v))[:, 0] for v in (0.0, 0.1, 0.0)], dim=1)

    assert REWARDS["motion"](even, "") == pytest.approx(0.1)
    assert REWARDS["flicker"](even, "") == pytest.approx(0.0, abs=1e-7)
    assert REWARDS["flicker"](blinking, "") == pytest.approx(-0.2)
    assert REWARDS["motion"](flat((1.0, 0.0, 0.0)), "") == 0.0


def test_the_prompts_colour_is_looked_for_in_the_middle():
    picture = flat((0.5, 0.5, 0.5))
    picture[:, :, 4:12, 4:12] = torch.tensor([0.86, 0.12, 0.12]).view(3, 1, 1, 1)

    assert REWARDS["prompt_colour"](picture, "a Red square") > 0.9
    assert REWARDS["prompt_colour"](picture, "a blue square") < 0.05
    with pytest.raises(WfmConfigError, match="names none of red"):
        REWARDS["prompt_colour"](picture, "a square")


def test_rewards_are_weighed_and_pixels_come_from_minus_one_to_one():
    score = weighted_reward({"brightness": 2.0, "motion": 1.0})
    pixels = torch.stack([torch.zeros(3, 8, 8), torch.full((3, 8, 8), 3.0)])

    assert score(pixels, ["a", "b"]) == pytest.approx([1.0, 2.0])
    with pytest.raises(WfmConfigError, match="shine is no reward; there are brightness"):
        weighted_reward({"shine": 1.0})
    with pytest.raises(WfmConfigError, match="nothing is no reward"):
        weighted_reward({})
