"""``cosmos-app reward-service`` with a recipe: a process of its own, asked over real sockets."""

import shlex
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

pytest.importorskip("torch")  # the app's recipes name it

from click.testing import CliRunner, Result
from real_runs import ROOT
from reward_services import TOKEN, RewardService, assert_ended, serving, start_service

from cosmos_app.cli import main
from cosmos_app.listening import http_url, reachable_url
from cosmos_app.recipe import load_recipe
from cosmos_core.addresses import listen_on
from cosmos_rollout import (
    Failure,
    RewardInput,
    RewardPoolConfig,
    Scored,
    ServiceReward,
    UserCodeError,
)

LIMIT_S = 3.0
OWN = """
import os, time
def mine(sample):
    match sample.response:
        case "raise":
            raise ValueError("this response displeases me")
        case "nan":
            return float("nan")
        case "die":
            os._exit(3)
        case "hang":
            time.sleep(3600)
    return sample.fields["level"] + 0.1
"""
RECIPE = """
[reward]
num_workers = 2
timeout_s = 3.0
rewards = [
    { kind = "exact", weight = 2.0 },
    { kind = "boxed_math" },
    { kind = "code", score = "share" },
    { kind = "python", function = "FOLDER/own_rewards.py:mine", weight = 0.3 },
]
sets = { exact = ["words"], boxed_math = ["math"], code = ["code"], mine = ["own"] }
"""
SQUARE = "```python\ndef f(x):\n    return x * x\n```"
DOUBLE = "```python\ndef f(x):\n    return x + x\n```"
TESTS = ["assert f(2) == 4", "assert f(3) == 9"]


def sample(data_set: str, response: str, answer: str | None = None, **fields: object):
    row = {"data_set": data_set, **fields}
    return RewardInput(prompt="", response=response, answer=answer, fields=row)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("rewards")
    (found / "own_rewards.py").write_text(OWN)
    (found / "reward.toml").write_text(RECIPE.replace("FOLDER", str(found)))
    return found


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[RewardService]:
    with serving(folder, "reward.toml") as started:
        yield started


def own(response: str) -> dict[str, object]:
    """A sample of the reward that does what a response says."""
    return {"response": response, "fields": {"data_set": "own", "level": 1}}


JUDGED = [
    (sample("words", "yes", "yes"), 2.0),
    (sample("words", "no", "yes"), 0.0),
    (sample("math", r"so it is \boxed{\frac12}", "0.5"), 1.0),
    (sample("math", r"so it is \boxed{2}", "0.5"), 0.0),
    (sample("code", SQUARE, tests=TESTS), 1.0),
    (sample("code", DOUBLE, tests=TESTS), 0.5),
    (sample("own", "", level=2), 0.3 * 2.1),
    (sample("nobody's", ""), 0.0),
]


async def test_rewards_are_those_of_the_pool_in_process(
    service: RewardService, folder: Path
) -> None:
    here = load_recipe(folder / "reward.toml").reward.build()
    there = RewardPoolConfig(rewards=(service.reward(),), timeout_s=70.0).build()
    try:
        await here.start()
        await there.start()
        for each, value in JUDGED:
            for pool in (here, there):
                outcome = await pool.score(each)
                assert isinstance(outcome, Scored), outcome
                assert outcome.total == value, each
    finally:
        await here.aclose()
        await there.aclose()


def test_an_answer_has_each_reward_as_well(service: RewardService) -> None:
    answer = service.ask(**own("")).json()
    assert answer == {"reward": 0.3 * 1.1, "rewards": {"mine": 1.1}}


@pytest.mark.parametrize(
    ("response", "words"),
    [
        ("raise", "reward mine: ValueError: this response displeases me"),
        ("nan", "reward mine: ValueError: the reward is nan"),
        ("die", "reward mine: ProcessDied: the worker process died (exit code 3)"),
        ("hang", f"reward mine: TimeoutError: no result within {LIMIT_S} s"),
    ],
)
async def test_a_reward_that_fails_costs_its_sample_alone_and_the_run_is_told_why(
    service: RewardService, response: str, words: str
) -> None:
    before = service.figure("cosmos_reward_failures_total")
    pool = RewardPoolConfig(rewards=(service.reward(),), timeout_s=70.0).build()
    try:
        await pool.start()
        lost = await pool.score(sample("own", response, level=1))
        assert isinstance(lost, Failure)
        assert (lost.reward, lost.error) == ("service", "RewardError")
        assert f'answered 500: {{"error":"{words}"}}' in lost.message
        assert isinstance(await pool.score(sample("own", "", level=1)), Scored)
    finally:
        await pool.aclose()
    assert service.figure("cosmos_reward_failures_total") == before + 1


def test_samples_beside_one_that_hangs_have_their_rewards(service: RewardService) -> None:
    responses = ["hang", *map(str, range(8))]
    with ThreadPoolExecutor(len(responses)) as threads:
        answers = list(threads.map(lambda said: service.ask(**own(said)), responses))
    assert [answer.status_code for answer in answers] == [500, *[200] * 8]


