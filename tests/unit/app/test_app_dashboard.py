"""The dashboard: what it remembers, what it answers and to whom, where it listens."""

import io
import itertools
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from clips import write_clip
from msgspec import structs
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from cosmos_app.cli import main
from cosmos_app.dashboard.address import read_address_file, write_address_file
from cosmos_app.dashboard.api import Served, make_app
from cosmos_app.dashboard.config import read_dashboard_config
from cosmos_app.dashboard.example import START_S, write_example_run
from cosmos_app.dashboard.feed import RunFeed
from cosmos_app.dashboard.history import Curve, Point
from cosmos_app.dashboard.pictures import picture_name, thumbnail
from cosmos_app.dashboard.server import bind, check_address, open_address
from cosmos_app.dashboard.tail import Tail
from cosmos_app.errors import DashboardAddressError, DataError
from cosmos_app.listening import exposure
from cosmos_core.messages import Event, ScaleRequested, StopRequested
from cosmos_core.rundir import RunDirectory
from cosmos_core.serving_config import DashboardConfig
from cosmos_core.videos import VideoSampling, video_reference

httpx = pytest.importorskip("httpx")

TOKEN = "a-token-of-our-own"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "example"
    write_example_run(path)
    return path


@pytest.fixture
async def feed(run_dir: Path) -> RunFeed:
    feed = RunFeed(RunDirectory.open(run_dir))
    await feed.look()
    return feed


@pytest.fixture
async def client(feed: RunFeed) -> AsyncIterator[Any]:
    async with client_of(Served(feed=feed, clock=lambda: START_S + 100.0)) as found:
        yield found


def client_of(served: Served) -> Any:
    transport = httpx.ASGITransport(make_app(served, TOKEN))
    return httpx.AsyncClient(transport=transport, base_url="http://here")


BEARER = {"Authorization": f"Bearer {TOKEN}"}


async def test_pictures_of_samples_are_small_copies_and_no_others_are_told_of(client, feed) -> None:
    samples = (await client.get("/api/samples", headers=BEARER)).json()
    name = next(sample["pictures"][0] for sample in samples if sample["pictures"])
    answer = await client.get(f"/api/pictures/{name}", headers=BEARER)
    assert answer.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(answer.content)).size == (8, 8)
    for unknown in ("0123", picture_name("/etc/hostname"), "..%2F..%2Fetc%2Fhostname"):
        answer = await client.get(f"/api/pictures/{unknown}", headers=BEARER)
        assert answer.status_code == 404
    gone = structs.replace(feed.samples[-1], images=("/nowhere/gone.png",))
    feed.samples.append(gone)
    answer = await client.get(f"/api/pictures/{picture_name('/nowhere/gone.png')}", headers=BEARER)
    assert answer.status_code == 404
    assert "nowhere" not in answer.text


def test_of_a_video_some_frames_are_shown_side_by_side(tmp_path: Path) -> None:
    colours = [(255, 0, 0)] * 3 + [(0, 0, 255)] * 5
    clip = write_clip(tmp_path / "clip.mp4", colours, size=(64, 32))
    strip = Image.open(io.BytesIO(thumbnail(video_reference(clip, tmp_path, VideoSampling()))))
    assert strip.size == (4 * 64, 32)
    reds = [strip.getpixel((64 * number + 32, 16)) for number in range(4)]
    assert [pixel[0] > pixel[2] for pixel in reds] == [True, True, False, False]


