"""Rewards of validation samples: what fails costs one sample's reward, and is counted and said."""

import json
import math
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from urllib.parse import parse_qs

import pytest
import torch

from cosmos_wfm import (
    DiffusionRlConfig,
    DiffusionSftConfig,
    ImageCaptionsConfig,
    LoraTuning,
    RewardClient,
    RewardServiceConfig,
    RewardServiceError,
    SamplerConfig,
    SampleRewards,
    ValidationConfig,
    ValidationHooks,
    WfmConfigError,
    local_sample_scorer,
    train_rl,
    train_sft,
)
from cosmos_wfm.sample_rewards import (
    ask_for_rewards,
    collect_rewards,
    reward_figures,
    scorer_of_samples,
)
from cosmos_wfm.scoring import GuardedScorer

RED = torch.tensor([1.0, -1.0, -1.0])[:, None, None].expand(3, 16, 16)
PROMPTS = ("a red square", "a blue disc")


def test_a_reward_that_is_no_number_fails_alone_and_one_without_meaning_does_not():
    score = local_sample_scorer({"brightness": 2.0, "prompt_colour": 1.0})
    good = score(RED, "a red square").result()
    nameless = score(RED, "something").result()
    broken = score(RED * math.nan, "a red square").result()

    assert good.reward == pytest.approx(2 / 3 + good.rewards["prompt_colour"])
    assert (nameless.reward, nameless.problems) == (None, ())
    assert nameless.rewards == {"brightness": pytest.approx(1 / 3)}
    assert (broken.reward, broken.rewards) == (None, {})
    assert broken.problems[0] == "brightness: nan"
    with pytest.raises(WfmConfigError, match="beauty is no reward"):
        local_sample_scorer({"beauty": 1.0})


def raises(pixels, prompts):
    raise KeyError("a reward of somebody else")


def fails_later(pixels, prompts):
    asked = Future()
    asked.set_exception(RewardServiceError("gone"))
    return asked


@pytest.mark.parametrize(
    ("scorer", "said"),
    [
        (raises, "KeyError: 'a reward of somebody else'"),
        (fails_later, "RewardServiceError: gone"),
        (lambda pixels, prompts: [math.inf], "inf for a sample of 'x'"),
        (lambda pixels, prompts: [1.0, 2.0], "2 numbers for 1 samples"),
        (lambda pixels, prompts: 1.0, "a float for 1 samples"),
        (lambda pixels, prompts: time.sleep(5.0), "the scorer did not return in 1 s"),
        (lambda pixels, prompts: Future(), "no rewards in 1 s"),
    ],
)
def test_a_scorer_that_fails_is_a_problem_of_the_sample(scorer, said):
    found = scorer_of_samples(GuardedScorer(scorer, 1.0))(RED, "x").result(30.0)
    assert found.reward is None
    assert said in found.problems[0]


def test_a_scorer_is_given_one_sample_and_may_answer_later():
    asked, seen = Future(), SimpleQueue()
    scorer = GuardedScorer(lambda pixels, prompts: seen.put(pixels.shape) or asked, 30.0)
    waiting = scorer_of_samples(scorer)(RED, "x")
    assert (seen.get(timeout=30.0), waiting.done()) == ((1, 3, 16, 16), False)
    asked.set_result([0.5])
    assert waiting.result(30.0) == SampleRewards(reward=0.5)


def test_a_sample_that_is_not_finite_earns_nothing():
    """`compressibility` would see a black picture, and like it best."""
    scorer = local_sample_scorer({"compressibility": 1.0})
    pixels = torch.zeros(3, 8, 8)
    assert ask_for_rewards(scorer, pixels, "p").result(0).reward is not None
    pixels[1, 2, 3] = math.nan
    found = ask_for_rewards(scorer, pixels, "p").result(0)
    assert (found.reward, found.problems) == (None, ("what was drawn is not finite",))


def test_what_is_not_there_in_time_has_failed_and_means_are_over_the_others():
    there, late = Future(), Future()
    there.set_result(SampleRewards(rewards={"one": 1.0, "two": 4.0}, reward=3.0))
    half = Future()
    half.set_result(SampleRewards(rewards={"one": 2.0}, problems=("two: nan",)))
    found = collect_rewards([[there, half], [there, late]], 0.01)

    assert found[1][1].problems == ("no rewards in 0.01 s",)
    assert reward_figures(found) == {
        "validation/reward": 3.0,
        "validation/reward/one": pytest.approx(4 / 3),
        "validation/reward/two": 4.0,
        "validation/failed": 2.0,
    }


