"""What a plan says does not depend on the process that makes it."""

import os
import subprocess
import sys

# Names in a set and dictionaries: their order is where the hash of text would show.
PLAN = """
import json
from cosmos_weightsync import Box, Layout, ShardSpec, Topology, plan_transfer
names = [f"layers.{i}.weight" for i in range(12)]
def side(ranks, is_whole):
    rows = 24 // (1 if is_whole else ranks)
    return Layout.from_ranks([
        [ShardSpec(n, (24, 5), Box((0 if is_whole else r * rows, 0),
                   (24 if is_whole else (r + 1) * rows, 5)), "bfloat16") for n in names]
        for r in range(ranks)])
senders, receivers = side(4, False), side(3, True)
plan = plan_transfer(senders, receivers, Topology.uniform(4, 3, gpus_per_host=2))
pieces = [[p.name, p.box.start, p.box.stop, p.source, p.receiver, p.num_bytes]
          for p in plan.pieces()]
layouts = [senders.digest(), receivers.digest(), senders.to_json(), receivers.to_json()]
print(json.dumps([plan.digest(), pieces, plan.edge_bytes().tolist(), layouts]))
"""


def test_two_processes_that_hash_text_differently_make_the_same_plan():
    found = [
        subprocess.run(
            [sys.executable, "-c", PLAN],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1]
    assert found[0].count(b"layers.11.weight") >= 12
