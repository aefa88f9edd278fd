"""``cosmos-app reward-service`` as a process of its own, asked over HTTP."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from click.testing import CliRunner
from processes import is_alive

pytest.importorskip("diffusers")

from cosmos_app.cli import main
from cosmos_app.errors import DataError
from cosmos_app.wfm.rewarding import complete
from cosmos_wfm import (
    RewardClient,
    RewardRequest,
    RewardServiceConfig,
    RewardServiceError,
    load_adapter,
    media_of,
    pack_request,
    tiny_sd3_pipeline,
    tiny_wan_pipeline,
    weighted_reward,
)

DEADLINE_S = 240.0
TOKEN = "a-token-of-some-length"
BOOKS = ("samples_trained", "samples_left_out", "rewards_failed")
OWN_REWARDS = '''
import os, pathlib, time
HERE = pathlib.Path(__file__).parent

def held(request):
    """Wait until there is a file; then 1 for each."""
    (HERE / "held-started").touch()
    while not (HERE / "release").exists():
        time.sleep(0.02)
    return {"held": [1.0] * len(request.prompts)}

def picky(request):
    """Does not do blue; 1 for each of another request."""
    if any("blue" in prompt for prompt in request.prompts):
        raise ValueError("no blue")
    return {"picky": [1.0] * len(request.prompts)}

def broken(request):
    print("this goes to the log, not between the frames")
    if request.prompts[0] == "die":
        os._exit(3)
    if request.prompts[0] == "short":
        return {"broken": [0.0]}
    raise KeyError(request.prompts[0])
'''


@dataclass
class Service:
    url: str
    process: subprocess.Popen
    home: Path

    def post(self, route, **options):
        headers = {"Authorization": f"Bearer {TOKEN}", **options.pop("headers", {})}
        return httpx.post(f"{self.url}{route}", headers=headers, timeout=60, **options)

    def get(self, route, token=TOKEN):
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.get(f"{self.url}{route}", headers=headers, timeout=60)

    def pids(self):
        return self.get("/ping").json()["rewards"]

    def figure(self, name, reward=""):
        label = f'{{reward="{reward}"}}' if reward else ""
        lines = self.get("/metrics").text.splitlines()
        return next(float(x.split()[-1]) for x in lines if x.startswith(f"{name}{label} "))

    def client(self, weights, **settings):
        config = RewardServiceConfig(
            enqueue_url=f"{self.url}/enqueue", fetch_url=f"{self.url}/pull", **settings
        )
        return RewardClient(config, weights, token=TOKEN)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    home = tmp_path_factory.mktemp("reward-service")
    (home / "own_rewards.py").write_text(OWN_REWARDS)
    tiny_wan_pipeline().save_pretrained(home / "video")
    started = start(home, "brightness", "held=own_rewards:held",
                    "broken=own_rewards:broken", "picky=own_rewards:picky", "--capacity", "2",
                    "--latent-vae", home / "video" / "vae")  # fmt: skip
    yield started
    stop(started)


def start(home, *arguments):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(home), *(path for path in sys.path if path)]),
        "REMOTE_REWARD_TOKEN": TOKEN,
        "OMP_NUM_THREADS": "1",
    }
    out, log = (home / "out").open("w"), (home / "log").open("w")
    with out, log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cosmos_app", "reward-service", *arguments],
            env=environment, stdout=out, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        url = wait_for(lambda: announced(home, process))
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return Service(url, process, home)


def announced(home, process):
    assert process.poll() is None, (home / "log").read_text()
    for line in (home / "out").read_text().splitlines():
        if line.startswith("export REMOTE_REWARD_FETCH_URL="):
            return line.partition("=")[2].removesuffix("/pull")
    return None


def stop(service):
    pids = list(service.pids().values())
    service.process.send_signal(signal.SIGTERM)
    try:
        service.process.wait(DEADLINE_S)
        wait_for(lambda: not any(is_alive(pid) for pid in pids))  # nobody is left behind
    finally:
        if service.process.poll() is None:
            os.killpg(service.process.pid, signal.SIGKILL)


def wait_for(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.05)
    return found


def body(*prompts, **rewards):
    pixels = torch.rand(len(prompts), 3, 8, 8, generator=torch.Generator().manual_seed(0))
    kind, media = media_of(pixels)
    return pack_request(
        RewardRequest(prompts=prompts, rewards=rewards, media_type=kind, media=media)
    )


def test_scores_are_those_of_the_rewards_here(service):
    generator = torch.Generator().manual_seed(1)
    bytes_ = torch.randint(256, (3, 3, 8, 8), generator=generator)
    pixels, prompts = bytes_ / 127.5 - 1.0, ["a red square", "a blue one", "green"]
    weights = {"brightness": 2.0}
    with service.client(weights) as asked:
        scores = asked(pixels, prompts).result(timeout=DEADLINE_S)
        video = asked(pixels[:, :, None].expand(-1, -1, 3, -1, -1), prompts)

        assert scores == pytest.approx(weighted_reward(weights)(pixels, prompts), abs=1e-6)
        assert video.result(timeout=DEADLINE_S) == pytest.approx(scores, abs=1e-6)


def test_latents_are_decoded_by_the_service_and_have_the_scores_of_their_pixels(service):
    adapter = load_adapter(str(service.home / "video"))
    generator = torch.Generator().manual_seed(2)
    # such as half precision holds: what is sent is then what is decoded here
    sent = torch.randn((2, *adapter.latent_shape(5, 16, 16)), generator=generator).half().float()
    pixels = adapter.pipeline.vae.decode(sent, return_dict=False)[0]
    kind, _ = media_of(pixels)
    prompts = ["a red square", "a blue one"]
    with service.client({"brightness": 1.0}, send="latents") as asked:
        scores = asked(sent, prompts).result(timeout=DEADLINE_S)
    with service.client({"brightness": 1.0}) as asked:
        expected = asked(pixels, prompts).result(timeout=DEADLINE_S)

    assert kind == "video"
    assert scores[0] != scores[1]
    assert scores == pytest.approx(expected, abs=1e-5)


def test_a_client_of_ten_lines_speaks_to_it(service):
    ticket = service.post(
        "/enqueue",
        content=body("white", brightness=1.0),
        headers={"Content-Type": "application/octet-stream"},
    ).json()["uuid"]
    answer = service.post("/pull", data={"uuid": ticket, "type": "brightness"}).json()

    assert answer.keys() == {"scores", "duration", "decoded_duration", "input_info", "type"}
    assert answer["input_info"] == {"media_type": "image", "shape": [1, 8, 8, 3]}
    assert 0 < answer["scores"]["brightness"][0] < 1


@pytest.mark.parametrize("route", ["/enqueue", "/pull", "/ping", "/metrics", "/openapi.json", "/"])
def test_no_route_answers_without_the_token(service, route):
    for token in ("x", TOKEN[:-1]):
        assert service.get(route, token=token).status_code == 401
        sent = {"Authorization": f"Bearer {token}"}
        assert service.post(route, headers=sent, content=b"x" * 100).status_code == 401
    assert service.post("/pull", headers={"Authorization": TOKEN}).status_code == 401


def test_what_cannot_be_scored_is_refused_not_dropped(service):
    wrong = [
        (service.post("/enqueue", content=b"{}"), 422, "no line end"),
        (service.post("/enqueue", content=body("a", shine=1.0)), 422, "shine is not served"),
        (service.post("/pull", data={"uuid": "none", "type": "brightness"}), 404, "is known"),
    ]
    for answer, status, message in wrong:
        assert (answer.status_code, message in answer.json()["error"]) == (status, True)


def test_a_full_queue_refuses_and_the_same_request_has_one_ticket(service):
    (service.home / "release").unlink(missing_ok=True)
    before = service.figure("cosmos_reward_samples_total", "held")
    first = service.post("/enqueue", content=body("one", held=1.0)).json()["uuid"]
    again = service.post("/enqueue", content=body("one", held=1.0)).json()["uuid"]
    second = service.post("/enqueue", content=body("two", held=1.0)).json()["uuid"]
    refused = service.post("/enqueue", content=body("three", held=1.0, brightness=1.0))

    assert first == again != second
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert "held has 2 requests waiting" in refused.json()["error"]
    early = service.post("/pull", data={"uuid": first, "type": "held"})
    assert (early.status_code, early.headers["Retry-After"]) == (202, "1")
    with service.client({"held": 1.0, "brightness": 1.0}) as asked:
        waiting = asked(torch.zeros(1, 3, 8, 8), ["three"])  # comes in when there is room
        assert not waiting.done()
        (service.home / "release").touch()
        assert waiting.result(timeout=DEADLINE_S) == [pytest.approx(1.5, abs=2e-3)]
    for ticket in (first, second):
        answer = service.post("/pull", data={"uuid": ticket})
        assert (answer.status_code, answer.json()["scores"]) == (200, {"held": [1.0]})
    assert service.figure("cosmos_reward_samples_total", "held") == before + 3
    assert service.figure("cosmos_reward_requests_refused_total") >= 1
    assert service.figure("cosmos_reward_requests_open", "held") == 0


def test_a_reward_process_that_is_killed_is_started_again_and_nothing_is_lost(service):
    for name in ("release", "held-started"):
        (service.home / name).unlink(missing_ok=True)
    before = service.pids()
    with service.client({"held": 1.0, "brightness": 1.0}) as asked:
        scores = asked(torch.zeros(2, 3, 8, 8), ["kill", "me"])
        wait_for((service.home / "held-started").exists)
        os.kill(before["held"], signal.SIGKILL)
        (service.home / "release").touch()

        assert scores.result(timeout=DEADLINE_S) == [pytest.approx(1.5, abs=2e-3)] * 2
    after = service.pids()
    assert after["held"] != before["held"]
    assert {n: p for n, p in after.items() if n != "held"} == {
        n: p for n, p in before.items() if n != "held"
    }
    assert service.figure("cosmos_reward_process_starts_total", "held") == 2


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("oops", "KeyError: 'oops'"),
        ("short", "1 scores of 2 samples"),
        ("die", "its process ended with 3; it was tried 2 times"),
    ],
)
def test_a_reward_that_fails_is_an_error_for_its_request_alone(service, prompt, message):
    expected = pytest.raises(RewardServiceError, match=f"answered 500.*{message}")
    with service.client({"broken": 1.0}) as asked, expected:
        asked(torch.zeros(2, 3, 8, 8), [prompt, ""]).result(timeout=DEADLINE_S)
    with service.client({"brightness": 1.0}) as asked:
        scores = asked(torch.ones(1, 3, 8, 8), ["after that"]).result(timeout=DEADLINE_S)
        assert scores == [pytest.approx(1.0)]
    assert service.figure("cosmos_reward_failures_total", "broken") >= 1


@pytest.fixture
def recipe(tmp_path):
    """A recipe that asks a service, in a file."""
    tiny_sd3_pipeline(num_layers=1).save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a red square\na blue square\n")
    recipe = (
        f'kind = "wfm_rl"\nmodel = "{tmp_path}/model"\nprompts = "{tmp_path}/prompts.txt"\n'
        f'output = "{tmp_path}/out"\nnum_steps = 1\ngroups_per_step = 2\nsamples_per_group = 2\n'
        "[reward_service]\n[rewards]\nbrightness = 1.0\npicky = 1.0\n[sampler]\nnum_steps = 2\n"
        "height = 16\nwidth = 16\n"
        '[tuning]\nkind = "lora"\nrank = 2\nalpha = 4\n'
    )
    (tmp_path / "rl.toml").write_text(recipe)
    return str(tmp_path / "rl.toml")


@pytest.fixture
def known(service, monkeypatch):
    """Have the environment say where the service is."""
    monkeypatch.setenv("WFM_REWARD_ENQUEUE_URL", f"{service.url}/enqueue")  # the older names
    monkeypatch.setenv("WFM_REWARD_FETCH_URL", f"{service.url}/pull")
    monkeypatch.setenv("REMOTE_REWARD_TOKEN", TOKEN)


def test_a_recipe_needs_to_know_where_its_service_is(recipe):
    unset = CliRunner().invoke(main, ["wfm", "run", recipe])
    assert unset.exit_code == 2
    assert "REMOTE_REWARD_ENQUEUE_URL is not set" in unset.output


def test_a_recipe_is_trained_on_the_rewards_of_the_service(service, known, recipe, tmp_path):
    before = service.figure("cosmos_reward_samples_total", "picky")
    ran = CliRunner().invoke(main, ["wfm", "run", recipe])

    assert ran.exit_code == 0, ran.output
    row = json.loads((tmp_path / "out" / "metrics.jsonl").read_text())
    assert 1 < row["reward"] < 2
    # one request of four samples fails, and is sent again as four of one, of which two do
    assert service.figure("cosmos_reward_samples_total", "picky") == before + 2
    assert [row[name] for name in BOOKS] == [2.0, 2.0, 2.0]
    assert "2 trained on, 2 left out, as 2 had no reward" in ran.output
    assert TOKEN not in (tmp_path / "out" / "recipe.json").read_text()


@pytest.mark.slow
def test_replicas_bring_samples_whose_reward_failed_as_such(known, recipe, tmp_path):
    change = ("disaggregated.replicas=1", "samples_per_group=3", "micro_batch_size=4")
    ran = CliRunner().invoke(main, ["wfm", "run", recipe, *change])

    assert ran.exit_code == 0, ran.output
    row = json.loads((tmp_path / "out" / "metrics.jsonl").read_text())
    assert [row[name] for name in BOOKS] == [3.0, 3.0, 3.0]
    assert 1 < row["reward"] < 2


def test_the_environment_fills_in_what_a_recipe_leaves_out():
    found = complete(
        RewardServiceConfig(fetch_url="http://mine/pull"),
        {
            "REMOTE_REWARD_ENQUEUE_URL": "http://new/enqueue",
            "WFM_REWARD_ENQUEUE_URL": "http://old/enqueue",
            "REMOTE_REWARD_FETCH_URL": "http://new/pull",
            "REMOTE_REWARD_ENQUEUE_TIMEOUT_PER_MB_S": "7",
            "REMOTE_REWARD_ENQUEUE_CONNECT_TIMEOUT_S": "5",
            "COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA": "1",
        },
    )
    assert (found.enqueue_url, found.fetch_url) == ("http://new/enqueue", "http://mine/pull")
    assert (found.enqueue_timeout.per_mib_s, found.enqueue_timeout.connect_s) == (7.0, 5.0)
    assert not found.pin_replica
    with pytest.raises(DataError, match="no number of seconds"):
        complete(found, {"REMOTE_REWARD_ENQUEUE_TIMEOUT_S": "soon"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shine"], "shine is no reward; there are brightness"),
        (["pickscore"], "say where it is, as pickscore=DIRECTORY"),
        (["x=nowhere:f"], "nowhere:f is no module:function"),
        (["brightness", "--listen", "8000"], "want HOST:PORT"),
        (["brightness", "--token-file", "/nowhere/token"], "cannot be read"),
    ],
)
def test_a_service_that_cannot_start_says_why(arguments, message):
    ran = CliRunner().invoke(main, ["reward-service", *arguments])
    assert ran.exit_code == 2
    assert message in ran.output
