"""The dashboard of a world model's run: what it reads, what it serves, and what it refuses."""

import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("diffusers")

from cosmos_app.cli import main
from cosmos_app.dashboard.history import Curve, Point
from cosmos_app.wfm.dashboard.api import make_world_model_app
from cosmos_app.wfm.dashboard.feed import WorldModelFeed
from cosmos_app.wfm.dashboard.galleries import Galleries
from cosmos_app.wfm.dashboard.recorded import is_world_model_run, open_world_model_run
from cosmos_wfm import ValidationConfig, write_samples
from cosmos_wfm.gallery import write_gallery
from cosmos_wfm.sample_rewards import SampleRewards

httpx = pytest.importorskip("httpx")

TOKEN = "a-token-of-our-own"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
SHOWN = ValidationConfig(prompts=("a red square", "<img src=x>"), samples_per_prompt=2)


def draw(run_dir: Path, step: int, *, brightness: float, frames: int = 0) -> Path:
    """Write a validation as a run does, of even pictures of a brightness from 0 to 1."""
    size = (frames, 16, 16) if frames else (16, 16)
    pixels = torch.full((2, 2, 3, *size), 2 * brightness - 1)
    directory = run_dir / "validation" / f"step_{step}"
    write_samples(pixels, directory)
    earned = SampleRewards(rewards={"brightness": brightness}, reward=2 * brightness)
    write_gallery(pixels, directory, SHOWN, step=step, rewards=[[earned] * 2] * 2)
    return directory


def judge(run_dir: Path, step: int, *, brightness: float) -> None:
    """Write the figures of a validation as a run does."""
    figures = {"validation/reward": 2 * brightness, "validation/reward/brightness": brightness}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, **figures, "validation/failed": 0.0}) + "\n")


def measure(run_dir: Path, *steps: int, **figures: float) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "loss": 1 / step, **figures}) + "\n")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "shapes"
    path.mkdir()
    (path / "recipe.json").write_text(json.dumps({"kind": "wfm_rl", "num_steps": 4}))
    judge(path, 0, brightness=0.25)
    measure(path, 1, 2, reward=0.5)
    judge(path, 2, brightness=0.75)
    draw(path, 0, brightness=0.25)
    draw(path, 2, brightness=0.75)
    return path


@pytest.fixture
async def feed(run_dir: Path) -> WorldModelFeed:
    feed = WorldModelFeed(open_world_model_run(run_dir), is_live=False)
    await feed.look()
    return feed


@pytest.fixture
async def client(feed: WorldModelFeed) -> AsyncIterator[Any]:
    transport = httpx.ASGITransport(make_world_model_app(feed, TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as found:
        yield found


async def test_curves_are_rewards_first_and_then_what_was_measured(client: Any) -> None:
    curves = (await client.get("/api/curves", headers=BEARER)).json()
    assert [one["name"] for one in curves] == [
        "reward",
        "validation/reward",
        "loss",
        "validation/failed",
        "validation/reward/brightness",
    ]
    assert curves[1] == {"name": "validation/reward", "steps": [0, 2], "values": [0.5, 1.5]}
    assert curves[2] == {"name": "loss", "steps": [1, 2], "values": [1.0, 0.5]}


async def test_the_gallery_has_each_sample_and_its_files_are_served(client: Any) -> None:
    gallery = (await client.get("/api/gallery", headers=BEARER)).json()
    assert [validation["step"] for validation in gallery] == [0, 2]
    assert [sample["prompt"] for sample in gallery[1]["samples"]] == [
        *["a red square"] * 2,
        *["<img src=x>"] * 2,
    ]
    picture = gallery[1]["samples"][3]["picture"]
    answer = await client.get(f"/api/gallery/2/{picture}", headers=BEARER)
    assert answer.headers["content-type"] == "image/png"
    assert answer.content.startswith(b"\x89PNG")


async def test_a_video_is_served_in_the_pieces_that_a_player_asks_for(
    client: Any, run_dir: Path, feed: WorldModelFeed
) -> None:
    draw(run_dir, 4, brightness=0.5, frames=5)
    await feed.look()
    answer = await client.get("/api/gallery/4/1_0.mp4", headers={**BEARER, "Range": "bytes=4-7"})
    assert (answer.status_code, answer.content) == (206, b"ftyp")
    assert answer.headers["content-type"] == "video/mp4"
    poster = await client.get("/api/gallery/4/samples/1_0.png", headers=BEARER)
    assert poster.content.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "path",
    ["/", "/api/run", "/api/page", "/api/gallery", "/api/gallery/0/samples/0_0.png", "/metrics"],
)
async def test_nothing_answers_without_the_token(client: Any, path: str) -> None:
    assert (await client.get(path)).status_code == 401
    assert (await client.get(path, headers=BEARER)).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/api/gallery/0/grid.png",  # there, but no sample's
        "/api/gallery/1/samples/0_0.png",
        "/api/gallery/0/../../recipe.json",
        "/api/gallery/0/..%2F..%2Frecipe.json",
        "/api/gallery/0/%2Fetc%2Fhostname",
        "/api/gallery/-1/samples/0_0.png",
        "/api/gallery/x/samples/0_0.png",
    ],
)
async def test_no_other_file_is_served(client: Any, path: str) -> None:
    assert (await client.get(path, headers=BEARER)).status_code in (404, 422)


