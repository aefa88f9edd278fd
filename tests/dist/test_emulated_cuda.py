"""The code of GPUs on a device of host memory: what asks for one, and runs that take what is there.

Kernels and speed are for `make test-gpu` on a real one.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from capabilities import skip_without
from emulated import build, environment, has_compiler
from real_runs import ROOT, SMALL, Runner, assert_balanced

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
NUM_DEVICES = 4
ASKING = (  # marked gpu
    "unit/parallel/test_parallel_checkpoint.py::test_a_learner_resumed_on_a_device_takes_the_same_steps",
    "unit/parallel/test_parallel_replicas.py::test_a_sum_on_devices_tells_of_a_member_that_died",
    "unit/parallel/test_parallel_replicas.py::test_a_group_on_devices_waits_for_members_no_longer_than_it_is_told",
    "unit/weightsync/test_weightsync_quantised.py::test_a_gpu_writes_the_bytes_of_a_cpu",
    "contract/test_weightsync_gpu.py::test_what_a_gpu_casts_and_packs_is_what_a_processor_would",
    "contract/test_weightsync_gpu.py::test_an_edge_moves_its_boxes_between_processes",
    "contract/test_weightsync_gpu.py::test_nccl_waits_no_longer_than_the_deadline_for_an_end_that_does_not_come",
)
CONTRACT = "tests/contract/test_weightsync_transports.py"  # of which those of cuda_ipc
TAKING = (  # world models, trained where `cosmos-app wfm run` finds a device
    "unit/app/test_app_wfm.py::test_a_recipe_goes_from_a_file_to_a_checkpoint",
    "unit/app/test_app_wfm.py::test_supervised_recipes_run_too_in_bfloat16_from_a_cache_with_pictures_logged",
    "unit/app/test_app_wfm.py::test_recipes_on_mock_data_need_a_model_only[sd3_nft_mock]",
)


SENDER = """
import sys, torch
from cosmos_weightsync import WeightSender, shards_of
torch.manual_seed(0)
sender = WeightSender(shards_of(torch.nn.Linear(300, 200).cuda()))
sender.publish(1)
print(sender.endpoint, flush=True)
sys.stdin.read()
sender.close()
"""
RECEIVER = """
import sys, torch
from cosmos_weightsync import ReceiverConfig, WeightReceiver, shards_of
torch.manual_seed(0)
sent, served = torch.nn.Linear(300, 200), torch.nn.Linear(300, 200).cuda()
with torch.no_grad():
    served.weight.zero_()
config = ReceiverConfig(mode="in_place", connect_timeout_s=20.0)
receiver = WeightReceiver([sys.argv[1]], wanted=shards_of(served), config=config)
receiver.stage(1)
receiver.commit()
print(torch.equal(sent.weight, served.weight.cpu()))
receiver.close()
"""


@pytest.fixture(scope="module", autouse=True)
def devices(tmp_path_factory: pytest.TempPathFactory):
    """Have what the tests start find devices."""
    if torch.cuda.is_available():
        skip_without("no-gpu")
    if not has_compiler():
        skip_without("compiler")
    folder = tmp_path_factory.mktemp("device")
    library, races = build(folder), folder / "races.txt"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(library, NUM_DEVICES, races).items():
            patch.setenv(name, value)
        yield races


@pytest.fixture(autouse=True)
def ordered(devices: Path):
    """Hold every test to leave nothing unordered on its streams."""
    yield
    found = devices.read_text() if devices.exists() else ""
    devices.unlink(missing_ok=True)
    assert found == ""


def test_the_host_does_not_reach_what_the_device_holds():
    script = """
import ctypes, torch
held = torch.arange(6.0, device="cuda:1")
assert held.sum().item() == 15.0
for mixed in (torch.ones(6), torch.ones(6, device="cuda:0")):
    try:
        held + mixed
    except RuntimeError as error:
        print("same device" in str(error))
print(flush=True)
ctypes.string_at(held.data_ptr(), 4)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["True", "True"], done.stderr
    assert done.returncode < 0  # a fault, as of a pointer that is not the host's


