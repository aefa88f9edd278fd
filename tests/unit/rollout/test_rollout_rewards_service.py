"""Rewards that an HTTP service gives, a real one: it answers, is busy, hangs or is not there."""

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from judges import KEY, Judge, judging, url_of

from cosmos_rollout import Failure, RewardInput, RewardPoolConfig, Scored, ServiceReward
from cosmos_rollout.errors import RewardError, UserCodeError


@pytest.fixture
def server():
    with judging() as found:
        yield found


def sample(response: str) -> RewardInput:
    return RewardInput(prompt="1+1=", response=response, answer="2", fields={"level": 3})


def test_a_service_sees_the_sample_and_its_number_is_the_reward(server):
    reward = ServiceReward(url=url_of(server)).build()
    assert reward(sample("right")) == 0.5
    (seen,) = Judge.seen
    assert {name: seen[name] for name in ("prompt", "response", "answer", "fields")} == {
        "prompt": "1+1=",
        "response": "right",
        "answer": "2",
        "fields": {"level": 3},
    }
    assert seen["finish_reason"] == "stop"


def test_a_busy_service_is_asked_again(server):
    Judge.busy = 3
    assert ServiceReward(url=url_of(server)).build()(sample("busy")) == 0.5
    assert len(Judge.seen) == 4


@pytest.mark.parametrize(
    ("response", "words"),
    [
        ("refused", "answered 422: no such problem"),
        ("hang", r"gave no answer in 0\.4 s: ReadTimeout"),
        ("{}", "has to be"),
        ("no json", "answered 'no json'"),
        ("[1.0]", "has to be"),
        ('{"reward": "good"}', "'good', which is no number"),
        ('{"reward": true}', "True, which is no number"),
    ],
)
def test_what_is_no_answer_costs_the_sample_with_its_words(server, response, words):
    reward = ServiceReward(url=url_of(server), timeout_s=0.4).build()
    with pytest.raises(RewardError, match=words):
        reward(sample(response))
    assert reward(sample("right")) == 0.5


def test_one_that_stays_busy_is_given_up(server):
    Judge.busy = 10**6
    reward = ServiceReward(url=url_of(server), timeout_s=0.4).build()
    with pytest.raises(RewardError, match=r"gave no answer in 0\.4 s: it is busy \(503\)"):
        reward(sample("busy"))


def test_nobody_there_or_a_wrong_token_is_known_at_the_start(server, tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{free.getsockname()[1]}/"
    with pytest.raises(UserCodeError, match=r"nobody answers at .*start the service first"):
        ServiceReward(url=nowhere, timeout_s=0.4).build()
    key = tmp_path / "key"
    with pytest.raises(UserCodeError, match="its key_file"):
        ServiceReward(url=url_of(server), key_file=key).build()
    key.write_text("wrong\n")
    with pytest.raises(UserCodeError, match=r"refuses the token \(401\)"):
        ServiceReward(url=url_of(server), key_file=key).build()
    key.write_text(f"{KEY}\n")
    assert ServiceReward(url=url_of(server), key_file=key).build()(sample("right")) == 0.5


def test_one_that_is_being_restarted_is_waited_for_at_the_start():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reward = ServiceReward(url=f"http://127.0.0.1:{port}/score")
    with ThreadPoolExecutor(1) as threads:
        building = threads.submit(reward.build)
        time.sleep(0.3)
        assert not building.done()
        with judging(port):
            assert building.result(8)(sample("right")) == 0.5


@pytest.mark.parametrize("url", ["judge:9000", "ftp://judge"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="has to begin with http"):
        ServiceReward(url=url)


def test_a_service_is_waited_for_less_long_than_a_worker_lives():
    with pytest.raises(ValueError, match="is 10, and that of all rewards 10"):
        RewardPoolConfig(rewards=(ServiceReward(url="http://judge", timeout_s=10.0),))


async def test_a_service_that_dies_costs_the_samples_of_that_time_only(server):
    service = ServiceReward(url=url_of(server), timeout_s=0.5)
    pool = RewardPoolConfig(rewards=(service,)).build()
    try:
        await pool.start()
        first = await pool.score(sample("right"))
        assert isinstance(first, Scored)
        assert first.total == 0.5
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        lost = await pool.score(sample("right"))
        assert isinstance(lost, Failure)
        assert (lost.reward, lost.error, lost.is_own) == ("service", "RewardError", False)
        assert "gave no answer in 0.5 s" in lost.message
        with judging(server.server_port):
            outcome = await pool.score(sample("right"))
        assert isinstance(outcome, Scored)
    finally:
        await pool.aclose()
