"""Ranks on one machine meet on loopback; others where they were told."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from cosmos_app.rendezvous import meet_on_loopback

SCRIPT = ("-m", "cosmos_app")
# The second rank fails in the first round. In the next one both add up, and tell where they met.
RANK = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
round = os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gloo", init_method="env://")
rank = dist.get_rank()
total = torch.tensor([rank + 1])
dist.all_reduce(total)
dist.destroy_process_group()
if round == "0" and rank == 1:
    sys.exit(1)
told = [round, os.environ["MASTER_ADDR"], os.environ["TORCHELASTIC_USE_AGENT_STORE"], int(total)]
(Path(sys.argv[0]).parent / f"{rank}.json").write_text(json.dumps(told))
"""


@pytest.mark.parametrize("words", [("--standalone",), (), ("--nnodes=1:1",)])
def test_ranks_on_one_machine_meet_on_loopback(words: tuple[str, ...]) -> None:
    arguments = parse_args([*words, "--nproc-per-node=2", *SCRIPT])
    meet_on_loopback(arguments)
    assert (arguments.rdzv_backend, arguments.rdzv_endpoint) == ("loopback", "127.0.0.1")
    assert not arguments.standalone


@pytest.mark.parametrize(
    "words",
    [
        ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.1:29400"),
        ("--rdzv-backend=c10d", "--rdzv-endpoint=10.0.0.1:29400"),
        ("--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1"),
        ("--nnodes=1", "--node-rank=0", "--master-addr=10.0.0.1", "--master-port=29400"),
    ],
)
def test_ranks_that_were_told_where_to_meet_do_so_there(words: tuple[str, ...]) -> None:
    arguments, before = (parse_args([*words, *SCRIPT]) for _ in range(2))
    meet_on_loopback(arguments)
    assert arguments == before


@pytest.mark.slow
def test_ranks_that_are_started_again_meet_anew(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    words = ("--standalone", "--nproc-per-node=2", "--max-restarts=1")
    command = [sys.executable, "-m", "cosmos_app.torchrun", *words, str(tmp_path / "rank.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert told == [["1", "127.0.0.1", "True", 3]] * 2