class Service(BaseHTTPRequestHandler):
    """Scores each sample by its red, names the sample in its ticket, and breaks as it is told."""

    def do_POST(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/enqueue":
            head = json.loads(data.partition(b"\n")[0])
            self.server.heads.append(head)
            prompts = head["prompts"]
            self.answer(200, {"uuid": "|".join(prompts)})
            return
        form = parse_qs(data.decode())
        prompts, name = form["uuid"][0].split("|"), form["type"][0]
        if name == "broken" and "a blue disc" in prompts:
            self.answer(500, {"error": "it broke"})
        else:
            self.answer(200, {"scores": {name: [7.0 if "red" in p else 1.0 for p in prompts]}})

    def answer(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def service():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    server.heads, server.daemon_threads = [], True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def client_at(port, weights, **settings):
    url = f"http://127.0.0.1:{port}"
    config = RewardServiceConfig(enqueue_url=f"{url}/enqueue", fetch_url=f"{url}/pull", **settings)
    return RewardClient(config, weights, token="secret")


def test_a_service_is_asked_for_each_sample_and_the_total_is_that_of_training(service):
    weights = {"fine": 2.0, "other": -0.5}
    with client_at(service.server_port, weights, clip=6.0, scale=0.5) as client:
        trained = client(RED[None], ["a red square"]).result()
        held_out = client.sample_scorer()(RED, "a red square").result()

    assert held_out.rewards == {"fine": 7.0, "other": 7.0}
    assert held_out.reward == trained[0] == 0.5 * 6.0  # 2 * 6 - 0.5 * 6 is cut to 6


def test_a_reward_that_the_service_refuses_fails_for_that_sample_alone(service):
    with client_at(service.server_port, {"fine": 1.0, "broken": 1.0}) as client:
        score = client.sample_scorer()
        red, blue = (score(RED, prompt).result() for prompt in PROMPTS)

    assert (red.reward, red.problems) == (5.0, ())  # both and their sum are cut to 5
    assert (blue.reward, blue.rewards) == (None, {"fine": 1.0})
    assert "broken: " in blue.problems[0]
    assert "answered 500" in blue.problems[0]


def test_a_service_is_told_what_lines_of_a_set_say_beside_held_out_prompts(
    service, model_dirs, data_dir, tmp_path
):
    rows = [{"prompt": f"a {c} disc", "tag": c, "include": [c]} for c in ("red", "blue", "green")]
    (tmp_path / "held.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shown = replace(SHOWN, prompts=(), prompt_set=str(tmp_path / "held.jsonl"), num_prompts=2)
    recipe = DiffusionSftConfig(
        model=str(model_dirs("sd3")),
        data=ImageCaptionsConfig(path=str(data_dir), height=16, width=16),
        output=str(tmp_path / "out"),
        num_steps=1,
        batch_size=1,
        validation=replace(shown, samples_per_prompt=1, gallery=2),
    )
    seen = []
    with client_at(service.server_port, {"fine": 1.0}) as client:
        hooks = ValidationHooks(told=seen.append, scorer=client.sample_scorer())
        train_sft(recipe, validation=hooks)

    assert [validated.figures["validation/failed"] for validated in seen] == [0.0, 0.0]
    told = {head["prompts"][0]: head for head in service.heads}
    assert told.keys() == {"a red disc", "a blue disc"}
    for colour in ("red", "blue"):
        head = told[f"a {colour} disc"]
        assert head["prompt_metadata"] == [{"tag": colour, "include": [colour]}]
        assert (head["geneval_tags"], head["geneval_includes"]) == ([colour], [[colour]])
    index = json.loads((seen[0].directory / "index.json").read_text())["samples"]
    assert [sample["prompt"] for sample in index] == ["a red disc", "a blue disc"]


def test_a_service_that_is_down_is_given_up_after_the_deadline_of_validation():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with client_at(port, {"fine": 1.0, "other": 1.0}) as client:
        found = client.sample_scorer(0.3)(RED, "x").result(30)
    assert found.reward is None
    assert "no scores in 0.3 s" in found.problems[0] or "cannot be reached" in found.problems[0]


SAMPLER = SamplerConfig(num_steps=1, height=16, width=16)
SHOWN = ValidationConfig(prompts=PROMPTS, every=1, samples_per_prompt=2, gallery=1, sampler=SAMPLER)


@pytest.fixture
def rl(model_dirs, tmp_path):
    (tmp_path / "prompts.txt").write_text("a red square\na blue disc\n")
    return DiffusionRlConfig(
        model=str(model_dirs("sd3")),
        prompts=str(tmp_path / "prompts.txt"),
        output=str(tmp_path / "out"),
        rewards={},
        num_steps=1,
        groups_per_step=1,
        samples_per_group=2,
        sampler=SAMPLER,
        validation=SHOWN,
        tuning=LoraTuning(rank=2, alpha=4),
    )


def test_a_scorer_that_fails_for_a_held_out_sample_does_not_end_the_run(rl, tmp_path):
    def scorer(pixels, prompts):
        if len(prompts) == 1 and prompts[0] == "a blue disc":
            raise RuntimeError("no word for blue")
        return [0.25 + i for i in range(len(prompts))]

    seen = []
    train_rl(rl, scorer=scorer, on_validation=seen.append)

    assert [validated.step for validated in seen] == [0, 1]
    for validated in seen:
        assert validated.figures["validation/reward"] == 0.25
        assert validated.figures["validation/failed"] == 2
        assert validated.figures["validation/seconds"] > 0
        assert validated.problems == ("RuntimeError: no word for blue",)
        index = json.loads((validated.directory / "index.json").read_text())["samples"]
        assert [sample["reward"] for sample in index] == [0.25, 0.25], "of the first prompt"


def test_validation_may_have_rewards_of_its_own_beside_those_that_are_trained_on(rl):
    recipe = replace(
        rl,
        rewards={"brightness": 1.0},
        validation=replace(SHOWN, rewards={"sharpness": 1.0}, gallery=2),
    )
    seen = []
    train_rl(recipe, on_validation=seen.append)
    assert seen[0].figures.keys() == {
        "validation/reward",
        "validation/reward/sharpness",
        "validation/failed",
        "validation/seconds",
    }


def test_a_supervised_run_is_rewarded_by_what_its_validation_names(model_dirs, data_dir, tmp_path):
    weights = {"brightness": 2.0, "prompt_colour": 1.0}
    recipe = DiffusionSftConfig(
        model=str(model_dirs("sd3")),
        data=ImageCaptionsConfig(path=str(data_dir), height=16, width=16),
        output=str(tmp_path / "out"),
        num_steps=1,
        batch_size=1,
        validation=replace(SHOWN, rewards=weights, gallery=2),
    )
    seen = []
    train_sft(recipe, validation=ValidationHooks(told=seen.append))

    for validated in seen:
        index = json.loads((validated.directory / "index.json").read_text())["samples"]
        for name in weights:
            mean = sum(sample["rewards"][name] for sample in index) / 4
            assert validated.figures[f"validation/reward/{name}"] == pytest.approx(mean)
        total = sum(weights[n] * validated.figures[f"validation/reward/{n}"] for n in weights)
        assert validated.figures["validation/reward"] == pytest.approx(total)
        assert validated.figures["validation/failed"] == 0
    train_sft(replace(recipe, output=str(tmp_path / "none"), validation=SHOWN))
    index = json.loads((tmp_path / "none/validation/step_0/index.json").read_text())["samples"]
    assert [sample["reward"] for sample in index] == [None, None]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rewards": {"beauty": 1.0}}, "beauty is no reward"),
        ({"reward_service": RewardServiceConfig()}, "reward_service is set, but rewards names"),
        ({"rewards": {"brightness": math.nan}}, "brightness has the weight nan"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"prompts": ()}, "there are no prompts; name prompts, or a prompt_set"),
        ({"prompt_set": "held.txt"}, "prompts and prompt_set are both set"),
        ({"num_prompts": 3}, "num_prompts is 3, but means something with prompt_set only"),
    ],
)
def test_rewards_that_cannot_be_had_are_refused(change, said):
    with pytest.raises(WfmConfigError, match=said):
        replace(SHOWN, **change)


def test_a_service_of_validation_needs_somebody_who_asks_it(rl):
    shown = replace(SHOWN, rewards={"mine": 1.0}, reward_service=RewardServiceConfig())
    with pytest.raises(WfmConfigError, match=r"hand over sample_scorer\(\) of its RewardClient"):
        train_rl(replace(rl, validation=shown), scorer=lambda pixels, prompts: [0.0] * len(prompts))
