"""Webdataset shards: what is found, in which order it is read, and what is wrong with them."""

import io
import json
import tarfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from full_disks import no_file_longer_than
from PIL import Image

from cosmos_wfm import (
    CaptionDataError,
    MockCaptionsConfig,
    ShardCaptionsConfig,
    WfmConfigError,
    write_video,
)
from cosmos_wfm.shards import expand_ranges, interleaved_order


def png(value):
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (value, value, value)).save(buffer, format="PNG")
    return buffer.getvalue()


def write_shard(path, members):
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def pair(key, value, prompt=None):
    caption = json.dumps({"prompt": prompt or key}).encode()
    return [(f"{key}.json", caption), (f"{key}.png", png(value))]


@pytest.fixture
def shards(tmp_path):
    """Four shards of three samples; sample 3 s + i is grey 10 (3 s + i)."""
    for s in range(4):
        numbers = range(3 * s, 3 * s + 3)
        write_shard(tmp_path / f"{s:03}.tar", [m for n in numbers for m in pair(f"{n:04}", 10 * n)])
    return ShardCaptionsConfig(path=str(tmp_path / "{000..003}.tar"), height=4, width=4)


def test_what_webdataset_writes_is_read(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "w.tar")) as writer:
        for n in range(3):
            row = {"__key__": f"{n:04}", "png": png(10 * n), "json": {"prompt": f"grey {n}"}}
            writer.write(row)

    data = ShardCaptionsConfig(path=str(tmp_path), height=4, width=4).build()

    assert [sample.prompt for sample in data] == ["grey 0", "grey 1", "grey 2"]
    assert [round(float(sample.pixels.mean() + 1) * 127.5) for sample in data] == [0, 10, 20]


def test_a_picture_of_a_shard_is_shown_upright(tmp_path):
    stored = Image.new("RGB", (4, 2), "white")
    stored.paste("black", (0, 0, 2, 2))  # the left half, which is the top of what was seen
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6  # turn it by a quarter, clockwise
    stored.save(buffer, format="PNG", exif=exif)
    write_shard(tmp_path / "a.tar", [("a.png", buffer.getvalue()), ("a.txt", b"p")])

    [sample] = ShardCaptionsConfig(path=str(tmp_path), height=4, width=2).build()

    assert torch.equal(sample.pixels[:, :2], -torch.ones(3, 2, 2))
    assert torch.equal(sample.pixels[:, 2:], torch.ones(3, 2, 2))


def test_a_directory_a_pattern_a_range_and_one_file_are_the_same_shards(shards, tmp_path):
    whole = [sample.prompt for sample in shards.build()]

    for path in (tmp_path, tmp_path / "*.tar", tmp_path / "00{0..3}.tar"):
        data = replace(shards, path=str(path)).build()
        assert [sample.prompt for sample in data] == whole == [f"{n:04}" for n in range(12)]
    one = replace(shards, path=str(tmp_path / "002.tar")).build()
    assert [round(float(sample.pixels.mean() + 1) * 127.5) for sample in one] == [60, 70, 80]


def test_ranges_keep_their_digits():
    assert expand_ranges("a{08..10}/b{1..2}.tar") == [
        "a08/b1.tar", "a08/b2.tar", "a09/b1.tar", "a09/b2.tar", "a10/b1.tar", "a10/b2.tar",
    ]  # fmt: skip
    with pytest.raises(CaptionDataError, match=r"the range \{3\.\.1\} is empty"):
        expand_ranges("{3..1}.tar")


def test_a_sample_in_folders_with_several_dots_and_txt_captions(tmp_path):
    members = [("a.b/x.png", png(1)), ("a.b/x.txt", b" a disc\n"), ("a.b/x.seg.png", png(2))]
    write_shard(tmp_path / "s.tar", members)
    data = ShardCaptionsConfig(path=str(tmp_path), height=4, width=4).build()

    assert len(data) == 1
    assert data[0].prompt == "a disc"
    assert data[0].pixels[0, 0, 0] == pytest.approx(1 / 127.5 - 1)


