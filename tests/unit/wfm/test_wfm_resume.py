"""Runs that go on: the same losses, the same weights; and pictures drawn on the way."""

import shutil
import tarfile
from contextlib import contextmanager
from dataclasses import replace

import av
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from cosmos_parallel import AdamWConfig, EmaConfig, LearnerConfig
from cosmos_wfm import (
    DiffusionRl,
    DiffusionRlConfig,
    DiffusionSftConfig,
    FullTuning,
    ImageCaptionsConfig,
    LoraTuning,
    NftConfig,
    OldPolicyDecay,
    RunControl,
    SamplerConfig,
    ShardCaptionsConfig,
    TrainingStoppedError,
    UploadConfig,
    ValidationConfig,
    WfmConfigError,
    save_grid,
    take_rl_steps,
    train_rl,
    train_sft,
    write_samples,
)
from cosmos_wfm.validation import prompts_text

LEARNER = LearnerConfig(optimizer=AdamWConfig(lr=3e-3), ema=EmaConfig(decay=0.5))
FULL = "transformer/diffusion_pytorch_model.safetensors"
LORA = "lora/model.safetensors"


def opened(path):
    """Return a picture, with its file closed again."""
    with Image.open(path) as picture:
        return picture.copy()


class StoppedError(Exception):
    """A run that is cut off."""


@pytest.fixture
def sft(model_dirs, data_dir, tmp_path):
    return DiffusionSftConfig(
        model=str(model_dirs("sd3")),
        data=ImageCaptionsConfig(path=str(data_dir), height=16, width=16),
        output=str(tmp_path / "whole"),
        num_steps=5,
        batch_size=4,  # 6 pictures: steps 2 and 4 begin in the middle of an epoch
        micro_batch_size=2,
        tuning=FullTuning(),
        learner=LEARNER,
    )


@pytest.fixture
def rl(model_dirs, tmp_path):
    (tmp_path / "prompts.txt").write_text("a red square\na blue square\na green square\n")
    return DiffusionRlConfig(
        model=str(model_dirs("sd3")),
        prompts=str(tmp_path / "prompts.txt"),
        output=str(tmp_path / "whole"),
        rewards={"brightness": 1.0},
        num_steps=4,
        groups_per_step=2,
        samples_per_group=2,
        sampler=SamplerConfig(num_steps=2, height=16, width=16),
        tuning=LoraTuning(rank=2, alpha=4),
        algorithm=NftConfig(decay=OldPolicyDecay(rate=0.2)),
        learner=LEARNER,
    )


def losses_of(train, recipe, *, stop_after=None, resume=False):
    seen = {}

    def note(step, report, figures=None):
        seen[step] = (report.loss, (figures or {}).get("reward"))
        if step == stop_after:
            raise StoppedError

    try:
        train(recipe, resume=resume, on_step=note)
    except StoppedError:
        assert stop_after is not None
    return seen


def went_on(train, recipe, tmp_path, file, *, stop_after, first):
    """Compare a run with one that was cut off after a step and went on from its checkpoint."""
    whole = losses_of(train, recipe)
    cut = replace(recipe, output=str(tmp_path / "cut"), checkpoint_every=2)
    losses_of(train, cut, stop_after=stop_after)
    with pytest.raises(WfmConfigError, match="checkpoints of a run, the newest of step 2"):
        train(cut)
    rest = losses_of(train, cut, resume=True)
    for resume in (False, True):  # of one without checkpoints
        with pytest.raises(WfmConfigError, match=r"has what a run saved \(step_"):
            train(recipe, resume=resume)

    assert rest == {step: value for step, value in whole.items() if step >= first}
    last = f"safetensors/step_{recipe.num_steps}/{file}"
    ours, theirs = load_file(tmp_path / "cut" / last), load_file(tmp_path / "whole" / last)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.parametrize("every", [0, 2])
def test_a_run_that_is_asked_to_stop_keeps_what_it_has_done(sft, tmp_path, every):
    whole = losses_of(train_sft, sft)
    asked = replace(sft, output=str(tmp_path / "asked"), checkpoint_every=every)
    seen = {}

    def note(step, report, figures):
        seen[step] = (report.loss, None)

    for resume in (False, True):
        begun = len(seen)
        with pytest.raises(TrainingStoppedError, match=f"stopped after step {begun + 2} of 5"):
            train_sft(
                asked,
                resume=resume,
                on_step=note,
                control=RunControl(stopping=lambda begun=begun: len(seen) == begun + 2),
            )
    with pytest.raises(WfmConfigError, match="checkpoints of a run, the newest of step 4"):
        train_sft(asked)
    train_sft(asked, resume=True, on_step=note)

    assert seen == whole