def test_a_worker_is_free_again_once_the_clients_of_its_samples_have_left(
    service: RewardService,
) -> None:
    def leave(_: int) -> None:
        with pytest.raises(httpx.ReadTimeout):
            service.ask(timeout_s=0.5, **own("hang"))

    with ThreadPoolExecutor(4) as threads:  # two for each worker
        list(threads.map(leave, range(4)))
    begun = time.monotonic()
    assert service.ask(**own("")).status_code == 200
    assert time.monotonic() - begun < LIMIT_S, "those that nobody waits for are not computed"
    assert service.figure("cosmos_reward_requests_open") == 0


def test_a_wrong_token_is_refused_before_anything_is_read(
    service: RewardService, tmp_path: Path
) -> None:
    for token in ("x", TOKEN[:-1]):
        assert service.ask(token=token, response="").status_code == 401
        for route in ("/score", "/metrics", "/openapi.json", "/"):
            url = service.url.replace("/score", route)
            headers = {"Authorization": f"Bearer {token}"}
            assert httpx.get(url, headers=headers, timeout=60).status_code == 401
    key = tmp_path / "key"
    key.write_text(TOKEN[:-1])
    with pytest.raises(UserCodeError, match=r"refuses the token \(401\)"):
        ServiceReward(url=service.url, key_file=key).build()


def test_what_is_no_sample_is_refused_with_what_is_wrong(service: RewardService) -> None:
    refused = service.ask(response=1)
    assert (refused.status_code, refused.json()) == (422, {"error": "response has to be a text"})
    assert "the sample has no 'response'" in service.ask().text


def test_the_settings_that_are_printed_are_those_of_a_run(
    service: RewardService, tmp_path: Path
) -> None:
    said = service.said.read_text()
    assert "rewards: exact, boxed_math, code, mine, by 2 processes, 3 s each" in said
    assert TOKEN not in said, "its owner has it"
    settings = shlex.split(said.partition("settings of a run: ")[2].splitlines()[0])
    recipe = tmp_path / "run.toml"
    recipe.write_text("[reward]\nrewards = [{ kind = 'exact' }]\nsets = { exact = ['words'] }\n")
    found = load_recipe(recipe, settings).reward
    assert found.rewards == (service.reward(timeout_s=2 * LIMIT_S + 5),)
    assert found.timeout_s > found.rewards[0].timeout_s
    assert not found.sets


def test_ctrl_c_ends_it_at_once_and_leaves_no_worker_and_no_client_waiting(folder: Path) -> None:
    service = start_service(folder / "ended", f"{folder}/reward.toml", f"reward.timeout_s={600}")
    below, answers = service.below(), list[int]()
    asking = threading.Thread(target=lambda: answers.append(service.ask(**own("hang")).status_code))
    asking.start()
    while not service.figure("cosmos_reward_requests_open"):
        time.sleep(0.05)
    below |= service.below()
    begun = time.monotonic()
    service.process.send_signal(signal.SIGINT)

    assert service.process.wait(60) == 130
    assert time.monotonic() - begun < 5.0
    asking.join(60)
    assert answers == [503], "which has a client ask again"
    assert below
    assert_ended(below)
    assert "Traceback" not in service.said.read_text()


def test_one_that_is_killed_leaves_no_worker(folder: Path) -> None:
    service = start_service(folder / "killed", f"{folder}/reward.toml")
    assert service.below()
    service.end(signal.SIGKILL)


def test_an_address_of_all_is_told_as_the_name_of_this_machine() -> None:
    with listen_on("0.0.0.0", 0) as all_of_them, listen_on("127.0.0.1", 0) as one:
        port = all_of_them.getsockname()[1]
        assert reachable_url(all_of_them) == f"http://{socket.gethostname()}:{port}"
        assert reachable_url(one) == http_url(one)


def served(*arguments: str) -> Result:
    """What a service says that does not start."""
    return CliRunner().invoke(main, ["reward-service", *arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.toml"], "there is no file nowhere.toml"),
        ([f"{ROOT}/configs/sums.toml", "reward.workers=2"], "reward.workers"),
        ([f"{ROOT}/configs/sft.toml"], "is of kind 'sft': such runs have no rewards to serve"),
        (
            [f"{ROOT}/configs/wfm/tiny_shapes_nft.toml"],
            "are given by name: cosmos-app reward-service prompt_colour",
        ),
        (
            [f"{ROOT}/configs/sums.toml", "reward.rewards=[{kind='python', function='no.py:f'}]"],
            "reward f cannot be used: UserCodeError: there is no file no.py",
        ),
        ([f"{ROOT}/configs/sums.toml", "--capacity", "3"], "is for rewards that are given by NAME"),
        ([f"{ROOT}/configs/sums.toml", "--listen", "8000"], "want HOST:PORT"),
        ([f"{ROOT}/configs/sums.toml", "--port", "1", "--listen", "[::1]:2"], "give one of them"),
        ([f"{ROOT}/configs/sums.toml", "--token-file", "/nowhere/token"], "cannot be read"),
    ],
)
def test_one_that_cannot_start_says_why(arguments: list[str], words: str) -> None:
    refused = served(*arguments)
    assert refused.exit_code == 2, refused.output
    assert words in " ".join(refused.output.split())


def test_a_port_in_use_is_named_with_what_to_do(folder: Path) -> None:
    with listen_on("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        refused = served(f"{folder}/reward.toml", "--port", str(port))
    assert refused.exit_code == 2
    assert f"127.0.0.1 port {port} (Address already in use); choose another" in refused.output
