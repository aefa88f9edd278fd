"""Which GPUs of a machine each process of a run sees."""

import ctypes
from dataclasses import replace

import pytest

from cosmos_app.devices import (
    SHARERS,
    DeviceNeeds,
    device_environment,
    device_names,
    devices_of,
    gpus_of,
    placement_lines,
    require_devices,
)
from cosmos_app.errors import DataError
from cosmos_app.roles.process import unwatched_groups
from cosmos_rollout import (
    EndpointConfig,
    ScriptedConfig,
    SGLangConfig,
    TransformersConfig,
    VLLMConfig,
)

NEEDS = DeviceNeeds(policies=2, policy=2, teachers=1, teacher=1, rollouts=2, rollout=1)


def placed(names: str, needs: DeviceNeeds, num_devices: int) -> dict[str, tuple[int, ...]]:
    return {name: devices_of(name, needs, num_devices) for name in names.split()}


def test_policies_have_the_first_devices_and_engines_the_last():
    names = "controller policy-0 policy-1 policy-2 rollout-2 rollout-1 rollout-0 teacher-0"
    assert placed(names, NEEDS, 8) == {
        "controller": (),
        "policy-0": (0, 1),
        "policy-1": (2, 3),
        "policy-2": (4, 5),  # joins later, between the others
        "rollout-2": (4,),  # likewise
        "rollout-1": (5,),
        "rollout-0": (6,),
        "teacher-0": (7,),
    }


def test_parts_of_one_engine_lie_side_by_side():
    needs = DeviceNeeds(policies=1, policy=4, rollouts=2, rollout=2)
    assert placed("rollout-0 rollout-1", needs, 8) == {"rollout-0": (6, 7), "rollout-1": (4, 5)}


def test_engines_that_do_not_fit_share_devices():
    needs = DeviceNeeds(policies=1, policy=1, rollouts=2, rollout=1)
    assert placed("policy-0 rollout-0 rollout-1", needs, 2) == {
        "policy-0": (0,),
        "rollout-0": (1,),
        "rollout-1": (0,),
    }
    assert placed("policy-0 rollout-0 rollout-1", needs, 1) == {
        "policy-0": (0,),
        "rollout-0": (0,),
        "rollout-1": (0,),
    }
    assert placement_lines(needs, ["5"]) == [
        "GPU 5: policy-0, rollout-0, rollout-1",
        "engines that share a GPU start in turn and divide its memory, unless "
        "rollout.engine.gpu_memory_share (or memory_share) says otherwise",
    ]


def test_a_process_is_told_how_many_compute_on_its_device():
    needs = DeviceNeeds(policies=1, policy=1, rollouts=2, rollout=1)
    assert device_environment("rollout-0", needs, ["5"])[SHARERS] == "3"
    assert SHARERS not in device_environment("rollout-0", needs, ["5", "6"])
    assert device_environment("rollout-1", needs, ["5", "6"])[SHARERS] == "2"  # and the policy
    assert device_environment("rollout-2", needs, ["5", "6"])[SHARERS] == "2"  # which joins later
    turns = replace(needs, takes_turns=True)
    assert SHARERS not in device_environment("rollout-0", turns, ["5"])


def test_rollouts_that_take_turns_with_the_policy_begin_where_it_does():
    needs = DeviceNeeds(policies=1, policy=2, rollouts=2, rollout=1, takes_turns=True)
    assert placed("policy-0 rollout-0 rollout-1", needs, 4) == {
        "policy-0": (0, 1),
        "rollout-0": (0,),
        "rollout-1": (1,),
    }
    assert placement_lines(needs, ["0", "1", "2", "3"]) == [
        "GPU 0: policy-0, rollout-0",
        "GPU 1: policy-0, rollout-1",
    ]


def test_a_process_sees_its_devices_under_the_names_that_the_launcher_has_for_them():
    visible = device_names("GPU-aa, GPU-bb,GPU-cc,GPU-dd", 4)
    assert device_environment("policy-1", NEEDS, visible) == {
        "CUDA_VISIBLE_DEVICES": "GPU-cc,GPU-dd"
    }
    assert device_environment("controller", NEEDS, visible) == {}
    assert device_environment("policy-0", NEEDS, ()) == {}  # this machine computes on its CPU


def test_names_of_devices_are_their_numbers_or_those_that_were_chosen():
    assert device_names(None, 3) == ("0", "1", "2")
    assert device_names("4,5,9", 2) == ("4", "5")  # CUDA stops at the first that it does not have


def test_what_a_machine_cannot_hold_is_refused_by_setting():
    require_devices(NEEDS, 4)
    require_devices(NEEDS, 0)
    with pytest.raises(DataError, match=r"policy\.replicas times policy\.ranks takes 4 GPUs"):
        require_devices(NEEDS, 3)
    with pytest.raises(DataError, match=r"rollout\.engine takes 4 GPUs, this machine shows 2"):
        require_devices(DeviceNeeds(policies=1, policy=1, rollouts=1, rollout=4), 2)


@pytest.mark.parametrize(
    ("engine", "count"),
    [
        (VLLMConfig(), 1),
        (VLLMConfig(tensor_parallel=2, pipeline_parallel=2), 4),
        (VLLMConfig(tensor_parallel=2, extra={"data_parallel_size": 2}), 4),
        (SGLangConfig(tensor_parallel=4), 4),
        (SGLangConfig(device="cpu"), 0),
        (TransformersConfig(device="cuda"), 1),
        (TransformersConfig(device="cuda:1"), 0),
        (TransformersConfig(), 0),
        (ScriptedConfig(), 0),
        (EndpointConfig(url="http://127.0.0.1:1", model="m"), 0),
    ],
)
def test_engines_say_how_many_devices_they_compute_on(engine, count):
    assert gpus_of(engine) == count


def test_groups_of_replicas_that_come_and_go_are_made_without_a_watchdog(
    monkeypatch: pytest.MonkeyPatch,
):
    look = ctypes.CDLL(None).getenv  # as torch does, which knows no os.environ
    look.restype = ctypes.c_char_p
    name = "TORCH_NCCL_BLOCKING_WAIT"
    for before in (None, "0"):
        monkeypatch.delenv(name, raising=False)
        if before is not None:
            monkeypatch.setenv(name, before)
        with unwatched_groups():
            assert look(name.encode()) == b"1"
        assert look(name.encode()) == (before.encode() if before is not None else None)
