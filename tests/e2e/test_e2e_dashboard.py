"""The dashboard's page in a real browser, over a recorded run."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import open_browser
from pages import Replay, text, texts, wait_for

from cosmos_app.dashboard.example import START_S, write_example_run


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    run_dir = tmp_path_factory.mktemp("recorded") / "example"
    write_example_run(run_dir)
    started = Replay(run_dir)
    yield started
    started.end()


@pytest.fixture
def page(browser: Any, replay: Replay) -> Any:
    """The page of the recorded run, drawn."""
    browser.get(f"{replay.place}/?token={replay.token}")
    wait_for(lambda: text(browser, "#state") == "finished", "the drawn page")
    return browser


def test_a_wrong_token_is_refused_and_shows_nothing(browser: Any, replay: Replay) -> None:
    browser.delete_all_cookies()
    browser.get(f"{replay.place}/?token=wrong")
    assert text(browser, "body").startswith("Wrong or missing token")
    assert "example" not in browser.page_source


def test_the_token_leaves_the_address_and_scripts_cannot_read_it(page: Any, replay: Replay) -> None:
    assert page.current_url == f"{replay.place}/"
    assert page.execute_script("return document.cookie") == ""


def test_replicas_are_listed_with_version_and_stall(page: Any) -> None:
    rows = texts(page, "#replica-rows tr")
    assert [row.split("the run")[0] for row in rows] == ["policy-0", "rollout-0", "rollout-1"]
    # 30 loads of 20, 21, ..., 49 ms: 34.5 ms on average.
    cells = texts(page, "#replica-rows tr:nth-child(2) td")
    assert cells == ["the run is over", "30", "5%", "30", "35 ms", "served after 0.25 s", "\u2013"]
    assert "held up 4.0 ms, 3 skipped" in texts(page, "#replica-rows tr:nth-child(1) td")
    assert text(page, "#books").endswith("issued 241 = consumed 240 + too stale 1")


def test_the_reward_curve_rises_from_the_first_step_to_the_last(page: Any) -> None:
    assert text(page, "#f-reward") == "0.78 held-out 0.80"
    (heights,) = heights_drawn(page, "reward", "path")
    assert len(heights) == 30
    assert heights == sorted(heights, reverse=True), "SVG counts from the top"
    assert len(set(heights)) == 30


def heights_drawn(page: Any, figure: str, mark: str) -> list[list[float]]:
    """From the top, of each line of a figure, or of all its dots."""
    svg = f"document.querySelector('#c-{figure}')"
    if mark == "circle":
        found = f"return [...{svg}.querySelectorAll('circle')].map((e) => e.cy.baseVal.value)"
        return [page.execute_script(found)]
    found = f"return [...{svg}.querySelectorAll('path')].map((e) => e.getAttribute('d'))"
    lines = page.execute_script(found)
    return [[float(y) for y in re.findall(r"[ML]\S+ (\S+?)(?=L|$)", line)] for line in lines]


# What the example run measured over its 30 steps, in which each of two engines speaks once. Until
# the second does there is but one; from then on each word adds one token a second to their sum.
TOKENS = [400, *range(800, 859)]
STALLS_MS = [20 + step for step in range(30) for _ in range(2)]


@pytest.mark.parametrize(
    ("figure", "said", "mark", "measured"),
    [
        ("staleness", "1.50 mean, max 2", "path", [[0, 1, *[1.5] * 28], [0, 1, *[2] * 28]]),
        ("tokens", "858 engines idle 5%", "path", [TOKENS]),
        ("samples", "32 learner idle 50%", "path", [[32] * 29]),
        ("queues", "0 groups in flight", "path", [[6] * 30, [2] * 30, [1] * 30]),
        ("stalls", "35 median, max 49", "circle", [STALLS_MS]),
    ],
)
def test_each_figure_says_and_draws_what_was_measured(
    page: Any, figure: str, said: str, mark: str, measured: list[list[float]]
) -> None:
    assert text(page, f"#f-{figure}") == said
    svg = f"return document.querySelector('#c-{figure}')"
    top = max(max(line) for line in measured)
    assert page.execute_script(f"{svg}.querySelector('text').textContent") == f"{top:g}"
    bottom = float(page.execute_script(f"{svg}.querySelector('line').getAttribute('y1')"))
    # From the baseline, which is zero, up to 11 below the top of the picture, which is the most.
    tall = bottom - 11
    expected = [[bottom - tall * value / top for value in line] for line in measured]
    drawn = heights_drawn(page, figure, mark)
    assert [len(line) for line in drawn] == [len(line) for line in expected]
    for line, wanted in zip(drawn, expected, strict=True):
        assert line == pytest.approx(wanted, abs=0.06), "a tenth of a pixel is what is written"


def test_held_out_rewards_are_told_by_data_set(page: Any) -> None:
    cells = texts(page, "#set-rows tr > :not(.wide)")
    assert cells == ["code", "0.200", "0.700", "+0.500", "sums", "0.950", "0.900", "-0.050"]
    paths = "return document.querySelectorAll('#set-rows path.first').length"
    assert page.execute_script(paths) == 2


def test_the_timeline_has_a_lane_a_replica_and_says_what_is_bubble(page: Any) -> None:
    labels = page.execute_script(
        "return [...document.querySelectorAll('#timeline svg[data-replica]')]"
        ".map((e) => e.getAttribute('aria-label'))"
    )
    # Passes take 27 s and updates 3 s of 59.3 s, which begin with the wait for the first step; the
    # engines measured 58 s, of which they decoded three quarters, and for 3 % of which they held
    # nothing because of staleness.
    assert labels[0].startswith("policy-0: training 46%, updating 5%, saving 1%, idle 48%")
    assert labels[1].startswith(
        "rollout-0: generating 73%, scoring 15%, swapping 5%, withheld 3%, idle 4%"
    )
    kinds = (
        "return [...document.querySelectorAll('#timeline rect')].map((e) => "
        "e.getAttribute('class'))"
    )
    legend = "return [...document.querySelectorAll('.legend .k')].map((e) => e.className.slice(2))"
    drawn, explained = set(page.execute_script(kinds)), set(page.execute_script(legend))
    assert drawn <= explained
    assert {"training", "updating", "saving", "validating", "withheld"} <= drawn
    marks = page.execute_script(
        "return document.querySelectorAll('#timeline [data-replica=rollout-0] .mark').length"
    )
    assert marks == 30


def test_tokens_have_the_colour_of_their_version_and_text_is_never_html(page: Any) -> None:
    spans = page.execute_script(
        "return [...document.querySelector('#samples li').querySelectorAll('.token-span')].map("
        "(e) => [e.dataset.version, e.textContent, getComputedStyle(e).backgroundColor])"
    )
    assert [span[:2] for span in spans] == [
        ["-1", "What is 12 + 30? "],
        ["29", "12 and 30 are "],
        ["30", "42. <b>Sure.</b>"],
    ]
    given, old, new = (span[2] for span in spans)
    assert len({given, old, new}) == 3
    assert page.execute_script("return document.querySelectorAll('#samples b').length") == 0


def test_a_sample_of_a_picture_shows_it(page: Any) -> None:
    found = "const p = document.querySelector('#samples li .pictures img'); p.loading = 'eager';"
    seen = f"{found} return p.complete && p.naturalWidth === 8;"
    wait_for(lambda: page.execute_script(seen), "the picture")
    alt = page.execute_script("return document.querySelector('#samples .pictures img').alt")
    assert alt == "picture 1 of the prompt"


def test_events_say_what_happened_and_routine_comes_on_demand(page: Any) -> None:
    assert texts(page, "#events li span")[0] == "rollout-1 left: signal 9 (SIGKILL)"
    assert len(texts(page, "#events li")) == 5
    page.execute_script("document.querySelector('#all-events').click()")
    found = wait_for(lambda: len(texts(page, "#events li")) == 100, "routine events")
    assert found


def test_everything_is_reached_by_keyboard_and_has_a_name(page: Any) -> None:
    unnamed = page.execute_script(
        "return [...document.querySelectorAll('svg[role=img], progress')]"
        ".filter((e) => !e.getAttribute('aria-label')).length"
    )
    assert unnamed == 0
    reached = set()
    body = page.find_element("tag name", "body")
    for _ in range(8):
        body = page.switch_to.active_element
        body.send_keys("\ue004")  # Tab
        reached.add(
            page.execute_script(
                "return document.activeElement.className || "
                "document.activeElement.name || document.activeElement.id"
            )
        )
    assert {"skip", "window", "scroll", "all-events"} <= reached


def test_nothing_moves_when_the_next_answer_is_drawn(page: Any) -> None:
    places = (
        "return [...document.querySelectorAll('section, figure, header')].map((e) => "
        "{const b = e.getBoundingClientRect(); return [b.top, b.left, b.width, b.height]})"
    )
    before = page.execute_script(places)
    page.execute_script("tag = ''")  # the next answer is a whole one
    wait_for(lambda: page.execute_script("return tag !== ''"), "the next answer")
    assert page.execute_script(places) == before


def test_no_script_or_style_was_refused_and_nothing_came_from_elsewhere(
    page: Any, replay: Replay
) -> None:
    severe = [entry["message"] for entry in page.get_log("browser") if entry["level"] == "SEVERE"]
    assert [message for message in severe if "401" not in message] == []
    sources = page.execute_script(
        "return performance.getEntriesByType('resource').map((e) => e.name)"
    )
    assert all(source.startswith(replay.place) for source in sources)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(page: Any, scheme: str) -> None:
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )
    pairs = page.execute_script(
        "const b = (e) => getComputedStyle(e); const of = (s) => document.querySelector(s);"
        "const card = b(of('figure')).backgroundColor;"
        "return [[b(of('#f-reward')).color, card], [b(of('figcaption')).color, card],"
        "...[...of('#samples li').querySelectorAll('.token-span')].slice(1)"
        ".map((e) => [b(e).color, b(e).backgroundColor])]"
    )
    # WCAG 2.1, success criterion 1.4.3: at least 4.5 to 1.
    assert min(contrast(text, back) for text, back in pairs) >= 4.5


def test_nothing_is_cut_off_on_a_telephone(page: Any) -> None:
    size = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    name = "'rollout-on-node-gpu-a100-with-a-long-name.cluster.internal.example.com-1'"
    too_wide = page.execute_script(
        "for (const e of document.querySelectorAll('tbody th, .events li span')) "
        f"e.textContent = {name};"
        "const of = '.events, tbody th, figcaption, output';"
        "return [...document.querySelectorAll(of)].filter((e) => e.scrollWidth > e.clientWidth)"
        ".map((e) => e.textContent)"
    )
    first = page.execute_script(
        "return document.querySelector('tbody th').getBoundingClientRect().width"
    )
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert too_wide == []
    assert first < 200, "what a replica does stands beside its name"


def contrast(one: str, other: str) -> float:
    """Ratio of relative luminances (WCAG 2.1), of colours like ``rgb(1, 2, 3)``."""
    low, high = sorted(luminance(colour) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_page_says_that_nobody_answers_any_more(browser: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "gone"
    write_example_run(run_dir, num_steps=3)
    started = Replay(run_dir)
    browser.get(f"{started.place}/?token={started.token}")
    wait_for(lambda: text(browser, "#state") == "finished", "the drawn page")
    started.end()
    wait_for(lambda: text(browser, "#state") == "disconnected", "the note")
    assert "does not answer" in text(browser, "#message")
    assert len(texts(browser, "#replica-rows tr")) == 3, "what was known stays"


def test_no_name_reason_or_answer_is_ever_html(browser: Any, tmp_path: Path) -> None:
    """Whoever names a run or a replica, or words an error, runs nothing in the browser."""
    hostile = "<img src=x onerror=window.seen=1>"
    run_dir = tmp_path / f"{hostile}<script>window.seen=1<"  # a name may not have a slash
    write_example_run(run_dir)
    for path in run_dir.rglob("*.jsonl"):
        lines = path.read_text().replace("rollout-0", hostile).replace("12 and 30", hostile)
        path.write_text(lines)
    report = json.loads((run_dir / "report.json").read_text())
    (run_dir / "report.json").write_text(json.dumps({**report, "finished": hostile}))
    with (run_dir / "events.jsonl").open("a") as events:
        left = {"time_s": START_S, "type": "ReplicaLeft", "replica": hostile, "reason": hostile}
        events.write(json.dumps({**left, "epoch": 1}) + "\n")
    replay = Replay(run_dir)
    try:
        browser.get(f"{replay.place}/?token={replay.token}")
        wait_for(lambda: text(browser, "#state") == "finished", "the drawn page")
        for selector in ("#name", "#message", "#replica-rows", "#samples", "#events"):
            assert hostile in text(browser, selector), selector
        time.sleep(1.0)  # an error of a picture comes a little later
        assert browser.execute_script("return window.seen ?? 0") == 0
        strange = "return document.querySelectorAll('[onerror], body script').length"
        assert browser.execute_script(strange) == 0
    finally:
        replay.end()
