"""A producer over the scripted engine, which spells, with a scorer and a store of its own."""

import asyncio
from collections.abc import Sequence

from cosmos_core.messages import Generate, GroupId
from cosmos_core.trajectory import Trajectory
from cosmos_rollout import (
    Failure,
    InProcessEngine,
    Producer,
    ProducerConfig,
    ProducerParts,
    PromptRow,
    PromptSet,
    RewardInput,
    Sampling,
    Scored,
    ScriptDecoder,
    VersionSource,
)

STOP = 10


class Letters:
    """A tokenizer of single characters."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in token_ids if token != STOP)

    def apply_chat_template(self, conversation, *, add_generation_prompt: bool, tokenize: bool):
        return conversation[-1]["content"]


def spell(request, position, version):
    """Answers prompt "3" with 3 letters; sibling 1 of a group with one more."""
    length = int(chr(request.prompt_token_ids[0])) + int(request.request_id[-1] == "1")
    if chr(request.prompt_token_ids[0]) == "9" and position == 4:
        raise MemoryError("the device is full")
    return (ord("a") + position, -0.5) if position < length else (STOP, -0.25)


class LengthScorer:
    """Rewards the length; fails on "aaa"-long ones when told to; remembers what it saw."""

    def __init__(self, *, fails_on: str = "", delay_s: float = 0.0) -> None:
        self.seen: list[RewardInput] = []
        self._fails_on, self._delay_s = fails_on, delay_s

    async def score(self, sample: RewardInput):
        self.seen.append(sample)
        await asyncio.sleep(self._delay_s)
        if sample.response == self._fails_on:
            return Failure(reward="length", error="KeyError", message="'x'")
        return Scored(rewards={"length": float(len(sample.response))}, total=len(sample.response))

    async def score_group(self, samples, outcomes):
        return outcomes


class Store:
    """Keeps what was published."""

    def __init__(self) -> None:
        self.trajectories: dict[str, Trajectory] = {}

    async def publish(self, trajectories: Sequence[Trajectory]) -> list[str]:
        keys = [f"{t.group}.{t.attempt}.{t.sibling}" for t in trajectories]
        self.trajectories.update(zip(keys, trajectories, strict=True))
        return keys


class World:
    """A producer and everything around it."""

    def __init__(
        self,
        *,
        scorer=None,
        slots: int = 4,
        step_s: float = 0.001,
        rows=(),
        narrow=None,
        most: int = 20,
        sources=("train",),
    ) -> None:
        self.scorer = scorer or LengthScorer()
        self.store = Store()
        decoder = ScriptDecoder(spell, context_length=64, step_s=step_s)
        self.engine = InProcessEngine(decoder, version=4, source=VersionSource())
        digits = [PromptRow(prompt_id=f"row{i}", prompt=str(i), answer="abc") for i in range(10)]
        self.producer = Producer(
            ProducerParts(
                engine=self.engine,
                prompts=dict.fromkeys(sources, PromptSet(rows or digits, order="file")),
                tokenizer=Letters(),
                scorer=self.scorer,
                publish=lambda trajectories: self.store.publish(trajectories),
                narrow=narrow,
            ),
            ProducerConfig(
                slots=slots,
                sampling=Sampling(max_new_tokens=most, stop_token_ids=(STOP,), seed=5),
            ),
            replica="rollout-0",
        )

    async def __aenter__(self) -> "World":
        return self

    async def __aexit__(self, *error) -> None:
        await self.producer.aclose()
        await self.engine.aclose()

    async def events(self, count: int):
        async with asyncio.timeout(10):
            stream = self.producer.events()
            return [await anext(stream) for _ in range(count)]


def generate(ordinal: int, *, num_samples: int = 2, attempt: int = 0, **others) -> Generate:
    group = GroupId(source="train", round=0, ordinal=ordinal)
    return Generate(group=group, attempt=attempt, num_samples=num_samples, **others)