def test_saves_uploads_and_checkpoints_are_written_inside_of_what_watches_them(sft, tmp_path):
    upload = UploadConfig(url=f"file://{tmp_path}/store")
    recipe = replace(sft, num_steps=2, checkpoint_every=1, save_every=1, upload=upload)
    whole = tmp_path / "whole"
    places = [whole / "checkpoints", whole / "safetensors", tmp_path / "store"]
    writings = []

    def written():
        return {path.name for place in places for path in place.glob("step[_-]*[0-9]")}

    @contextmanager
    def watched():
        before = written()
        yield
        writings.append(written() - before)

    train_sft(recipe, control=RunControl(while_writing=watched))

    assert len(writings) == 4
    assert set().union(*writings) == {"step-00000001", "step-00000002", "step_1", "step_2"}
    assert (tmp_path / "store" / "step_2" / FULL).is_file()


def test_a_run_tells_of_passes_of_encoders_denoisers_and_decoders_while_it_goes_on(sft, rl):
    told = []
    after_steps = []
    validation = ValidationConfig(prompts=("a red square",), sampler=rl.sampler)

    def note(step, report, figures):
        after_steps.append(len(told))

    train_sft(
        replace(sft, num_steps=2, validation=validation),
        on_step=note,
        control=RunControl(told=lambda: told.append(1)),
    )
    first, second = after_steps
    drawing = rl.sampler.num_steps + 2  # it embeds, denoises so often, and decodes
    training = 1 + 2 + 2  # it embeds, encodes, and trains in passes of two
    assert first >= drawing + training  # pictures are drawn before the first step too
    assert second >= first + training
    assert len(told) >= second + drawing


def test_copies_of_a_denoiser_that_draw_samples_tell_of_their_passes_too(rl):
    told = []
    run = DiffusionRl(replace(rl, num_steps=1, tuning=FullTuning()))
    take_rl_steps(run, control=RunControl(told=lambda: told.append(1)))
    adapter = run.adapter
    text = adapter.encode_text(["a red square"])
    latents, sigmas = torch.zeros(1, *adapter.latent_shape(1, 16, 16)), torch.ones(1)
    before = len(told)
    with run.policies.old() as old, torch.no_grad():
        assert old is not adapter.transformer
        adapter.velocity(old, latents, sigmas, text)
    assert len(told) == before + 1


def test_fine_tuning_goes_on_in_the_middle_of_an_epoch_with_the_same_losses(sft, tmp_path):
    went_on(train_sft, sft, tmp_path, FULL, stop_after=3, first=3)


def test_a_run_that_was_killed_before_its_last_save_makes_it_when_it_goes_on(sft, tmp_path):
    recipe = replace(sft, num_steps=2, checkpoint_every=1, output=str(tmp_path))
    saved = train_sft(recipe)
    state = load_file(saved / FULL)
    shutil.rmtree(saved)

    assert train_sft(recipe, resume=True) == saved
    assert all(torch.equal(load_file(saved / FULL)[name], state[name]) for name in state)
    # one that has taken more steps than it is now to take has nothing of fewer
    assert train_sft(replace(recipe, num_steps=1), resume=True) == saved


def test_a_run_that_was_killed_while_it_saved_on_the_way_makes_that_up(sft, tmp_path):
    sampler = SamplerConfig(num_steps=1, height=16, width=16)
    drawn = ValidationConfig(prompts=("a",), every=2, samples_per_prompt=1, sampler=sampler)
    whole = replace(sft, save_every=2, checkpoint_every=2, num_steps=4, validation=drawn)
    cut = replace(whole, output=str(tmp_path / "cut"))
    losses_of(train_sft, whole)
    losses_of(train_sft, cut, stop_after=3)
    shutil.rmtree(tmp_path / "cut" / "safetensors" / "step_2")  # it was not there yet
    shutil.rmtree(tmp_path / "cut" / "validation" / "step_2")

    losses_of(train_sft, cut, resume=True)

    ours, theirs = (load_file(tmp_path / n / "safetensors/step_2" / FULL) for n in ("cut", "whole"))
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    ours, theirs = (opened(tmp_path / n / "validation/step_2/grid.png") for n in ("cut", "whole"))
    assert ours.tobytes() == theirs.tobytes()


def test_adapters_do_not_go_on_at_another_scale(sft, tmp_path):
    recipe = replace(
        sft, num_steps=1, checkpoint_every=1, output=str(tmp_path), tuning=LoraTuning(rank=2)
    )
    train_sft(recipe)

    other = replace(recipe, num_steps=2, tuning=LoraTuning(rank=2, alpha=32))
    with pytest.raises(WfmConfigError, match="trained with alpha 64, and the recipe says alpha 32"):
        train_sft(other, resume=True)
    train_sft(replace(recipe, num_steps=2), resume=True)


