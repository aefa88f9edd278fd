"""Directories of videos: both layouts, and what is wrong with one."""

import json
import struct
from dataclasses import replace
from fractions import Fraction

import av
import numpy as np
import pytest
import torch

from cosmos_wfm import (
    CaptionDataError,
    DdrlConfig,
    DiffusionRl,
    DiffusionRlConfig,
    DiffusionSftConfig,
    FlowGrpoConfig,
    LoraTuning,
    SamplerConfig,
    SdeConfig,
    VideoCaptionsConfig,
    WfmConfigError,
    train_sft,
    write_video,
)
from cosmos_wfm.videos import read_frames, resampled


def clip(level, frames=5, size=32):
    """A flat video that gets brighter from frame to frame."""
    levels = torch.linspace(level, level + 0.4, frames)
    return levels.view(1, -1, 1, 1).expand(3, frames, size, size)


@pytest.fixture(params=["pairs", "cosmos"])
def videos(request, tmp_path):
    root = tmp_path / "data"
    folder = root / "videos" if request.param == "cosmos" else root
    folder.mkdir(parents=True)
    for name, level in (("0001", -0.5), ("0002", 0.0)):
        write_video(folder / f"{name}.mp4", clip(level))
        if request.param == "cosmos":
            (root / "metas").mkdir(exist_ok=True)
            (root / "metas" / f"{name}.txt").write_text(f"prompt {name}\n")
        else:
            (root / f"{name}.json").write_text(json.dumps({"prompt": f"prompt {name}"}))
    return VideoCaptionsConfig(path=str(root), frames=5, height=32, width=32)


def test_both_layouts_give_prompts_and_frames_in_order(videos):
    data = videos.build()

    assert [sample.prompt for sample in data] == ["prompt 0001", "prompt 0002"]
    pixels = data[0].pixels
    assert pixels.shape == (3, 5, 32, 32)
    means = pixels.mean(dim=(0, 2, 3)).tolist()
    assert means == pytest.approx([-0.5, -0.4, -0.3, -0.2, -0.1], abs=0.03)
    assert replace(videos, frames=2, height=16).build()[1].pixels.shape == (3, 2, 16, 32)


def test_a_broken_video_is_named_and_fatal_or_counted_and_skipped(videos, tmp_path):
    folder = next((tmp_path / "data").rglob("0001.mp4")).parent
    (folder / "0003.mp4").write_bytes(b"no video")
    write_video(folder / "0004.mp4", clip(0.0, frames=3))
    caption = next((tmp_path / "data").rglob("0001.[tj]*"))
    for name in ("0003", "0004", "0005"):
        (caption.parent / f"{name}{caption.suffix}").write_bytes(caption.read_bytes())

    with pytest.raises(
        CaptionDataError, match=r"3 broken pairs: 0003: 0003\.mp4 cannot be decoded"
    ):
        videos.build()
    data = replace(videos, broken="skip").build()

    assert len(data) == 2
    assert [problem[:4] for problem in data.problems] == ["0003", "0004", "0005"]
    assert "0004.mp4 has 3 frames; 5 are needed" in data.problems[1]
    assert "there is no" in data.problems[2]


@pytest.mark.parametrize(
    ("matrix", "size", "black"),
    [
        ((0, 1, -1, 0), (16, 32), (slice(0, 12), slice(None))),  # on its side: a quarter clockwise
        ((-1, 0, 0, -1), (32, 16), (slice(None), slice(20, None))),
        ((0, -1, 1, 0), (16, 32), (slice(20, None), slice(None))),
    ],
)
def test_a_video_whose_camera_was_turned_is_read_upright(tmp_path, matrix, size, black):
    pixels = torch.ones(3, 2, 16, 32)
    pixels[..., :16] = -1.0  # the left half
    write_video(tmp_path / "a.mp4", pixels)
    data = (tmp_path / "a.mp4").read_bytes()
    fixed = [value << 16 for value in (1, 0, 0, 1, *matrix)]
    plain, turned = (
        struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) for a, b, c, d in (fixed[:4], fixed[4:])
    )
    place = data.index(plain, data.index(b"tkhd"))  # the track's matrix, not the film's
    (tmp_path / "a.mp4").write_bytes(data[:place] + turned + data[place + len(plain) :])

    [frame, _] = read_frames(tmp_path / "a.mp4", 2, name="a")

    assert frame.size == size
    shown = np.asarray(frame).mean(2)
    assert shown[black].max() < 60
    assert (shown > 190).mean() > 0.3


