"""A tiny pipeline directory and a handful of captioned images, made once."""

import pytest
import torch

from cosmos_wfm import load_adapter, tiny_captions, tiny_sd3_pipeline


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


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
