"""What samples of the bubble benchmark wait for, and its environment and engine of two turns."""

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from async_paced import PacedDecoder
from async_waits import SlowEnvironment, Waits

from cosmos_core.messages import GroupId
from cosmos_core.simulation import Diary, EngineSpeed, LogRecord, Span, SystemConfig
from cosmos_rollout import GenerationRequest, Sampling
from cosmos_rollout.environments import Reply
from cosmos_rollout.prompts import PromptRow
from cosmos_rollout.siblings import group_seed

SYSTEM = SystemConfig(
    speed=EngineSpeed(fixed_s=1e-4, request_s=0.0, max_running=4), environment_s=0.05
)
END = 2


def diary_of(log: list[LogRecord]) -> Diary:
    return Diary("rollout", "r", log.extend, start_s=time.monotonic())


class Talk:
    """A chat that says so many characters, and remembers what it was told when."""

    def __init__(self, num_characters: int) -> None:
        self.told: list[tuple[float, Sequence[Mapping[str, object]]]] = []
        self._text = num_characters * "x"

    async def reply(self, messages: Sequence[Mapping[str, object]]) -> Reply:
        self.told.append((time.monotonic(), messages))
        return Reply(text=self._text, finish_reason="stop", is_last=False)


def test_idle_time_is_divided_by_what_was_waited_for_and_the_environment_goes_first():
    waits = Waits()
    waits.count("reward_wait", 1, 1.0)
    waits.count("env_wait", 1, 2.0)
    waits.count("env_wait", 1, 2.5)
    waits.count("reward_wait", -1, 3.0)
    waits.count("env_wait", -2, 4.0)
    assert list(waits.split(0.5, 5.0)) == [
        ("idle_no_work", 1.0),
        ("reward_wait", 2.0),
        ("env_wait", 4.0),
        ("idle_no_work", 5.0),
    ]


def test_a_wait_that_goes_on_is_told_again_and_one_that_is_over_forgotten():
    waits = Waits()
    waits.count("reward_wait", 1, 1.0)
    waits.count("reward_wait", -1, 2.0)
    waits.count("env_wait", 1, 3.0)
    assert list(waits.split(2.5, 4.0)) == [("idle_no_work", 3.0), ("env_wait", 4.0)]
    assert list(waits.split(6.0, 7.0)) == [("env_wait", 7.0)]
    waits.count("env_wait", -1, 8.0)
    assert list(waits.split(9.0, 9.5)) == [("idle_no_work", 9.5)]


async def test_the_environment_takes_as_long_as_the_simulator_is_told():
    """The 40th character is the end of the turn, which nobody sees."""
    waits, talk = Waits(), Talk(39)
    environment = SlowEnvironment(SYSTEM, 7, waits)
    row = PromptRow(prompt_id="a", prompt="1+2=")
    assert await environment.play(row, talk, group_seed(7, GroupId("train", 0, 3))) == {}
    (first_s, asked), (second_s, answer) = talk.told
    assert [message["content"] for message in (*asked, *answer)] == ["1+2=", "go on"]
    assert second_s - first_s >= SYSTEM.answer_s(3, 40) - 1e-3
    told = [activity for activity, _ in waits.split(first_s, second_s)]
    assert "env_wait" in told
    assert list(waits.split(second_s, second_s + 1.0))[-1] == ("idle_no_work", second_s + 1.0)


@pytest.mark.parametrize("turn", [0, 1])
def test_a_turn_has_the_tokens_of_the_workload(turn: int):
    decoder = PacedDecoder(SYSTEM, diary_of([]), Waits())
    name = "train.0.5.0.2" + (f".{turn}" if turn else "")
    sampling = Sampling(max_new_tokens=256, stop_token_ids=(END,))
    decoder.admit([GenerationRequest(request_id=name, prompt_token_ids=(1,), sampling=sampling)])
    tokens = [decoder.step()[0].token_id for _ in range(SYSTEM.turns(5, 2)[turn])]
    assert tokens.index(END) == len(tokens) - 1


async def test_an_engine_without_requests_says_that_it_waits_for_the_environment():
    log: list[LogRecord] = []
    waits, diary = Waits(), diary_of(log)
    decoder = PacedDecoder(SYSTEM, diary, waits)
    begun_s = time.monotonic()
    with waits.during("env_wait"):
        await asyncio.sleep(0.02)
    taken_s = time.monotonic() - begun_s
    decoder.rest()
    diary.close()
    spans = [record for record in log if isinstance(record, Span)]
    waited = [span.end_s - span.start_s for span in spans if span.activity == "env_wait"]
    assert sum(waited) == pytest.approx(taken_s, abs=1e-3)