def test_pixels_that_are_wider_than_high_are_shown_so(tmp_path):
    with av.open(str(tmp_path / "a.mp4"), mode="w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        stream.codec_context.sample_aspect_ratio = Fraction(4, 3)
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 48, 3), np.uint8), format="rgb24")
        container.mux([*stream.encode(frame), *stream.encode()])

    [found] = read_frames(tmp_path / "a.mp4", 1, name="a")

    assert found.size == (64, 32)


def test_a_video_is_taken_at_the_frames_a_second_that_are_asked_for(tmp_path):
    shades = torch.linspace(-1.0, 1.0, 61).view(1, -1, 1, 1).expand(3, 61, 32, 32)
    write_video(tmp_path / "a.mp4", shades, fps=60)  # one second
    (tmp_path / "a.json").write_text('{"prompt": "p"}')
    config = VideoCaptionsConfig(path=str(tmp_path), frames=13, fps=12, height=32, width=32)

    [sample] = config.build()

    wanted = torch.linspace(-1.0, 1.0, 13)  # every fifth
    assert sample.pixels.mean(dim=(0, 2, 3)).tolist() == pytest.approx(wanted.tolist(), abs=0.05)
    with pytest.raises(CaptionDataError, match=r"a\.mp4 has 13 frames at 12 a second; 17 are"):
        replace(config, frames=17).build()
    assert replace(config, frames=61, fps=60).build()[0].pixels.shape[1] == 61


def test_moments_take_the_frame_nearest_in_time_though_times_are_rounded():
    # 30 a second in milliseconds; 0.0667 is nearer to the third frame than to the second.
    times = [0.0, 0.033, 0.067, 0.1, 0.133, 0.167]
    assert list(resampled(((t, n) for n, t in enumerate(times)), 15)) == [0, 2, 4]
    # slower, and not from 0 on, and of varying rate
    assert list(resampled([(1.0, "a"), (1.5, "b"), (1.75, "c")], 4)) == ["a", "b", "b", "c"]
    with pytest.raises(ValueError, match="a frame has no time"):
        list(resampled([(None, "a")], 4))


@pytest.mark.parametrize("videos", ["pairs"], indirect=True)
def test_names_in_capitals_are_taken_and_hidden_files_left_alone(videos, tmp_path):
    folder = tmp_path / "data"
    (folder / "0001.mp4").rename(folder / "0001.MP4")
    (folder / "0002.mp4").rename(folder / "0002.MOV")
    (folder / "._0001.json").write_bytes(b"\0\5\x16\7\0\2")
    (folder / "._0001.MP4").write_bytes(b"\0\5\x16\7\0\2")
    (folder / ".DS_Store").write_bytes(b"\0")

    data = videos.build()

    assert [sample.prompt for sample in data] == ["prompt 0001", "prompt 0002"]
    assert len(data.problems) == 0


def test_folders_of_both_layouts_are_descended_into(videos, tmp_path):
    for path in sorted((tmp_path / "data").rglob("0002.*")):
        folder = path.parent / "day 2" / "b.c"
        folder.mkdir(parents=True, exist_ok=True)
        path.rename(folder / path.name)

    data = videos.build()

    assert [sample.prompt for sample in data] == ["prompt 0001", "prompt 0002"]
    next((tmp_path / "data").rglob("0002.[tj]*")).unlink()
    with pytest.raises(CaptionDataError, match=r"day 2/b\.c/0002: there is no b\.c/0002\."):
        videos.build()


