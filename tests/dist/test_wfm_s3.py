"""Shards from, and saves and checkpoints to, a real S3-compatible server that is named outside."""

import io
import json
import tarfile

import fsspec
import pytest
from click.testing import CliRunner

s3fs = pytest.importorskip("s3fs")

from diffusers import DiffusionPipeline  # noqa: E402
from PIL import Image  # noqa: E402
from s3_server import s3_server  # noqa: E402

from cosmos_app.cli import main  # noqa: E402
from cosmos_app.wfm.object_store import s3_settings, use_object_store  # noqa: E402
from cosmos_wfm import (  # noqa: E402
    CaptionDataError,
    ShardCaptionsConfig,
    UploadError,
    tiny_sd3_pipeline,
    upload_directory,
)

COLOURS = ("red", "green", "blue", "white")


@pytest.fixture(scope="module")
def environment():
    with s3_server("wfm") as settings:
        yield {
            "PROD_S3_CHECKPOINT_ACCESS_KEY_ID": settings["key"],
            "PROD_S3_CHECKPOINT_SECRET_ACCESS_KEY": settings["secret"],
            "PROD_S3_CHECKPOINT_ENDPOINT_URL": settings["endpoint_url"],
            "PROD_S3_CHECKPOINT_REGION_NAME": "eu-central-1",
        }


@pytest.fixture
def store(environment):
    """fsspec as a run has it, and as it was afterwards."""
    before = dict(fsspec.config.conf)
    use_object_store(environment)
    yield fsspec.filesystem("s3", use_listings_cache=False)
    fsspec.config.conf.clear()
    fsspec.config.conf.update(before)


def write_shard(store, url, colours):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for colour in colours:
            picture = io.BytesIO()
            Image.new("RGB", (16, 16), colour).save(picture, format="PNG")
            caption = json.dumps({"prompt": f"a {colour} square"}).encode()
            for name, data in ((f"{colour}.png", picture.getvalue()), (f"{colour}.json", caption)):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    store.pipe_file(url, buffer.getvalue())


def test_the_environments_variables_become_the_drivers_settings():
    assert s3_settings({}) == {}
    assert s3_settings(
        {
            "PROD_S3_CHECKPOINT_ACCESS_KEY_ID": "a",
            "PROD_S3_CHECKPOINT_SECRET_ACCESS_KEY": "b",
            "PROD_S3_CHECKPOINT_ENDPOINT_URL": "http://c",
            "PROD_S3_CHECKPOINT_REGION_NAME": "d",
        }
    ) == {
        "key": "a",
        "secret": "b",
        "endpoint_url": "http://c",
        "client_kwargs": {"region_name": "d"},
    }


def test_shards_in_s3_are_read_by_ranges(store, tmp_path):
    for number in range(2):
        write_shard(store, f"wfm/shards/{number:02}.tar", COLOURS[2 * number :][:2])
    config = ShardCaptionsConfig(
        path="s3://wfm/shards/{00..01}.tar", height=8, width=8, index=str(tmp_path / "index")
    )
    for path in (config.path, "s3://wfm/shards", "s3://wfm/shards/*.tar"):
        data = ShardCaptionsConfig(path=path, height=8, width=8).build()
        assert [sample.prompt for sample in data] == [f"a {colour} square" for colour in COLOURS]
        assert data[3].pixels.min() == 1.0
    kept = config.build()
    version = kept.identity(0)
    assert len(list((tmp_path / "index").iterdir())) == 2

    write_shard(store, "wfm/shards/00.tar", ["white"])
    fsspec.filesystem("s3").invalidate_cache()
    changed = config.build()

    assert changed[0].prompt == "a white square"
    assert (len(changed), changed.identity(0) == version) == (3, False)
    with pytest.raises(CaptionDataError, match=r"s3://wfm/shards/7\.tar cannot be read"):
        ShardCaptionsConfig(path="s3://wfm/shards/7.tar").build()


def test_an_upload_is_whole_once_its_list_is_there(store, tmp_path):
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "model.safetensors").write_bytes(b"0123456789")
    (tmp_path / "model_index.json").write_bytes(b"{}")
    store.pipe_file("wfm/up/step_1/stale.bin", b"old")

    assert upload_directory(tmp_path, "s3://wfm/up/step_1/") == 12
    listed = json.loads(store.cat_file("wfm/up/step_1/uploaded.json"))
    assert listed == {"lora/model.safetensors": 10, "model_index.json": 2}
    assert sorted(store.find("wfm/up/step_1")) == [
        "wfm/up/step_1/lora/model.safetensors",
        "wfm/up/step_1/model_index.json",
        "wfm/up/step_1/uploaded.json",
    ]
    with pytest.raises(UploadError, match="nosuchscheme"):
        upload_directory(tmp_path, "nosuchscheme://bucket/x")


@pytest.mark.slow
def test_a_run_reads_checkpoints_and_saves_in_s3_alone(store, environment, tmp_path, monkeypatch):
    tiny_sd3_pipeline(num_layers=1).save_pretrained(tmp_path / "model")
    for number in range(2):
        write_shard(store, f"wfm/run/{number}.tar", COLOURS[2 * number :][:2])
    (tmp_path / "sft.toml").write_text(
        f'kind = "wfm_sft"\nmodel = "{tmp_path}/model"\noutput = "{tmp_path}/out"\n'
        'num_steps = 2\nbatch_size = 2\ncheckpoint_every = 1\ncheckpoints = "s3://wfm/ckpt"\n'
        '[data]\nkind = "shards"\npath = "s3://wfm/run/{0..1}.tar"\nheight = 16\nwidth = 16\n'
        '[upload]\nurl = "s3://wfm/saves"\nsaves = "final"\n'
        '[tuning]\nkind = "lora"\nrank = 2\nalpha = 4\n'
    )
    fsspec.config.conf.clear()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    recipe = str(tmp_path / "sft.toml")
    first = CliRunner().invoke(main, ["wfm", "run", recipe, "num_steps=1"])
    again = CliRunner().invoke(main, ["wfm", "run", recipe])
    resumed = CliRunner().invoke(main, ["wfm", "run", recipe, "--resume"])

    assert first.exit_code == 0, first.output
    assert again.exit_code != 0
    assert "has checkpoints of a run" in again.output
    assert resumed.exit_code == 0, resumed.output
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert store.exists("wfm/saves/step_1/uploaded.json")
    store.get("wfm/saves/step_2/lora", str(tmp_path / "back"), recursive=True)
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "model")
    pipeline.load_lora_weights(tmp_path / "back", weight_name="model.safetensors")
    assert pipeline.get_active_adapters()
