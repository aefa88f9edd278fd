"""What a reward service was asked twice while it had not answered yet."""

import asyncio

import pytest
from torch import zeros

pytest.importorskip("diffusers")

from cosmos_app.wfm.reward_service.queue import RewardQueue
from cosmos_wfm import RewardRequest, media_of

DEADLINE_S = 120.0
SCORES = {"scores": {"slow": [1.0]}, "duration": 0.0, "decoded_duration": 0.0}


class Scoring:
    """Stands where the process of a reward is: fails, or answers once it may."""

    def __init__(self, name, answer):
        self.name = name
        self.answer = answer
        self.released = asyncio.Event()
        self.num_scored = 0

    async def score(self, body):
        await self.released.wait()
        self.num_scored += 1
        return self.answer

    async def close(self):
        pass


def request(*names):
    media_type, media = media_of(zeros(1, 3, 4, 4))
    rewards = dict.fromkeys(names, 1.0)
    return RewardRequest(prompts=("a",), rewards=rewards, media_type=media_type, media=media)


async def test_a_request_that_failed_in_part_may_be_sent_again_while_the_rest_waits():
    slow, bad = Scoring("slow", SCORES), Scoring("bad", {"error": "no"})
    bad.released.set()
    queue = RewardQueue([slow, bad], capacity=4, keep_s=DEADLINE_S)
    work = asyncio.create_task(queue.work())
    first = queue.enqueue(b"first", request("slow"))
    ticket = queue.enqueue(b"second", request("slow", "bad"))
    assert (await queue.answer(ticket, "bad", DEADLINE_S))["error"] == "no"
    assert queue.enqueue(b"second", request("slow", "bad")) == ticket

    slow.released.set()
    for each in (first, ticket):
        assert (await queue.answer(each, "slow", DEADLINE_S))["scores"] == SCORES["scores"]
    last = queue.enqueue(b"third", request("slow"))
    assert (await queue.answer(last, "slow", DEADLINE_S))["scores"] == SCORES["scores"]
    assert not work.done()
    assert (slow.num_scored, queue.num_open("slow")) == (3, 0)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