# ---------------------------------------------------------------- who may see it


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/api",
        "/api/run",
        "/api/replicas",
        "/api/curves",
        "/api/timeline",
        "/api/samples",
        "/api/pictures/0123",
        "/api/events",
        "/api/page",
        "/metrics",
        "/page/dashboard.js",
        "/no/such/route",
    ],
)
async def test_nothing_answers_without_the_token(client: Any, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
        answer = await client.get(path, headers=headers)
        assert answer.status_code == 401
        assert answer.text.startswith("Wrong or missing token")
        assert answer.text.count("\n") == 1
    expected = 404 if path in ("/no/such/route", "/api/pictures/0123") else 200
    assert (await client.get(path, headers=BEARER)).status_code == expected


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_nothing_can_be_changed(client: Any, method: str) -> None:
    answer = await client.request(method, "/api/run", headers=BEARER)
    assert answer.status_code == 405


async def test_a_run_is_stopped_and_scaled_by_whoever_sends_the_token_as_a_header(
    feed: RunFeed,
) -> None:
    sent: list[Event] = []

    async def send(event: Event) -> None:
        sent.append(event)

    async with client_of(Served(feed=feed, clock=lambda: START_S, send=send)) as client:
        await client.get("/", params={"token": TOKEN})
        assert client.cookies, "a browser that has been here"
        assert (await client.post("/api/stop")).status_code == 401
        assert (await client.post("/api/stop", headers=BEARER)).status_code == 202
        scaled = {"rollouts": 3}
        assert (await client.post("/api/scale", params=scaled)).status_code == 401
        assert (await client.post("/api/scale", params=scaled, headers=BEARER)).status_code == 202
        refused = await client.post("/api/scale", params={"rollouts": -1}, headers=BEARER)
        assert refused.status_code == 422
    assert sent == [StopRequested(reason="asked by HTTP"), ScaleRequested(rollouts=3)]


async def test_a_browser_shows_the_token_once_and_keeps_a_cookie(client: Any) -> None:
    answer = await client.get("/", params={"token": TOKEN})
    assert answer.status_code == 303
    assert answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    page = await client.get("/")  # the client holds cookies as a browser does
    assert page.status_code == 200
    assert page.headers["cache-control"] == "no-store"
    assert page.headers["content-security-policy"].startswith("default-src 'self'")


async def test_a_token_in_the_address_opens_the_page_alone(client: Any) -> None:
    answer = await client.get("/api/run", params={"token": TOKEN})
    assert answer.status_code == 401


# ---------------------------------------------------------------- what it answers


async def test_the_run_is_told_from_its_files_alone(client: Any) -> None:
    run = (await client.get("/api/run", headers=BEARER)).json()
    assert run["state"] == "finished"
    assert run["message"] == "all steps done"
    assert (run["step"], run["num_steps"]) == (30, 30)
    assert run["books"]["dropped"] == {"too stale": 1}
    assert run["accuracies"] == {"0": 0.25, "30": 0.8}
    assert run["data_sets"]["code"] == {"0": 0.2, "30": 0.7}


async def test_curves_hold_what_was_measured(client: Any) -> None:
    curves = (await client.get("/api/curves", headers=BEARER)).json()
    assert curves["reward"]["steps"] == list(range(30))
    assert curves["reward"]["values"] == pytest.approx([0.2 + 0.02 * s for s in range(30)])
    # Two engines of 400 + step tokens/s each; the first of each pair of records is one engine's.
    assert curves["tokens_per_s"]["values"][-1] == 2 * 429.0
    # 64 samples every two seconds, from the second step on.
    assert curves["samples_per_s"]["values"] == [32.0] * 29
    assert max(curves["stall_ms"]["values"]) == pytest.approx(49.0)
    assert curves["staleness_mean"]["values"] == [0.0, 1.0, *[1.5] * 28]
    assert curves["staleness_max"]["values"] == [0.0, 1.0, *[2.0] * 28]
    for stage, depth in {"waiting": 1.0, "generating": 6.0, "ready": 2.0}.items():
        assert curves[f"queue_{stage}"]["values"] == [depth] * 30


async def test_the_timeline_is_cut_to_its_window(client: Any) -> None:
    answer = await client.get("/api/timeline", params={"window_s": 5.0}, headers=BEARER)
    policy, first, _ = answer.json()
    assert policy["name"] == "policy-0"
    # The last 5 of 60 s: of each step of 2 s, the second half, its last 100 ms an update.
    spans = [(*s["shares"], round(s["end_s"] - START_S, 3)) for s in policy["spans"]]
    assert spans[:3] == [("training", 55.896), ("updating", 55.996), ("publishing", 56.0)]
    assert policy["spans"][0]["start_s"] == first["spans"][0]["start_s"] == START_S + 55
    assert {*first["spans"][-1]["shares"].values()} == {0.75, 0.15, 0.05, 0.03}
    refused = await client.get("/api/timeline", params={"window_s": -1}, headers=BEARER)
    assert refused.status_code == 422


async def test_a_page_that_is_not_new_is_not_sent_again(client: Any, feed: RunFeed) -> None:
    first = await client.get("/api/page", headers=BEARER)
    known = {**BEARER, "If-None-Match": first.headers["etag"]}
    assert (await client.get("/api/page", headers=known)).status_code == 304
    with feed.run.metrics.open("a") as file:
        file.write('{"time_s":1800000099,"role":"controller","replica":"controller","step":30,')
        file.write('"values":{"reward":"NaN"}}\n')
    await feed.look()
    again = await client.get("/api/page", headers=known)
    assert again.status_code == 200
    assert again.json()["curves"]["reward"]["values"][-1] == pytest.approx(0.78)  # NaN is no value


READ_ROUTES = {
    "/api/run",
    "/api/replicas",
    "/api/curves",
    "/api/timeline",
    "/api/samples",
    "/api/pictures/{name}",
    "/api/events",
    "/api/page",
    "/metrics",
}


async def test_the_schema_names_every_route(client: Any) -> None:
    schema = (await client.get("/api", headers=BEARER)).json()
    assert schema["openapi"].startswith("3.")
    assert set(schema["paths"]) == READ_ROUTES
    assert {*itertools.chain(*schema["paths"].values())} == {"get"}
    shares = schema["components"]["schemas"]["ReplicaView"]["properties"]
    assert {"doing", "version", "idle_share", "stalled_s"} <= set(shares)


async def test_the_schema_of_a_run_that_can_be_told_something_names_what(feed: RunFeed) -> None:
    async def send(event: Event) -> None: ...

    async with client_of(Served(feed=feed, clock=lambda: START_S, send=send)) as client:
        paths = (await client.get("/api", headers=BEARER)).json()["paths"]
    told = {path: of["post"] for path, of in paths.items() if path not in READ_ROUTES}
    assert {path: {field["name"] for field in of["parameters"]} for path, of in told.items()} == {
        "/api/stop": {"reason"},
        "/api/scale": {"rollouts", "policies"},
    }
    assert set().union(*(of["responses"] for of in told.values())) == {"202", "401", "422", "503"}


async def test_prometheus_reads_the_figures(client: Any) -> None:
    answer = await client.get("/metrics", headers=BEARER)
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert found["cosmos_step",] == 30
    assert found["cosmos_groups_ended_total", ("how", "consumed")] == 240
    where = (("replica", "rollout-1"), ("role", "rollout"))
    assert found[("cosmos_stalled_seconds_total", *where)] == pytest.approx(1.035)
    named = (("name", "reward"), ("replica", "controller"), ("role", "controller"))
    assert found[("cosmos_measurement", *named)] == pytest.approx(0.78)


# ---------------------------------------------------------------- bounded memory


def test_a_curve_of_any_length_stays_bounded_and_ends_with_the_newest() -> None:
    curve = Curve(most=8)
    for step in range(1000):
        curve.add(Point(float(step), step, float(step)))
    points = curve.points()
    assert len(points) <= 9
    assert points[0].step == 0
    assert points[-1].step == 999
    gaps = {b.step - a.step for a, b in itertools.pairwise(points[:-1])}
    assert len(gaps) == 1, "thinned evenly"


def test_a_file_that_grows_is_read_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path, most_bytes=8)
    assert tail.lines() == []
    path.write_bytes(b"one\ntw")
    assert tail.lines() == [b"one"]
    path.write_bytes(b"one\ntwo\n")
    assert tail.lines() == [b"two"]
    with path.open("ab") as file:
        file.write(b"a line that is too long\nshort\n")
    found = [line for _ in range(8) for line in tail.lines()]
    assert found == [b"short"]
    path.write_bytes(b"new\n")
    assert tail.lines() == [b"new"]