CASES = {
    "a snapshot that the next step does not wait for": """
        with torch.cuda.stream(side):
            kept = weights.clone()
        weights.mul_(2)
    """,
    "that waits": """
        with torch.cuda.stream(side):
            kept = weights.clone()
        torch.cuda.current_stream().wait_stream(side)
        weights.mul_(2)
    """,
    "a snapshot that does not wait for the step before": """
        weights.mul_(2)
        with torch.cuda.stream(side):
            kept = weights.clone()
    """,
    "parts that do not meet": """
        with torch.cuda.stream(side):
            weights[:50].mul_(2)
        weights[50:].mul_(2)
    """,
    "the host reads before the event": """
        pinned.copy_(weights, non_blocking=True)
        event = torch.cuda.current_stream().record_event()
        found = pinned.numpy().sum()
    """,
    "and after it": """
        pinned.copy_(weights, non_blocking=True)
        event = torch.cuda.current_stream().record_event()
        event.synchronize()
        found = pinned.numpy().sum()
    """,
    "the host overwrites what is still copied": """
        weights.copy_(pinned, non_blocking=True)
        pinned.zero_()
    """,
    "memory freed under another stream": """
        with torch.cuda.stream(side):
            kept = weights * 2
        del weights
        other = torch.zeros(100, device="cuda")
    """,
    "and used again once it is waited for": """
        with torch.cuda.stream(side):
            kept = weights * 2
        del weights
        torch.cuda.current_stream().wait_stream(side)
        other = torch.zeros(100, device="cuda")
    """,
    "with its stream recorded": """
        with torch.cuda.stream(side):
            kept = weights * 2
        weights.record_stream(side)
        del weights
        other = torch.zeros(100, device="cuda")
    """,
    "a thread that does not know its parent's stream": """
        def double():
            weights.mul_(2)
        with torch.cuda.stream(side):
            weights.add_(1)
            thread = threading.Thread(target=double)
            thread.start()
            thread.join()
    """,
    "a sum that nobody waited for": """
        work = torch.distributed.all_reduce(weights, async_op=True)
        weights.mul_(2)
        work.wait()
    """,
    "that was waited for": """
        torch.distributed.all_reduce(weights, async_op=True).wait()
        weights.mul_(2)
    """,
}
TOLD = {
    "a snapshot that the next step does not wait for": "aten::mul writing on cuda:0 stream 0 "
    "is not ordered after copy_ reading on cuda:0 stream 1",
    "a snapshot that does not wait for the step before": "copy_ reading on cuda:0 stream 1 "
    "is not ordered after aten::mul writing on cuda:0 stream 0",
    "the host reads before the event": "the host touches page-locked memory "
    "before the end of copy_ writing on cuda:0 stream 0",
    "the host overwrites what is still copied": "the host touches page-locked memory "
    "before the end of copy_ reading on cuda:0 stream 0",
    "memory freed under another stream": "aten::zero_ writing on cuda:0 stream 0 uses memory "
    "that was freed before the end of aten::mul reading on cuda:0 stream 1, without record_stream",
    "a thread that does not know its parent's stream": "aten::mul reading on cuda:0 stream 0 "
    "is not ordered after aten::add writing on cuda:0 stream 1",
    "a sum that nobody waited for": "aten::mul reading on cuda:0 stream 0 "
    "is not ordered after ALLREDUCE writing on cuda:0 group 1",
}
STREAMS = """
import json, sys, textwrap, threading, torch
import emulated_device
store = torch.distributed.HashStore()
torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
told = {}
for name, code in json.loads(sys.argv[1]).items():
    names = {"torch": torch, "threading": threading, "side": torch.cuda.Stream()}
    names["weights"] = torch.ones(100, device="cuda")
    names["pinned"] = torch.ones(100, pin_memory=True)
    torch.cuda.synchronize()
    exec(textwrap.dedent(code), names)
    told[name] = [race.splitlines()[0] for race in emulated_device.races()]
    torch.cuda.synchronize()
    names.clear()
    assert not emulated_device.races(), name
print(json.dumps(told))
"""


def test_what_streams_leave_unordered_is_told(devices):
    done = subprocess.run(
        [sys.executable, "-c", STREAMS, json.dumps(CASES)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    told = json.loads(done.stdout)
    assert list(told) == list(CASES)
    assert {
        name: re.sub(r"stream [1-9]\d*", "stream 1", races[0])
        for name, races in told.items()
        if races
    } == TOLD
    devices.unlink()  # as it should be


@pytest.mark.parametrize(
    "chosen",
    [[f"tests/{test}" for test in (*ASKING, *TAKING)], [CONTRACT, "-k", "cuda_ipc"]],
    ids=["tests", "contract"],
)
def test_what_runs_on_a_device_passes_on_it(tmp_path, chosen):
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu or not gpu"]
    command += ["-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inner'}", *chosen]
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout


@pytest.mark.thorough
def test_a_run_of_two_ranks_and_an_engine_has_a_device_for_each(tmp_path: Path):
    run = Runner(tmp_path).complete(
        *SMALL, "trainer.steps=3", "policy.ranks=2", "rollout.engine.device=cuda",
        "trainer.checkpoint_every=2", "learner.ema.decay=0.9",
        "learner.offload_activations=true",
    )  # fmt: skip
    assert_balanced(run.report["books"])
    for line in ("GPU 0: policy-0", "GPU 1: policy-0", "GPU 3: rollout-0"):
        assert line in run.text
    assert run.steps_done() == 3


def test_a_snapshot_is_page_locked_as_long_as_it_is_and_others_may_map_it():
    script = """
import os, torch
from cosmos_weightsync.arenas import Arena
arena = Arena([(3, 1 << 20)], [torch.uint8], memory="pinned")
tensor = arena.tensors[0]
print(tensor.is_pinned(), os.fstat(arena.descriptor).st_size == 3 << 20)
tensor.copy_(torch.ones(3, 1 << 20, dtype=torch.uint8, device="cuda"), non_blocking=True)
torch.cuda.synchronize()
print(os.pread(arena.descriptor, 1, 0)[0] == 1)
del arena
print(tensor.is_pinned())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True", "True", "False"], done.stderr


@pytest.mark.thorough
def test_the_benchmark_of_training_has_both_arms_on_the_device():
    script = ROOT / "benchmarks" / "training_titan.py"
    done = subprocess.run(
        [sys.executable, str(script), "--quick", "--attention", "sdpa"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    arms = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| c")]
    arms += [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| t")]
    (ours, theirs) = arms
    assert ours[4] == theirs[4]  # the first loss, in bfloat16; a processor's is in float32
    assert ours[3].endswith("%")


@pytest.mark.parametrize("seen", ["1", "0"], ids=["through the host", "over cuda ipc"])
def test_weights_reach_a_process_that_sees_another_gpu_or_the_senders(seen):
    def start(script, device, *arguments):
        return subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": device},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    with start(SENDER, "0") as sender:
        endpoint = sender.stdout.readline().strip()
        with start(RECEIVER, seen, endpoint) as receiver:
            told, _ = receiver.communicate(timeout=300)
        sender.stdin.close()
    assert told.split() == ["True"]
    assert (sender.returncode, receiver.returncode) == (0, 0)