def test_shards_and_buckets_go_on_in_the_middle_of_an_epoch(sft, tmp_path):
    for shard in range(2):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for number in range(3 * shard, 3 * shard + 3):
                image, caption = tmp_path / f"{number}.png", tmp_path / f"{number}.json"
                Image.new("RGB", (16 + 16 * (number % 2), 16), (40 * number, 0, 0)).save(image)
                caption.write_text(f'{{"prompt": "{number}"}}')
                tar.add(image, arcname=image.name)
                tar.add(caption, arcname=caption.name)
    shards = ShardCaptionsConfig(path=str(tmp_path / "{0..1}.tar"), buckets=((16, 16), (16, 32)))
    recipe = replace(
        sft, data=shards, num_steps=4, tuning=LoraTuning(rank=2), cache=str(tmp_path / "cache")
    )
    went_on(train_sft, recipe, tmp_path, LORA, stop_after=3, first=3)


def test_rl_with_adapters_goes_on_with_its_lagging_old_policy(rl, tmp_path):
    went_on(train_rl, rl, tmp_path, LORA, stop_after=3, first=3)


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_rl_of_all_weights_goes_on_with_its_old_policy(rl, tmp_path, rate):
    full = replace(rl, tuning=FullTuning(), algorithm=NftConfig(decay=OldPolicyDecay(rate=rate)))
    went_on(train_rl, full, tmp_path, FULL, stop_after=3, first=3)


def test_pictures_and_saves_are_made_on_the_way_and_after_the_last_step(sft, tmp_path):
    shown = ValidationConfig(
        prompts=("a red square", "a blue square"),
        every=2,
        samples_per_prompt=3,
        sampler=SamplerConfig(num_steps=2, height=16, width=20, guidance=3.0),
    )
    train_sft(replace(sft, validation=shown, num_steps=3, save_every=2))

    saved = sorted((tmp_path / "whole" / "safetensors").iterdir())
    assert [path.name for path in saved] == ["step_2", "step_3"]
    states = [load_file(path / FULL) for path in saved]
    assert any(not torch.equal(value, states[1][name]) for name, value in states[0].items())

    drawn = sorted((tmp_path / "whole" / "validation").iterdir())
    assert [path.name for path in drawn] == ["step_0", "step_2", "step_3"]
    for path in drawn:
        assert opened(path / "grid.png").size == (3 * 20, 2 * 16)
        assert (path / "prompts.txt").read_text() == "0: a red square\n1: a blue square\n"
    grids = [(path / "grid.png").read_bytes() for path in drawn]
    assert len(set(grids)) == 3  # the same noise, other weights


def test_a_grid_has_each_picture_in_its_place(tmp_path):
    pixels = torch.linspace(-1.2, 1.2, 6).view(2, 3, 1, 1, 1).expand(2, 3, 3, 4, 4)
    save_grid(pixels, tmp_path / "grid.png", enlarged=2)
    picture = opened(tmp_path / "grid.png")

    assert picture.size == (3 * 8, 2 * 8)
    middles = [picture.getpixel((8 * x + 4, 8 * y + 4))[0] for y in range(2) for x in range(3)]
    assert middles == [0, 36, 97, 158, 219, 255]


def test_videos_are_written_one_by_one_and_as_three_frames(tmp_path):
    frames = torch.linspace(-1.0, 1.0, 5)[:, None, None].expand(5, 16, 16)
    write_samples(frames.expand(1, 2, 3, 5, 16, 16), tmp_path / "out")

    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "0_0.mp4",
        "0_1.mp4",
        "grid.png",
    ]
    grid = opened(tmp_path / "out" / "grid.png")
    assert [grid.getpixel((16 * x + 8, 8))[0] for x in range(6)] == [0, 128, 255] * 2
    with av.open(str(tmp_path / "out" / "0_0.mp4")) as video:  # what browsers show
        stream = video.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")


def test_each_prompt_of_a_grid_has_a_line():
    assert prompts_text(["a red\n square", "a disc"]) == "0: a red square\n1: a disc\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": ()}, "there are no prompts"),
        ({"every": 0}, "every is 0"),
        ({"samples_per_prompt": 0}, "samples_per_prompt is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_a_validation_that_draws_nothing_is_refused(change, message):
    with pytest.raises(WfmConfigError, match=message):
        ValidationConfig(**{"prompts": ("a",), **change})
