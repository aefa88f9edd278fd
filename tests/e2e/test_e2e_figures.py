"""A run's figures where others look: Prometheus while it goes on, TensorBoard and W&B after."""

import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from real_runs import SMALL, Run, Runner
from sinks_read import tensorboard_values, wandb_values

pytest.importorskip("tensorboard")
pytest.importorskip("wandb")
openapi = pytest.importorskip("openapi_spec_validator")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SINKS = "sinks=[{kind='jsonl'}, {kind='tensorboard'}, {kind='wandb', mode='offline'}]"
REWARD = "reward.rewards=[{kind='length', target=0, limit=32}]"  # a random model is never right
Figures = dict[tuple[str, ...], float]


@dataclass
class Seen:
    """What a run's dashboard answered over HTTP, while the run went on.

    Attributes:
        scrapes: pages for Prometheus, one after the other, steps between them.
        kinds: of content, of each.
        schema: that ``/api`` gives.
        unknown: status code of a request without the token.
    """

    scrapes: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    schema: dict[str, Any] = field(default_factory=dict)
    unknown: int = 0


def ask(run: Run, path: str, *, has_token: bool = True) -> tuple[int, str, str]:
    """Return the status, kind of content and text of an answer of the run's dashboard."""
    address = json.loads((run.output / "dashboard.json").read_text())
    headers = {"Authorization": f"Bearer {address['token']}"} if has_token else {}
    request = urllib.request.Request(address["url"].partition("/?")[0] + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as got:
            return got.status, got.headers["Content-Type"], got.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def figures(page: str) -> Figures:
    """Return the samples of a page by name and labels."""
    return {
        (sample.name, *sorted(f"{k}={v}" for k, v in sample.labels.items())): float(sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def step_told(page: str) -> float:
    return figures(page).get(("cosmos_step",), 0.0)


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Seen]]:
    """Run, scrape twice, end the run by Ctrl-C."""
    runner, seen = Runner(tmp_path_factory.mktemp("figures"), forks=True), Seen()
    run = runner.start(*SMALL, SINKS, REWARD, "trainer.steps=100000")
    try:
        run.wait_for(lambda: (run.output / "dashboard.json").exists() and run.steps_done() >= 2)
        for _ in range(2):
            last = max((step_told(page) for page in seen.scrapes), default=0.0)
            run.wait_for(lambda last=last: step_told(ask(run, "/metrics")[2]) > last)
            _, kind, page = ask(run, "/metrics")
            seen.scrapes.append(page)
            seen.kinds.append(kind)
        seen.schema = json.loads(ask(run, "/api")[2])
        seen.unknown, _, _ = ask(run, "/metrics", has_token=False)
        run.process.send_signal(signal.SIGINT)
        assert run.finish() == 3, run.logs()
        yield run, seen
    finally:
        if run.process.poll() is None:
            run.kill()


def rewards(run: Run) -> list[tuple[int, float]]:
    """Return the reward of every step, as lines of JSON have it."""
    told = [r for r in run.metrics("controller") if "reward" in r["values"]]
    return [(record["step"], record["values"]["reward"]) for record in told]


def test_prometheus_reads_a_run_that_goes_on(looked_at: tuple[Run, Seen]) -> None:
    run, seen = looked_at
    assert seen.unknown == 401
    assert all(kind.startswith("text/plain; version=") for kind in seen.kinds)
    first, second = map(figures, seen.scrapes)
    for found in (first, second):
        assert found["cosmos_run_up",] == 1
        assert found["cosmos_steps_planned",] == 100_000
        assert found["cosmos_slots", "replica=rollout-0", "role=rollout"] == 8
        ended = sum(n for key, n in found.items() if key[0] == "cosmos_groups_ended_total")
        in_flight = sum(n for key, n in found.items() if key[0] == "cosmos_groups")
        assert found["cosmos_groups_issued_total",] == ended + in_flight
        measured = ("cosmos_measurement", "name=reward", "replica=controller", "role=controller")
        assert found[measured] in dict(rewards(run)).values()
    assert 1 <= first["cosmos_step",] < second["cosmos_step",] <= run.steps_done()
    counters = {key for key in first if key[0].endswith("_total")}
    assert len(counters) >= 4
    assert all(first[key] <= second[key] for key in counters)
    loads = ("cosmos_weight_loads_total", "replica=rollout-0", "role=rollout")
    assert first[loads] < second[loads]


def test_the_description_of_its_routes_is_openapi(looked_at: tuple[Run, Seen]) -> None:
    _, seen = looked_at
    openapi.validate(seen.schema)
    assert {"/api/run", "/api/stop", "/metrics"} <= seen.schema["paths"].keys()


def test_tensorboard_and_wandb_have_the_reward_of_every_step(
    looked_at: tuple[Run, Seen],
) -> None:
    run, _ = looked_at
    told = rewards(run)
    assert [step for step, _ in told] == [*range(run.steps_done())]
    assert [value for _, value in told] == run.report["rewards"]
    assert len({value for _, value in told}) > 1
    shown = tensorboard_values(run.output, "controller", "controller/reward")
    assert shown == [(step, pytest.approx(value, rel=1e-6)) for step, value in told]
    deadline = time.monotonic() + 60  # W&B's own process may write on when the run has ended
    while len(wandb_values(run.output, "controller", "reward")) < len(told):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert wandb_values(run.output, "controller", "reward") == told


@pytest.mark.parametrize(("role", "replica"), [("policy", "policy-0"), ("rollout", "rollout-0")])
def test_they_have_what_replicas_measured_too(
    looked_at: tuple[Run, Seen], role: str, replica: str
) -> None:
    run, _ = looked_at
    name = {"policy": "loss", "rollout": "stall_s"}[role]
    told = [(r["step"], r["values"][name]) for r in run.metrics(role) if name in r["values"]]
    assert len(told) > 2
    shown = tensorboard_values(run.output, replica, f"{role}/{name}")
    assert shown == [(step, pytest.approx(value, rel=1e-6)) for step, value in told]
    assert wandb_values(run.output, replica, name) == told
