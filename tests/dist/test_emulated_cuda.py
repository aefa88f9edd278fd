"""The code of GPUs on a device of host memory: what asks for one, and runs that take what is there.

Wrong use of streams, kernels and speed are for `make test-gpu` on a real one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulated import build, environment, why_not
from real_runs import ROOT, SMALL, Runner, assert_balanced

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
NUM_DEVICES = 4
ASKING = (  # marked gpu
    "unit/parallel/test_parallel_checkpoint.py::test_a_learner_resumed_on_a_device_takes_the_same_steps",
    "unit/parallel/test_parallel_replicas.py::test_a_sum_on_devices_tells_of_a_member_that_died",
    "unit/weightsync/test_weightsync_quantised.py::test_a_gpu_writes_the_bytes_of_a_cpu",
    "contract/test_weightsync_gpu.py::test_what_a_gpu_casts_and_packs_is_what_a_processor_would",
    "contract/test_weightsync_gpu.py::test_an_edge_moves_its_boxes_between_processes[nccl-cuda-cuda:1]",
)
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
    if why_not():
        pytest.skip(why_not())
    library = build(tmp_path_factory.mktemp("device"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(library, NUM_DEVICES).items():
            patch.setenv(name, value)
        yield


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


@pytest.mark.parametrize("tests", [ASKING, TAKING], ids=["asking", "taking"])
def test_what_runs_on_a_device_passes_on_it(tests, tmp_path):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu or not gpu",
        "-p",
        "no:cacheprovider",
    ]
    command += [f"--basetemp={tmp_path / 'inner'}", *(str(ROOT / "tests" / test) for test in tests)]
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout


def test_a_run_of_two_ranks_and_an_engine_has_a_device_for_each(tmp_path: Path):
    run = Runner(tmp_path).complete(
        *SMALL, "trainer.steps=3", "policy.ranks=2", "rollout.engine.device=cuda",
        "trainer.checkpoint_every=2", "learner.ema.decay=0.9",
    )  # fmt: skip
    assert_balanced(run.report["books"])
    for line in ("GPU 0: policy-0", "GPU 1: policy-0", "GPU 3: rollout-0"):
        assert line in run.text
    assert run.steps_done() == 3


def test_weights_reach_a_process_that_does_not_see_the_senders_gpu():
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
        with start(RECEIVER, "1", endpoint) as receiver:
            told, _ = receiver.communicate(timeout=300)
        sender.stdin.close()
    assert told.split() == ["True"]
    assert (sender.returncode, receiver.returncode) == (0, 0)
