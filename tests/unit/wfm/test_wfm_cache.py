"""Latents and embedded prompts that are kept on disk: the same losses, and what becomes stale."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from full_disks import no_file_longer_than
from PIL import Image
from safetensors import safe_open

from cosmos_wfm import (
    CaptionDataError,
    DiffusionSftConfig,
    EncodedCache,
    EncodedSample,
    FullTuning,
    ImageCaptionsConfig,
    LoraTuning,
    SampleEncoder,
    VideoCaptionsConfig,
    WfmConfigError,
    cache_key,
    fill_cache,
    load_adapter,
    tiny_captions,
    train_sft,
    write_video,
)


@pytest.fixture
def recipe(model_dir, tmp_path):
    tiny_captions(tmp_path / "data", size=16)
    return DiffusionSftConfig(
        model=str(model_dir),
        data=ImageCaptionsConfig(path=str(tmp_path / "data"), height=16, width=16),
        output=str(tmp_path / "out"),
        num_steps=2,
        batch_size=4,
        micro_batch_size=2,
        caption_dropout=0.3,
        tuning=LoraTuning(rank=2, alpha=4),
    )


def losses(recipe):
    found = []
    train_sft(recipe, on_step=lambda step, report, figures: found.append(report.loss))
    return found


def files(directory):
    return sorted(directory.rglob("*.safetensors"))


def test_losses_are_the_same_without_with_and_from_a_cache(recipe, tmp_path):
    cached = replace(recipe, output=str(tmp_path / "cached"), cache=str(tmp_path / "cache"))
    without = losses(recipe)

    assert losses(cached) == pytest.approx(without, abs=1e-6)
    assert len(files(tmp_path / "cache")) == 6  # all six pairs in 8 places
    for path in (tmp_path / "data").glob("*.png"):  # what is kept is not decoded again
        times = path.stat()
        path.write_bytes(b"x" * times.st_size)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    again = replace(cached, output=str(tmp_path / "again"))
    assert losses(again) == pytest.approx(without, abs=1e-6)


def test_filling_goes_on_where_it_was_ended_and_replaces_what_is_broken(recipe, tmp_path):
    cached = replace(recipe, cache=str(tmp_path / "cache"))

    assert fill_cache(cached) == (6, 6)
    assert fill_cache(cached) == (0, 6)
    first, second, *_ = files(tmp_path / "cache")
    first.unlink()
    second.write_bytes(second.read_bytes()[:-10])
    assert fill_cache(cached) == (2, 6)
    assert not list((tmp_path / "cache").rglob("*.partial"))
    with pytest.raises(WfmConfigError, match="cache names no directory"):
        fill_cache(recipe)


def test_another_picture_prompt_size_or_model_is_encoded_anew(recipe, tmp_path, model_dirs):
    cached = replace(recipe, cache=str(tmp_path / "cache"))
    fill_cache(cached)
    Image.new("RGB", (16, 16), (1, 2, 3)).save(tmp_path / "data" / "0001.png")
    (tmp_path / "data" / "0002.json").write_text('{"prompt": "something else"}')

    assert fill_cache(cached) == (2, 6)
    assert fill_cache(replace(cached, data=replace(recipe.data, height=32))) == (6, 6)
    assert fill_cache(replace(cached, data=replace(recipe.data, broken="skip"))) == (0, 6)
    other = cache_key(model_dirs("sd3"), recipe.data, adapter="A")
    assert len({other, cache_key(model_dirs("sd3"), recipe.data, adapter="B")}) == 2


def test_weights_that_differ_anywhere_are_another_model(recipe, tmp_path):
    weights = tmp_path / "model" / "text_encoder" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(bytes(5 << 20))
    first = cache_key(tmp_path / "model", recipe.data, adapter="A")

    tuned = bytearray(5 << 20)  # as a text encoder of which only the layers were tuned
    tuned[3 << 20 : (3 << 20) + (1 << 16)] = b"x" * (1 << 16)
    weights.write_bytes(tuned)

    assert cache_key(tmp_path / "model", recipe.data, adapter="A") != first
    weights.write_bytes(bytes(5 << 20))
    assert cache_key(tmp_path / "model", recipe.data, adapter="A") == first


def test_another_encoder_behind_a_link_is_another_model(recipe, tmp_path):
    for name in ("one", "other"):
        (tmp_path / name / "more").mkdir(parents=True)
        (tmp_path / name / "more" / "model.safetensors").write_text(name)
    (tmp_path / "model").mkdir()
    link, keys = tmp_path / "model" / "text_encoder", list[str]()
    for name in ("one", "other", "one"):
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / name)
        keys.append(cache_key(tmp_path / "model", recipe.data, adapter="A"))

    assert keys[0] == keys[2] != keys[1]


def test_writers_of_one_sample_do_not_get_into_each_others_way(tmp_path):
    cache = EncodedCache(tmp_path, "key")
    samples = [EncodedSample(torch.full((1 << 16,), float(n)), {}) for n in range(4)]

    def write(sample):  # in threads: processes on several nodes may have one number too
        for _ in range(25):
            cache.save("it", sample, "p")

    with ThreadPoolExecutor(len(samples)) as writers:
        list(writers.map(write, samples))

    kept = cache.load("it")
    assert kept is not None
    assert len(kept[0].latents.unique()) == 1
    assert not list(tmp_path.rglob("*.partial"))


def test_a_cache_on_a_full_disk_is_said_and_left_clean(tmp_path):
    cache = EncodedCache(tmp_path, "key")
    with no_file_longer_than(1000), pytest.raises(WfmConfigError, match=r"too large; make room"):
        cache.save("it", EncodedSample(torch.zeros(1 << 16), {}), "p")

    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    cache.save("it", EncodedSample(torch.zeros(1 << 16), {}), "p")
    assert cache.load("it") is not None


def test_what_is_broken_stays_named_with_a_full_cache(recipe, tmp_path):
    skipping = replace(recipe.data, broken="skip")
    cached = replace(recipe, data=skipping, cache=str(tmp_path / "cache"))
    (tmp_path / "data" / "0003.png").write_bytes(b"no picture")

    for output in ("first", "again"):
        fill_cache(replace(cached, output=str(tmp_path / output)))
        left_out = (tmp_path / output / "left_out_rank0.txt").read_text()
        assert left_out.count("0003.png cannot be read as an image") == 1
    with pytest.raises(CaptionDataError, match=r"0003\.png cannot be read"):
        fill_cache(replace(cached, data=recipe.data))


def test_every_family_trains_on_what_it_reads_back(family, model_dirs, tmp_path):
    if family not in ("sd3", "sana"):
        (tmp_path / "data").mkdir()
        write_video(tmp_path / "data" / "a.mp4", torch.zeros(3, 5, 32, 32))
        (tmp_path / "data" / "a.json").write_text('{"prompt": "grey"}')
        data = VideoCaptionsConfig(path=str(tmp_path / "data"), frames=5, height=32, width=32)
    else:
        tiny_captions(tmp_path / "data", size=32)
        data = ImageCaptionsConfig(path=str(tmp_path / "data"), height=32, width=32)
    adapter, opened = load_adapter(model_dirs(family)), data.build()
    cache = EncodedCache(tmp_path / "cache", "key")

    [fresh] = SampleEncoder(adapter, opened, cache=cache).rows([0])
    reader = SampleEncoder(adapter, opened, cache=cache)
    [kept] = reader.rows([0])

    assert reader.num_encoded == 0
    assert torch.equal(kept.latents, fresh.latents)
    assert kept.text.keys() == fresh.text.keys()
    assert all(torch.equal(kept.text[name], fresh.text[name]) for name in fresh.text)


def test_cosmos_keeps_projected_prompts_and_none_whose_projection_is_trained(model_dirs, tmp_path):
    (tmp_path / "data").mkdir()
    write_video(tmp_path / "data" / "a.mp4", torch.zeros(3, 5, 32, 32))
    (tmp_path / "data" / "a.json").write_text('{"prompt": "grey"}')
    data = VideoCaptionsConfig(path=str(tmp_path / "data"), frames=5, height=32, width=32).build()
    widths, shapes = {}, {}
    for name, tuning in (("lora", LoraTuning(rank=2)), ("full", FullTuning())):
        adapter = load_adapter(model_dirs("cosmos"))
        tuning.prepare(adapter, seed=0)
        encoder = SampleEncoder(adapter, data, cache=EncodedCache(tmp_path / name, "key"))
        widths[name] = [encoder.rows([0])[0].text["encoder_hidden_states"].shape[-1] for _ in "ab"]
        [path] = files(tmp_path / name)
        with safe_open(path, framework="pt") as file:
            shapes[name] = {n: file.get_tensor(n).shape for n in file.keys()}  # noqa: SIM118

    settings = load_adapter(model_dirs("cosmos")).transformer.config
    raw, projected = settings.crossattn_proj_in_channels, settings.encoder_hidden_states_channels
    assert widths == {"lora": [projected] * 2, "full": [raw] * 2}
    assert shapes["lora"]["text.encoder_hidden_states"][-1] == projected
    assert set(shapes["full"]) == {"latents"}