async def test_damaged_lines_are_counted_and_passed_over(run_dir: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl", "samples/shown-rollout-0.jsonl"):
        with (run_dir / name).open("a") as file:
            file.write('{"broken\n[]\n')
    feed = RunFeed(RunDirectory.open(run_dir))
    await feed.look()
    assert feed.num_bad_lines == 2
    assert len(feed.samples) == 30
    assert feed.history.curves["reward"].newest == Point(START_S + 60.0, 29, pytest.approx(0.78))


# ---------------------------------------------------------------- where it listens


def test_a_port_in_use_is_named_with_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DashboardAddressError, match=rf"127.0.0.1 port {port} .*in use"):
            check_address(DashboardConfig(port=port))
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(f"output = '{tmp_path / 'run'}'\n[dashboard]\nport = {port}\n")
        result = CliRunner().invoke(main, ["run", str(recipe)])
    assert result.exit_code == 2
    assert "dashboard.port=0" in result.output
    assert not (tmp_path / "run").exists()


def test_replay_of_a_port_in_use_ends_with_a_code(run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(main, ["replay", str(run_dir), "--port", str(port)])
    assert result.exit_code == 2
    assert f"port {port}" in result.output


def test_the_same_run_has_the_same_address_again_for_its_owner_alone(run_dir: Path) -> None:
    run = RunDirectory.open(run_dir)
    first, address = open_address(DashboardConfig(), run)
    write_address_file(run, address)
    first.close()
    second, again = open_address(DashboardConfig(), run)
    second.close()
    assert again == address == read_address_file(run)
    assert (run_dir / "dashboard.json").stat().st_mode & 0o777 == 0o600
    assert len(address.token) == 32


def test_it_listens_on_loopback_unless_told_otherwise() -> None:
    with bind(DashboardConfig()) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
    assert exposure("::1") == exposure("localhost") == exposure("127.0.0.2") == ""
    assert "nothing is encrypted" in exposure("0.0.0.0")


@pytest.mark.parametrize(
    "content", ["", "short", "has spaces in its sixteen", 'quo"te-and-more-of-it']
)
def test_a_token_file_without_a_good_token_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    with pytest.raises(DataError, match=r"dashboard\.token_file"):
        check_address(DashboardConfig(token_file=path))


def test_a_token_of_ones_own_is_used(tmp_path: Path, run_dir: Path) -> None:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\nignored\n")
    listening, address = open_address(DashboardConfig(token_file=path), RunDirectory.open(run_dir))
    listening.close()
    assert address.token == "0123456789abcdef"


def test_a_run_from_before_the_dashboard_has_its_defaults(run_dir: Path) -> None:
    assert read_dashboard_config(run_dir / "config.json") == DashboardConfig()


# ---------------------------------------------------------------- the list of events


def test_events_are_listed_for_people_and_for_programs(run_dir: Path) -> None:
    listed = CliRunner().invoke(main, ["replay", str(run_dir), "--list"]).output.splitlines()
    assert len(listed) == 5
    assert listed[-1].endswith("rollout-1    left: signal 9 (SIGKILL)")
    as_json = CliRunner().invoke(main, ["replay", str(run_dir), "--json", "--all"]).output
    events = [json.loads(line) for line in as_json.splitlines()]
    assert len(events) == 5 + 30 * 5
    assert events[3]["type"] == "GroupFinished"


def test_a_directory_without_events_says_why(tmp_path: Path, run_dir: Path) -> None:
    (run_dir / "events.jsonl").unlink()
    result = CliRunner().invoke(main, ["replay", str(run_dir), "--list"])
    assert result.exit_code == 2
    assert "no events.jsonl" in result.output
    nowhere = CliRunner().invoke(main, ["replay", str(tmp_path / "nowhere")])
    assert nowhere.exit_code == 2
    assert "is not the directory of a run" in nowhere.output
