"""The page of a world model's run in a real browser: beside the run, and when it is over."""

import json
import os
import re
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers")

from browser import open_browser
from pages import Replay, text, texts, wait_for
from real_runs import SOURCES

from cosmos_wfm import tiny_sana_video_pipeline, tiny_sd3_pipeline

HOSTILE = "<img src=x onerror=window.seen=1> red"
PICTURES = """
kind = "wfm_rl"
model = "{model}"
prompts = "{prompts}"
output = "{output}"
num_steps = 3
groups_per_step = 2
samples_per_group = 2
rewards = {{ prompt_colour = 1.0, brightness = 0.5 }}
sampler = {{ num_steps = 1, height = 16, width = 16 }}
tuning = {{ kind = "lora", rank = 2, alpha = 4 }}
[validation]
prompts = ["a blue disc", "{hostile}"]
every = 1
samples_per_prompt = 2
sampler = {{ num_steps = 1, height = 16, width = 16 }}
"""
VIDEOS = """
kind = "wfm_sft"
model = "{model}"
output = "{output}"
num_steps = 1
batch_size = 1
data = {{ kind = "mock", num_samples = 1, frames = 5, height = 32, width = 32 }}
tuning = {{ kind = "lora", rank = 2, alpha = 4 }}
[validation]
prompts = ["a film"]
samples_per_prompt = 1
sampler = {{ num_steps = 1, height = 32, width = 32, frames = 5 }}
"""


def started(
    place: Path, recipe: str, pipeline: Any, *changes: str
) -> tuple[subprocess.Popen[str], Path]:
    """Start a run in a process of its own; return it and its directory."""
    pipeline.save_pretrained(place / "model")
    (place / "prompts.txt").write_text("a red square\na blue disc\n")
    output = place / "run"
    filled = recipe.format(
        model=place / "model", prompts=place / "prompts.txt", output=output, hostile=HOSTILE
    )
    (place / "recipe.toml").write_text(filled)
    process = subprocess.Popen(
        [sys.executable, "-m", "cosmos_app", "run", str(place / "recipe.toml"), *changes],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
            "PYTHONUNBUFFERED": "1",
        },
    )
    return process, output


def run_to_the_end(place: Path, recipe: str, pipeline: Any) -> Path:
    """Train in a process of its own and return the run's directory."""
    process, output = started(place, recipe, pipeline)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    return output


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_to_the_end(tmp_path_factory.mktemp("pictures"), PICTURES, tiny_sd3_pipeline())


@pytest.fixture(scope="module")
def replay(ran: Path) -> Iterator[Replay]:
    started = Replay(ran)
    yield started
    started.end()


@pytest.fixture
def page(browser: Any, replay: Replay) -> Any:
    browser.get(f"{replay.place}/?token={replay.token}")
    wait_for(lambda: len(texts(browser, "#gallery-rows tr")) == 2, "the gallery")
    return browser


def all_seen(browser: Any) -> bool:
    return browser.execute_script(
        "const all = [...document.querySelectorAll('.sample img')];"
        "all.forEach((e) => { e.loading = 'eager'; });"
        "return all.length > 0 && all.every((e) => e.complete && e.naturalWidth > 0)"
    )


def enlarged_step(browser: Any) -> str:
    return text(browser, "#enlarged-step")


def test_prompts_are_rows_and_validations_are_columns(page: Any) -> None:
    assert texts(page, "#gallery-steps th") == ["prompt", "step 0", "step 1", "step 2", "step 3"]
    assert texts(page, "#gallery-rows th") == ["a blue disc", HOSTILE]
    rewards = texts(page, "#gallery-rows .sample span")
    assert len(rewards) == 8
    assert all(re.fullmatch(r"reward -?\d+\.\d{3}", reward) for reward in rewards)
    wait_for(lambda: all_seen(page), "the pictures")


def test_what_is_not_looked_at_first_is_folded_up_below_the_samples(page: Any) -> None:
    main, others = texts(page, "#figures figcaption"), texts(page, "#other-figures figcaption")
    assert {"reward", "loss", "step_s"} <= set(main)
    assert {"train_s", "lr", "rewards_failed"} <= set(others), "none has failed"
    assert text(page, "#others-title") == f"Other figures ({len(others)})"
    page.execute_script("document.getElementById('others').open = true")
    drawn = "return document.querySelectorAll('#other-figures path[d*=L]').length"
    wait_for(lambda: page.execute_script(drawn) > 0, "the other curves")