def test_a_caption_that_is_no_text_is_named(videos, tmp_path):
    caption = next((tmp_path / "data").rglob("0001.[tj]*"))
    caption.write_bytes(b'{"prompt": null}' if caption.suffix == ".json" else b"Schlo\xdf")

    with pytest.raises(CaptionDataError, match=r"0001: 0001\.\w+: (prompt is NoneType|no prompt)"):
        videos.build()


def test_a_video_that_is_too_small_is_named_and_fatal_or_skipped(videos, tmp_path):
    folder = next((tmp_path / "data").rglob("0001.mp4")).parent
    write_video(folder / "0001.mp4", clip(0.0, size=16))
    exact = replace(videos, max_enlargement=1.0)

    with pytest.raises(CaptionDataError, match=r"0001\.mp4 is 16x16 pixels; for 32x32 .* 2 times"):
        exact.build()[0]
    data = replace(exact, broken="skip").build()
    assert (data[0].prompt, len(data.problems)) == ("prompt 0002", 1)


def test_a_directory_without_videos_is_refused(tmp_path):
    with pytest.raises(CaptionDataError, match="has no usable video"):
        VideoCaptionsConfig(path=str(tmp_path)).build()
    with pytest.raises(CaptionDataError, match="is not a directory"):
        VideoCaptionsConfig(path=str(tmp_path / "absent")).build()


def test_a_video_model_is_tuned_on_videos(videos, model_dirs, family, tmp_path):
    recipe = DiffusionSftConfig(
        model=str(model_dirs(family)),
        data=videos,
        output=str(tmp_path / "out"),
        num_steps=1,
        batch_size=2,
        micro_batch_size=2,
        caption_dropout=0.5,
        tuning=LoraTuning(rank=2, alpha=4),
    )
    if family in {"sd3", "sana"}:
        with pytest.raises(WfmConfigError, match="5 frames, but this is a model of images"):
            train_sft(recipe)
        return
    reports = []

    directory = train_sft(recipe, on_step=lambda step, report, figures: reports.append(report))

    assert reports[0].outcome == "updated"
    assert (directory / "lora" / "model.safetensors").is_file()
    with pytest.raises(WfmConfigError, match="multiple of 4"):
        train_sft(replace(recipe, data=replace(videos, frames=4)))
    with pytest.raises(WfmConfigError, match="-3 frames; there must be 1 or more"):
        train_sft(replace(recipe, data=replace(videos, frames=-3)))


def test_a_model_of_images_is_tuned_on_the_first_frames(videos, model_dirs, tmp_path):
    first = replace(videos, frames=1)
    losses = []
    train_sft(
        DiffusionSftConfig(
            model=str(model_dirs("sd3")), data=first, output=str(tmp_path), num_steps=1
        ),
        on_step=lambda step, report, figures: losses.append(report.loss),
    )

    assert first.build()[0].pixels.shape == (3, 32, 32)  # as a picture
    assert first.build()[0].pixels.mean() == pytest.approx(-0.5, abs=0.03)
    assert len(losses) == 1


def test_ddrl_of_a_video_model_stays_close_to_videos(videos, model_dirs, tmp_path):
    (tmp_path / "prompts.txt").write_text("prompt 0001\n")
    recipe = DiffusionRlConfig(
        model=str(model_dirs("cosmos")),
        prompts=str(tmp_path / "prompts.txt"),
        output=str(tmp_path / "out"),
        rewards={"motion": 1.0},
        groups_per_step=1,
        samples_per_group=2,
        sampler=SamplerConfig(num_steps=2, height=32, width=32, frames=5),
        algorithm=DdrlConfig(data_weight=0.5, policy=FlowGrpoConfig(sde=SdeConfig(num_noisy=1))),
        data=videos,
        tuning=LoraTuning(rank=2, alpha=4),
    )
    report, _ = DiffusionRl(recipe).step(0)

    # Advantages sum to 0 and ratios are 1: what is left is the data's share.
    assert report.loss == pytest.approx(0.5 * report.mean("data_loss", over="samples"), abs=1e-4)
    assert report.loss > 0.1