def test_a_json_without_prompt_leaves_the_word_to_the_txt_beside_it(tmp_path):
    about = json.dumps({"caption": "other", "width": 4}).encode()  # as img2dataset writes them
    members = [("0.jpg", png(1)), ("0.json", about), ("0.txt", b"a disc")]
    own = [("1.txt", b"other"), ("1.json", b'{"prompt": "a square"}'), ("1.jpg", png(2))]
    write_shard(tmp_path / "s.tar", [*members, *own])
    config = ShardCaptionsConfig(path=str(tmp_path), height=4, width=4, index=str(tmp_path / "i"))

    for _ in ("looked at", "out of the index"):
        data = config.build()
        assert [sample.prompt for sample in data] == ["a disc", "a square"]

    write_shard(tmp_path / "s.tar", members[:2])
    with pytest.raises(CaptionDataError, match=r"s\.tar 0: no prompt \(KeyError"):
        replace(config, index="").build()[0]


def test_hidden_members_are_left_alone_and_two_samples_of_a_name_are_named(tmp_path):
    hidden = [("._0.png", b"\0\5\x16\7"), ("./._0.json", b"\0\5\x16\7"), (".DS_Store", b"")]
    write_shard(tmp_path / "s.tar", [*hidden, *pair("0", 1), *pair("1", 2)])
    config = ShardCaptionsConfig(path=str(tmp_path), height=4, width=4)

    assert [sample.prompt for sample in config.build()] == ["0", "1"]
    write_shard(tmp_path / "s.tar", [*pair("0", 1), *pair("1", 2), *pair("0", 3)])
    with pytest.raises(CaptionDataError, match=r"s\.tar 0: there are two samples of that name"):
        config.build()
    assert [sample.prompt for sample in replace(config, broken="skip").build()] == ["1"]


def test_an_epoch_has_every_sample_once_and_lanes_read_one_shard_after_the_other():
    sizes, lanes = [5, 5, 5, 5, 3], 4
    order = interleaved_order(sizes, lanes, seed=1, epoch=0)

    assert sorted(order) == list(range(23))
    assert list(order) != list(interleaved_order(sizes, lanes, seed=1, epoch=1))
    shard_of = np.searchsorted(np.cumsum(sizes), order, side="right")
    for lane in range(lanes):
        read = shard_of[lane::lanes]
        # A lane of 5 or 6 samples never comes back to a shard that it has left.
        changes = 1 + int((read[1:] != read[:-1]).sum())
        assert changes == len(set(read)) <= 3
    assert list(interleaved_order([3], 8, seed=0, epoch=0)) != []


def test_ranks_read_shards_of_their_own(shards):
    data = replace(shards, lanes=4).build()
    read = [{data.shard_of(data.order(p, seed=3)) for p in range(rank, 12, 2)} for rank in (0, 1)]

    assert len(read[0]) == len(read[1]) == 2
    assert not read[0] & read[1]


def test_a_pair_without_caption_or_image_is_named_and_fatal_or_skipped(shards, tmp_path):
    lonely = [("lonely.png", png(1)), ("bare.json", b'{"prompt": "p"}')]
    write_shard(tmp_path / "003.tar", [*pair("0009", 90), *lonely])

    with pytest.raises(CaptionDataError, match=r"2 broken pairs: .*003\.tar lonely: 0 captions"):
        shards.build()
    data = replace(shards, broken="skip").build()

    assert len(data) == 10
    assert "003.tar bare: 1 captions and 0 images" in data.problems[1]


def test_what_cannot_be_decoded_is_named_and_the_next_one_taken(shards, tmp_path):
    broken = [("x.json", b'{"prompt": "x"}'), ("x.png", b"no image"), *pair("y", 20)]
    bad_caption = [("z.json", b"{}"), ("z.png", png(1))]
    write_shard(tmp_path / "000.tar", [*broken, *bad_caption])

    with pytest.raises(CaptionDataError, match=r"000\.tar x cannot be read as an image"):
        shards.build()[0]
    data = replace(shards, broken="skip").build()

    assert data[0].prompt == "y"
    assert data[2].prompt == "0003"  # behind z comes the next shard
    assert [problem.split(":")[0].rpartition("/")[2] for problem in data.problems] == [
        "000.tar x cannot be read as an image",
        "000.tar z",
    ]


def test_a_sample_that_is_too_small_is_named_and_fatal_or_skipped(shards):
    large = replace(shards, height=8, width=4, max_enlargement=1.0)

    with pytest.raises(CaptionDataError, match=r"000\.tar 0000 is 4x4 pixels; for 8x4 .* 2 times"):
        large.build()[0]
    with pytest.raises(CaptionDataError, match="none of 12 samples can be decoded"):
        replace(large, broken="skip").build()[0]


