"""Tiny pipeline directories and a handful of captioned images, each made once."""

from functools import partial

import pytest
import torch

from cosmos_wfm import (
    load_adapter,
    save_pipeline,
    tiny_captions,
    tiny_cosmos_pipeline,
    tiny_sana_pipeline,
    tiny_sana_video_pipeline,
    tiny_sd3_pipeline,
    tiny_wan_pipeline,
    tiny_wan_small_pipeline,
)

TINY = {
    "sd3": tiny_sd3_pipeline,
    "sana": tiny_sana_pipeline,
    "sana_video": tiny_sana_video_pipeline,
    "cosmos": tiny_cosmos_pipeline,
    "wan": tiny_wan_pipeline,
    "wan22": partial(tiny_wan_pipeline, boundary=0.875),
    "wan22_small": tiny_wan_small_pipeline,
}
"""Every family that comes with the package, and Wan 2.2's two forms."""


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory):
    """Return the directory of a family's tiny pipeline, made at the first call."""
    made = {}

    def directory(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp("wfm") / f"tiny-{family}"
            save_pipeline(TINY[family](num_layers=1), made[family])
        return made[family]

    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wfm") / "tiny-sd3"
    tiny_sd3_pipeline().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wfm-data")
    tiny_captions(directory)
    return directory


@pytest.fixture
def adapter(model_dir):
    return load_adapter(model_dir)


@pytest.fixture(params=list(TINY))
def family(request):
    return request.param


@pytest.fixture
def family_adapter(family, model_dirs):
    return load_adapter(model_dirs(family))
