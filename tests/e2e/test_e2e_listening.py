"""Nothing of a run on one machine listens where other machines could reach it."""

import os
import socket
import time

import pytest
from listeners import Listener, listeners
from processes import descendants, naming
from real_runs import SMALL, Run, Runner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def processes_of(run: Run) -> set[int]:
    """Return those that name its directory, with all that they have started."""
    named = {run.process.pid, *naming(str(run.output))} - {os.getpid()}
    return named.union(*map(descendants, named))


def seen_until_the_end(run: Run) -> set[Listener]:
    seen = set[Listener]()
    deadline = time.monotonic() + 200.0
    while run.process.poll() is None and time.monotonic() < deadline:
        seen |= listeners(processes_of(run))
        time.sleep(0.2)
    assert run.finish(10.0) == 0, run.logs()
    return seen


@pytest.mark.parametrize(
    ("overrides", "who"),
    [
        pytest.param(
            ["policy.ranks=2"],
            # the store of torchrun, and what ranks have for sums and weights
            ["redis-server", "cosmos_app.torchrun", "cosmos_app policy", "cosmos_app dashboard"],
            id="ranks",
        ),
        pytest.param(
            ["policy.replicas=2", "elastic.lease_s=5"],
            ["redis-server", "meeting", "policy-0", "policy-1"],
            id="elastic",
        ),
    ],
)
def test_whatever_a_run_listens_on_is_loopback(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, overrides: list[str], who: list[str]
) -> None:
    if "elastic.lease_s=5" in overrides:
        pytest.importorskip("torchft")
    monkeypatch.delenv("COSMOS_HOST", raising=False)
    run = runner.start(*SMALL, "trainer.steps=2", "validation.before=false", *overrides)
    seen = seen_until_the_end(run)
    told = [f"{each.address}:{each.port} {each.process}" for each in seen]
    for words in who:
        assert any(words in each for each in told), (words, told)
    assert [each for each in seen if not each.address.is_loopback] == []


def test_a_socket_on_all_interfaces_would_be_seen() -> None:
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        port = everywhere.getsockname()[1]
        found = {str(each.address) for each in listeners([os.getpid()]) if each.port == port}
    assert found == {"0.0.0.0"}
