"""A run's figures where others look: Prometheus while it goes on, TensorBoard and W&B after.

And the dashboard's page in a browser, while it goes on and after.
"""

import itertools
import json
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from browser import open_browser
from drawn import Line, lane_classes, lane_shares, points_drawn, points_of, row_of
from pages import Replay, text, wait_for
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
def going_on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Seen]]:
    """Run and scrape twice."""
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
        yield run, seen
    finally:
        if run.process.poll() is None:
            run.kill()


@pytest.fixture(scope="module")
def looked_at(going_on: tuple[Run, Seen]) -> tuple[Run, Seen]:
    """The same when it has enough to draw, and Ctrl-C has ended it."""
    run, _ = going_on
    run.wait_for(lambda: run.steps_done() >= 20 and len(activities(run)) >= 4)
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 3, run.logs()
    return going_on


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def test_the_page_of_a_run_that_goes_on_says_and_draws_what_its_replicas_do(
    browser: Any, going_on: tuple[Run, Seen]
) -> None:
    """It is the first test, as all others are of the run when it has ended."""
    run, _ = going_on

    def says(replica: str, words: str) -> None:
        wait_for(lambda: re.match(words, row_of(browser, replica)), f"{replica}: {words}")

    def step() -> int:
        return int(text(browser, "#steps").split()[1])

    browser.get(json.loads((run.output / "dashboard.json").read_text())["url"])
    browser.execute_script("window.isTheFirst = true")
    wait_for(lambda: text(browser, "#state") == "running", "the drawn page")
    assert re.fullmatch(r"step \d+ of 100000", text(browser, "#steps"))
    says("rollout-0", r"generating [1-8] of 8 groups")
    says("policy-0", r"training step \d+ for \d+\.\d s")
    first, taken = step(), run.steps_done()
    wait_for(lambda: step() >= max(first, taken) + 2, "later steps")
    wait_for(lambda: len(lane_classes(browser)) == 2, "two lanes")
    lanes = lane_classes(browser)
    assert {"training", "updating"} <= lanes["policy-0"]
    assert {"generating", "mark"} <= lanes["rollout-0"]
    shown = float(text(browser, "#f-reward").split()[0])
    assert shown in [pytest.approx(value, abs=0.0051) for _, value in rewards(run)]
    assert browser.execute_script("return window.isTheFirst"), "the page was reloaded"


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


@pytest.fixture(scope="module")
def replayed(browser: Any, looked_at: tuple[Run, Seen]) -> Iterator[tuple[Any, Run]]:
    """The page of the run that has ended."""
    run, _ = looked_at
    replay = Replay(run.output)
    browser.get(f"{replay.place}/?token={replay.token}")
    wait_for(lambda: text(browser, "#state") == "finished", "the drawn page")
    yield browser, run
    replay.end()


def activities(run: Run) -> list[dict[str, Any]]:
    """Return what the rollout told of its time."""
    return [r for r in run.metrics("rollout") if "decoding_share" in r["values"]]


def by_step(run: Run, name: str) -> Line:
    return [(r["step"], r["values"][name]) for r in run.metrics("controller")]


def curves(run: Run) -> dict[str, list[Line]]:
    """Return the curves of each figure, as the files of a run have them."""
    reward = list(enumerate(run.report["rewards"]))
    held_out = sorted((int(version), a) for version, a in run.report["accuracies"].items())
    stalls = [
        (r["time_s"], 1e3 * r["values"]["stall_s"])
        for r in run.metrics("rollout")
        if "stall_s" in r["values"]
    ]
    return {
        "reward": [reward, held_out],
        "staleness": [by_step(run, f"staleness_{of}") for of in ("mean", "max")],
        "queues": [by_step(run, f"queue_{of}") for of in ("generating", "ready", "waiting")],
        "stalls": [stalls],
    }


@pytest.mark.parametrize("figure", ["reward", "staleness", "queues", "stalls"])
def test_the_page_draws_each_curve_as_it_was_measured(
    replayed: tuple[Any, Run], figure: str
) -> None:
    page, run = replayed
    measured = curves(run)[figure]
    assert len(measured[0]) > 5
    drawn, expected = points_drawn(page, figure), points_of(page, figure, measured)
    assert [len(line) for line in drawn] == [len(line) for line in expected]
    for line, wanted in zip(drawn, expected, strict=True):
        for point, place in zip(line, wanted, strict=True):
            assert point == pytest.approx(place, abs=0.06), "a tenth of a pixel is what is written"


def test_the_page_says_what_the_report_does(replayed: tuple[Any, Run]) -> None:
    page, run = replayed
    report = run.report
    assert float(text(page, "#f-reward").split()[0]) == pytest.approx(
        report["rewards"][-1], abs=0.0051
    )
    assert max(value for _, value in by_step(run, "staleness_max")) == report["staleness"][1]
    assert text(page, "#f-staleness").endswith(
        f" mean, max {by_step(run, 'staleness_max')[-1][1]:.0f}"
    )
    middle, most = report["stall_ms"]
    said = [float(number) for number in re.findall(r"\d+", text(page, "#f-stalls"))]
    assert said == [pytest.approx(middle, abs=0.51), pytest.approx(most, abs=0.51)]
    in_flight = sum(report["books"]["in_flight"].values())
    assert text(page, "#f-queues") == f"{in_flight} groups in flight"


def test_the_lanes_of_the_page_have_the_bubbles_that_were_measured(
    replayed: tuple[Any, Run],
) -> None:
    page, run = replayed
    kinds, shares = lane_classes(page), lane_shares(page)
    assert kinds.keys() == shares.keys() == {"policy-0", "rollout-0"}
    assert {"training", "updating", "validating"} <= kinds["policy-0"]
    assert {"generating", "scoring", "mark"} <= kinds["rollout-0"]
    for of in shares.values():
        assert sum(of.values()) == pytest.approx(100, abs=len(of)), "each is rounded, or left out"
    steps = [r for r in run.metrics("policy") if "train_s" in r["values"]]
    told = activities(run)
    begun = steps[0]["time_s"] - sum(
        steps[0]["values"].get(f"{of}_s", 0.0) for of in ("save", "wait", "train", "publish")
    )  # with a validation
    whole_s = max(steps[-1]["time_s"], told[-1]["time_s"]) - begun

    def seconds(share: str) -> float:
        """Of a rollout, which says it of the time since it spoke last."""
        pairs = itertools.pairwise(told)
        return sum(r["values"].get(share, 0.0) * (r["time_s"] - b["time_s"]) for b, r in pairs)

    policy, rollout = shares["policy-0"], shares["rollout-0"]
    work_s = sum(r["values"]["train_s"] - r["values"].get("optim_s", 0.0) for r in steps)
    for shown, measured_s in (
        (policy["training"], work_s),
        (policy["validating"], sum(r["values"].get("validate_s", 0.0) for r in steps)),
        (rollout["generating"], seconds("decoding_share")),
        (rollout.get("scoring", 0.0), seconds("waiting_for_rewards_share")),
    ):
        assert shown == pytest.approx(100 * measured_s / whole_s, abs=1.5)