@pytest.mark.parametrize(
    "name",
    ["/etc/hostname", "../../secret.png", "../step_2/samples/0_0.png", "link.png", "a\0.png"],
)
def test_an_index_that_names_files_elsewhere_has_none_served(run_dir: Path, name: str) -> None:
    (run_dir / "secret.png").write_bytes(b"secret")
    directory = run_dir / "validation" / "step_0"
    (directory / "link.png").symlink_to(run_dir / "secret.png")
    index = json.loads((directory / "index.json").read_text())
    index["samples"][0]["picture"] = name
    (directory / "index.json").write_text(json.dumps(index))
    galleries = Galleries(run_dir)
    galleries.look()
    assert galleries.by_step()[0][0].picture == name
    assert galleries.file_of(0, name) is None


def test_a_step_directory_that_leads_elsewhere_has_none_served(run_dir: Path) -> None:
    elsewhere = run_dir.parent / "elsewhere"
    (run_dir / "validation" / "step_2").rename(elsewhere)
    (run_dir / "validation" / "step_2").symlink_to(elsewhere)
    galleries = Galleries(run_dir)
    galleries.look()
    assert galleries.file_of(2, "samples/0_0.png") is None
    assert galleries.file_of(0, "samples/0_0.png") is not None


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[1]", '{"samples": [{"row": "x"}]}', '{"samples": 3}', "\xff", "[" * 100_000],
)
async def test_an_index_that_is_none_is_counted_and_the_others_stay(
    run_dir: Path, feed: WorldModelFeed, client: Any, content: str
) -> None:
    path = run_dir / "validation" / "step_0" / "index.json"
    path.write_text(content, encoding="latin-1")
    await feed.look()
    assert list(feed.galleries.by_step()) == [2]
    message = (await client.get("/api/run", headers=BEARER)).json()["message"]
    assert message.endswith("1 indices cannot be read")


async def test_what_is_drawn_and_removed_later_is_followed(
    run_dir: Path, feed: WorldModelFeed
) -> None:
    before = feed.gallery_revision
    await feed.look()
    assert feed.gallery_revision == before
    draw(run_dir, 3, brightness=0.5)
    (run_dir / "validation" / "step_0" / "index.json").unlink()
    await feed.look()
    assert feed.gallery_revision == before + 1
    assert list(feed.galleries.by_step()) == [2, 3]


async def test_steps_that_are_taken_again_are_not_drawn_twice(
    run_dir: Path, feed: WorldModelFeed
) -> None:
    (run_dir / "metrics.jsonl").write_text("")
    await feed.look()
    measure(run_dir, 1, 2, 3, reward=0.7)
    await feed.look()
    points = feed.curves["reward"].points()
    assert [(point.step, point.value) for point in points] == [(1, 0.7), (2, 0.7), (3, 0.7)]