def test_a_shard_that_is_cut_short_keeps_what_is_whole_or_is_fatal(shards, tmp_path):
    path = tmp_path / "001.tar"
    path.write_bytes(path.read_bytes()[: 512 * 9])  # two samples, and a header without its data

    with pytest.raises(CaptionDataError, match=r"001\.tar: no whole tar file"):
        shards.build()
    data = replace(shards, broken="skip").build()

    assert [sample.prompt for sample in data][3:6] == ["0003", "0004", "0006"]


def test_an_index_is_kept_and_used_for_this_very_file_only(shards, tmp_path):
    kept = replace(shards, index=str(tmp_path / "index"))
    first = kept.build()
    files = sorted((tmp_path / "index").iterdir())
    changed = json.loads(files[0].read_text())
    changed["samples"].pop()
    files[0].write_text(json.dumps(changed))

    assert len(kept.build()) == 11  # what is kept was not looked at again
    assert len(replace(kept, index="").build()) == len(first) == 12
    for shard in tmp_path.glob("*.tar"):
        write_shard(shard, pair(f"new-{shard.stem}", 1))
    assert len(kept.build()) == 4
    assert first.identity(0) != shards.build().identity(0)


def test_an_index_that_was_torn_is_made_anew(shards, tmp_path):
    kept = replace(shards, index=str(tmp_path / "index"))
    kept.build()
    whole = {path: path.read_bytes() for path in (tmp_path / "index").iterdir()}
    for torn, path in zip((b"", b"{}", b"\xff"), whole, strict=False):
        path.write_bytes(torn)

    assert len(kept.build()) == 12
    assert {path: path.read_bytes() for path in (tmp_path / "index").iterdir()} == whole


def test_an_index_that_cannot_be_kept_is_said(shards, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CaptionDataError, match=r"index: .*/file/index cannot be written: Not a"):
        replace(shards, index=str(tmp_path / "file" / "index")).build()
    with (
        no_file_longer_than(10),
        pytest.raises(CaptionDataError, match=r"File too large; .* leave index empty"),
    ):
        replace(shards, index=str(tmp_path / "index")).build()
    assert not list((tmp_path / "index").iterdir())


def test_videos_come_from_shards_too(tmp_path):
    pixels = torch.linspace(-1, 1, 5).view(1, 5, 1, 1).expand(3, 5, 16, 16)
    write_video(tmp_path / "v.mp4", pixels)
    members = [("v.mp4", (tmp_path / "v.mp4").read_bytes()), ("v.txt", b"brighter")]
    write_shard(tmp_path / "v.tar", members)
    data = ShardCaptionsConfig(path=str(tmp_path), frames=5, height=16, width=16).build()

    assert data[0].pixels.shape == (3, 5, 16, 16)
    torch.testing.assert_close(data[0].pixels, pixels, atol=0.1, rtol=0)
    with pytest.raises(CaptionDataError, match="has 5 frames; 9 are needed"):
        ShardCaptionsConfig(path=str(tmp_path), frames=9, height=16, width=16).build()[0]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.tar", "nowhere.tar cannot be read"),
        ("*.nothing", "there is no shard at"),
        ("nosuchscheme://bucket/a.tar", "shards at nosuchscheme"),
    ],
)
def test_what_is_no_shard_is_refused(tmp_path, path, message):
    where = path if "://" in path else str(tmp_path / path)
    with pytest.raises(CaptionDataError, match=message):
        ShardCaptionsConfig(path=where).build()


def test_mock_samples_are_noise_of_the_wanted_sizes_and_the_same_each_time():
    config = MockCaptionsConfig(num_samples=3, frames=5, buckets=((8, 16), (16, 8)))
    data, again = list(config.build()), list(config.build())

    assert [tuple(s.pixels.shape) for s in data] == [(3, 5, 8, 16), (3, 5, 16, 8), (3, 5, 8, 16)]
    assert all(torch.equal(a.pixels, b.pixels) for a, b in zip(data, again, strict=True))
    assert not torch.equal(data[0].pixels, data[2].pixels)
    assert data[0].pixels.abs().max() <= 1
    with pytest.raises(WfmConfigError, match="num_samples is 0"):
        MockCaptionsConfig(num_samples=0)