def test_curves_have_training_and_held_out_rewards(page: Any) -> None:
    names = texts(page, "figcaption")
    assert names[:3] == ["reward", "validation/reward", "loss"]
    assert {
        "validation/reward",
        "validation/reward/prompt_colour",
        "validation/reward/brightness",
        "step_s",
    } <= set(names)
    path = page.execute_script("return document.querySelector('figure path').getAttribute('d')")
    assert path.count("L") == 2, "three steps"
    assert text(page, "#state") == "finished"
    assert text(page, "#steps") == "step 3 of 3"


def test_a_prompt_is_never_html(page: Any) -> None:
    page.execute_script("document.querySelector('#gallery-rows tr:nth-child(2) button').click()")
    assert text(page, "#enlarged-prompt") == HOSTILE
    assert page.execute_script("return window.seen ?? 0") == 0
    assert page.execute_script("return document.querySelectorAll('[onerror]').length") == 0
    page.execute_script("document.querySelector('#close').click()")


def test_a_sample_is_enlarged_and_followed_over_the_steps(page: Any) -> None:
    page.execute_script("document.querySelector('.sample').click()")
    assert enlarged_step(page) == "step 0, sample 1, seed 0"
    page.switch_to.active_element.send_keys("\ue014")  # arrow to the right
    wait_for(lambda: enlarged_step(page) == "step 1, sample 1, seed 0", "the next step")
    assert "prompt_colour" in text(page, "#enlarged-rewards")
    seen = "const e = document.querySelector('#enlarged-media img');"
    wait_for(lambda: page.execute_script(seen + "return e.naturalWidth === 16"), "the picture")
    page.execute_script("document.querySelector('#close').click()")


def test_another_sample_of_each_prompt_can_be_chosen(page: Any) -> None:
    before = page.execute_script("return document.querySelector('.sample img').src")
    page.execute_script(
        "const e = document.querySelector('#column'); e.value = '1';"
        "e.dispatchEvent(new Event('change'))"
    )
    after = page.execute_script("return document.querySelector('.sample img').src")
    assert (before[-7:], after[-7:]) == ("0_0.png", "0_1.png")


def test_nothing_was_refused_by_the_pages_own_policy(page: Any) -> None:
    severe = [entry["message"] for entry in page.get_log("browser") if entry["level"] == "SEVERE"]
    assert severe == []


def test_a_run_serves_its_page_beside_itself_and_ends_it_with_itself(tmp_path: Path) -> None:
    process, output = started(tmp_path, PICTURES, tiny_sd3_pipeline(), "num_steps=100000")
    try:
        assert process.stdout is not None
        said = next(line for line in process.stdout if line.startswith("dashboard: "))
        place, _, token = said.removeprefix("dashboard: ").strip().partition("/?token=")
        asked = urllib.request.Request(
            f"{place}/api/run", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(asked, timeout=30) as answer:
            run = json.load(answer)
        assert (run["state"], run["num_steps"]) == ("running", 100000)
        assert stat.S_IMODE((output / "dashboard.json").stat().st_mode) == 0o600
    finally:
        process.terminate()
        process.communicate(timeout=120)
    assert process.returncode == 3, "stopped before the end"
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(asked, timeout=5)


def test_videos_play(browser: Any, tmp_path: Path) -> None:
    ran = run_to_the_end(tmp_path, VIDEOS, tiny_sana_video_pipeline())
    replay = Replay(ran)
    try:
        browser.get(f"{replay.place}/?token={replay.token}")
        wait_for(lambda: len(texts(browser, ".sample.film")) == 2, "the gallery")
        wait_for(lambda: all_seen(browser), "the first frames")
        browser.execute_script("document.querySelector('.sample').click()")
        played = "const v = document.querySelector('#enlarged-media video');"
        played += "return v.readyState >= 2 && v.videoWidth === 32 && v.duration > 0"
        wait_for(lambda: browser.execute_script(played), "the video")
        assert text(browser, "#enlarged-rewards") == "no rewards"
    finally:
        replay.end()


def test_a_run_from_before_galleries_says_so(browser: Any, ran: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    for name in ("recipe.json", "metrics.jsonl"):
        (old / name).write_bytes((ran / name).read_bytes())
    replay = Replay(old)
    try:
        browser.get(f"{replay.place}/?token={replay.token}")
        wait_for(lambda: "no samples" in text(browser, "#gallery-note"), "the sentence")
        assert len(texts(browser, "figure")) > 3
    finally:
        replay.end()