async def test_lines_that_are_no_figures_are_counted(run_dir: Path, feed: WorldModelFeed) -> None:
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\n[]\n{"step": "x"}\n{"step": 3, "loss": NaN, "odd": "<b>"}\n')
    await feed.look()
    assert feed.num_bad_lines == 3
    assert (feed.step, feed.latest) == (3, {})


async def test_a_run_says_whether_it_goes_on_was_left_or_is_over(run_dir: Path) -> None:
    states: list[str] = []
    for is_live in (True, False):
        feed = WorldModelFeed(open_world_model_run(run_dir), is_live=is_live)
        await feed.look()
        transport = httpx.ASGITransport(make_world_model_app(feed, TOKEN))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            for step in (3, 4):
                states.append((await client.get("/api/run", headers=BEARER)).json()["state"])
                if not is_live:
                    measure(run_dir, step)
                    await feed.look()
            states.append((await client.get("/api/run", headers=BEARER)).json()["state"])
    assert states == ["running"] * 3 + ["stopped"] * 2 + ["finished"]


async def test_the_page_says_when_nothing_is_new_and_metrics_are_prometheus(client: Any) -> None:
    answer = await client.get("/api/page", headers=BEARER)
    known = {**BEARER, "If-None-Match": answer.headers["etag"]}
    assert (await client.get("/api/page", headers=known)).status_code == 304
    text = (await client.get("/metrics", headers=BEARER)).text
    found = {
        (sample.name, sample.labels.get("name", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["cosmos_step", ""] == 2
    assert found["cosmos_steps_planned", ""] == 4
    assert found["cosmos_measurement", "loss"] == 0.5
    assert found["cosmos_measurement", "validation/reward"] == 1.5


async def test_the_api_describes_itself(client: Any) -> None:
    described = (await client.get("/api", headers=BEARER)).json()["paths"]
    assert {"/api/run", "/api/curves", "/api/gallery", "/api/gallery/{step}/{name}"} <= set(
        described
    )


async def test_a_run_from_before_indices_has_curves_and_no_samples(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text('{"kind": "wfm_sft"}')
    measure(tmp_path, 1)
    old = tmp_path / "validation" / "step_0"
    write_samples(torch.zeros(1, 1, 3, 16, 16), old)
    feed = WorldModelFeed(open_world_model_run(tmp_path), is_live=False)
    await feed.look()
    assert feed.galleries.by_step() == {}
    assert feed.curves["loss"].points()[0].value == 1.0


def test_a_curve_lets_go_of_steps_that_are_measured_again() -> None:
    curve = Curve()
    for step in range(5):
        curve.add(Point(math.nan, step, float(step)))
    curve.drop_from(3)
    curve.add(Point(math.nan, 3, 9.0))
    assert [point.value for point in curve.points()] == [0.0, 1.0, 2.0, 9.0]
    curve.drop_from(0)
    assert curve.newest is None


def test_a_world_models_directory_is_told_from_the_others(run_dir: Path) -> None:
    assert is_world_model_run(run_dir)
    (run_dir / "run.json").write_text("{}")
    assert not is_world_model_run(run_dir)


def test_status_says_where_a_run_is(run_dir: Path) -> None:
    shown = CliRunner().invoke(main, ["status", str(run_dir)])
    assert shown.exit_code == 0, shown.output
    assert "step 2 of 4" in shown.stdout
    listed = CliRunner().invoke(main, ["status", str(run_dir), "--json"])
    values = json.loads(listed.stdout)["values"]
    assert (values["loss"], values["reward"], values["validation/reward"]) == (0.5, 0.5, 1.5)
    measure(run_dir, 3, 4)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # it is being written
    watched = CliRunner().invoke(main, ["status", str(run_dir), "--watch"])
    assert watched.exit_code == 0, "a run that has taken all steps is not waited for"
    assert "step 4 of 4" in watched.stdout
