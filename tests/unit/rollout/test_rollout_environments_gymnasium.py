"""A Gymnasium environment as a conversation, with a lake whose way over the ice is known."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")

from cosmos_core.config import load_config  # noqa: E402
from cosmos_core.images import read_image, reference_of  # noqa: E402
from cosmos_rollout import (  # noqa: E402
    GymnasiumEnvironmentConfig,
    Message,
    PromptRow,
    Reply,
    UserCodeError,
)
from cosmos_rollout.environments.gymnasium_env import (  # noqa: E402
    numbers_action,
    observation_text,
)

LAKE = GymnasiumEnvironmentConfig(id="FrozenLake-v1", settings={"is_slippery": False})
ROW = PromptRow(prompt_id="0", prompt="Reach 15. 0 left, 1 down, 2 right, 3 up.")


class Player:
    """A chat that plays from a list and keeps what it was told."""

    def __init__(self, *moves: str) -> None:
        self._moves = list(moves)
        self.told: list[str] = []

    async def reply(self, messages: Sequence[Message]) -> Reply:
        self.told.append(messages[-1]["content"])
        text = self._moves.pop(0)
        return Reply(text=text, finish_reason="stop", is_last=not self._moves)


async def test_the_way_over_the_ice_is_worth_one():
    player = Player("down 1", "1", "go right: 2", "2", "1", "2", "never said")
    assert await LAKE.build().play(ROW, player, 0) == {"environment": 1.0}
    assert player.told == [f"{ROW.prompt}\n0", "4", "8", "9", "10", "14"]


async def test_settings_may_be_lists_as_a_map_of_the_lake_is():
    toml = {"id": "FrozenLake-v1", "settings": {"is_slippery": False, "desc": ["SFG"]}}
    config = load_config(GymnasiumEnvironmentConfig, toml)
    player = Player("2", "2")
    assert await config.build().play(ROW, player, 0) == {"environment": 1.0}


async def test_a_hole_ends_the_episode_without_reward():
    player = Player("1", "2", "never said")
    assert await LAKE.build().play(ROW, player, 0) == {"environment": 0.0}
    assert player.told == [f"{ROW.prompt}\n0", "4"]


async def test_a_reply_that_is_no_action_is_told_so_and_moves_nothing():
    player = Player("somewhere", "7", "1.5", "1", "1")
    assert await LAKE.build().play(ROW, player, 0) == {"environment": 0.0}
    assert player.told[1:] == [
        "error: expected 1 numbers of Discrete(4), found 0",
        "error: expected an action of Discrete(4), found 7",
        "error: expected an action of Discrete(4), found 1.5",
        "4",
    ]


async def test_siblings_begin_in_the_same_state_and_another_row_in_another():
    cart = GymnasiumEnvironmentConfig(id="CartPole-v1").build()
    told = []
    for row, seed in [
        (ROW, 7),
        (ROW, 7),
        (ROW, 8),
        (PromptRow(prompt_id="1", prompt=ROW.prompt, fields={"seed": 7}), 8),
    ]:
        player = Player("1")
        assert await cart.play(row, player, seed) == {"environment": 1.0}
        told.append(player.told[0])
    assert told[0] == told[1] == told[3] != told[2]


async def test_the_users_own_words_and_actions(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def see(observation):\n    return f'at {observation}'\n"
        "def act(text):\n    return ('left', 'down', 'right', 'up').index(text)\n"
    )
    config = GymnasiumEnvironmentConfig(
        id="FrozenLake-v1",
        settings={"is_slippery": False},
        observe=f"{tmp_path}/mine.py:see",
        act=f"{tmp_path}/mine.py:act",
    )
    player = Player("down", "1", "down")
    assert await config.build().play(ROW, player, 0) == {"environment": 0.0}
    assert player.told == [f"{ROW.prompt}\nat 0", "at 4", "error: tuple.index(x): x not in tuple"]


def test_an_environment_that_is_not_there_is_known_at_the_start():
    with pytest.raises(UserCodeError, match="environment Nowhere-v0 cannot be made"):
        GymnasiumEnvironmentConfig(id="Nowhere-v0").build()


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        (np.array([[1, 2], [3, 4]]), "1 2 3 4"),
        (np.array([0.12345, -2.0]), "0.123 -2.000"),
        ({"a": 3, "b": np.array([1.0])}, "a: 3\nb: 1.000"),
        ("words", "words"),
        ((np.int64(8), np.int64(1), np.int64(0)), "8 1 0"),  # as Blackjack's: one kind, one shape
        ((np.int64(2), np.array([0.5, -1.0], np.float32)), "0: 2\n1: 0.500 -1.000"),
        (("left", np.int64(1)), "0: left\n1: 1"),
        (
            {"camera": {"at": np.zeros(2), "name": "a"}, "arms": (np.ones(1), np.ones(2))},
            "camera.at: 0.000 0.000\ncamera.name: a\narms.0: 1.000\narms.1: 1.000 1.000",
        ),
        (
            gymnasium.spaces.GraphInstance(
                nodes=np.zeros((1, 2)), edges=None, edge_links=np.ones((2, 1), np.int64)
            ),
            "nodes: 0.000 0.000\nedges: \nedge_links: 1 1",
        ),
    ],
)
def test_observations_are_their_numbers(observation, text):
    assert observation_text(observation) == text


def test_a_box_takes_as_many_numbers_as_it_has():
    box = gymnasium.spaces.Box(-1.0, 1.0, (2,), dtype=np.float32)
    action = numbers_action("from 3 to -0.5, .25", box)
    assert (action.tolist(), action.dtype) == ([-0.5, 0.25], np.float32)
    with pytest.raises(ValueError, match=r"found 2\.0 0"):
        numbers_action("2.0 0", box)


@pytest.mark.parametrize(
    "space",
    [
        gymnasium.spaces.Box(-np.inf, np.inf, (1,)),
        gymnasium.spaces.Box(0, 255, (1,), np.uint8),
        gymnasium.spaces.Discrete(4),
    ],
)
@pytest.mark.parametrize("said", ["1e400", "-1e400", "1e39"])
def test_numbers_beyond_all_bounds_are_no_action(space, said):
    with pytest.raises(ValueError, match=f"expected an action of .*, found {said}"):
        numbers_action(f"I push with {said}", space)


class Spoken(gymnasium.Env):
    """Takes actions of any kind."""

    observation_space = gymnasium.spaces.Discrete(1)

    def __init__(self, action_space) -> None:
        self.action_space = action_space


gymnasium.register("Spoken-v0", Spoken, order_enforce=False, disable_env_checker=True)
NAMED = gymnasium.spaces.Dict({"turn": gymnasium.spaces.Discrete(3)})


@pytest.mark.parametrize("space", [NAMED, gymnasium.spaces.Text(5)])
def test_actions_that_are_no_numbers_need_a_function_that_reads_them(space, tmp_path):
    with pytest.raises(UserCodeError, match=r"is no array of numbers.*function for 'act'"):
        GymnasiumEnvironmentConfig(id="Spoken-v0", settings={"action_space": space}).build()
    (tmp_path / "mine.py").write_text("def act(text):\n    return {'turn': int(text)}\n")
    GymnasiumEnvironmentConfig(
        id="Spoken-v0", settings={"action_space": space}, act=f"{tmp_path}/mine.py:act"
    ).build()


# ------------------------------------------------------------------------------- pictures
class Light(gymnasium.Env):
    """A light that is 10 brighter after each step; action 1 ends it."""

    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Discrete(256)
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as Gymnasium has it

    def __init__(self, render_mode=None, *, is_dark: bool = False) -> None:
        self.render_mode, self._is_dark, self._level = render_mode, is_dark, 0

    def reset(self, *, seed=None, options=None):
        self._level, self._thread = 0, threading.get_ident()
        return 0, {}

    def step(self, action):
        self._level += 10
        return self._level, 1.0, action == 1, False, {}

    def render(self):
        assert self.render_mode == "rgb_array"
        assert threading.get_ident() == self._thread
        return None if self._is_dark else np.full((2, 3, 3), self._level, np.uint8)


gymnasium.register("Light-v0", Light, order_enforce=False, disable_env_checker=True)


def levels(content) -> list[int]:
    """How bright each picture of a message is."""
    images = [part["image"] for part in content if part["type"] == "image"]
    pictures = [np.asarray(read_image(reference_of(image, Path()))) for image in images]
    assert {picture.shape for picture in pictures} == {(2, 3, 3)}
    return [int(picture.max()) for picture in pictures]


def texts(content) -> list[str]:
    return [part["text"] for part in content if part["type"] == "text"]


@pytest.mark.parametrize(("shows", "words"), [("picture", []), ("both", ["10"])])
async def test_what_is_rendered_is_shown(shows, words):
    pytest.importorskip("PIL")
    config = GymnasiumEnvironmentConfig(id="Light-v0", shows=shows)
    player = Player("0", "what?", "1")
    assert await config.build().play(ROW, player, 0) == {"environment": 2.0}
    first, second, third = player.told
    assert (texts(first), levels(first)) == ([ROW.prompt, *(["0"] if words else [])], [0])
    assert (texts(second), levels(second)) == (words, [10])
    assert third == "error: expected 1 numbers of Discrete(2), found 0"


def test_an_environment_that_renders_no_picture_is_refused_at_once():
    pytest.importorskip("PIL")
    config = GymnasiumEnvironmentConfig(id="Light-v0", shows="picture", settings={"is_dark": True})
    with pytest.raises(UserCodeError, match=r"expected an RGB picture of render\(\), found object"):
        config.build()


ENDLESS = """
import asyncio, time
import gymnasium
from cosmos_rollout import GymnasiumEnvironmentConfig, PromptRow, Reply

class Endless(gymnasium.Env):
    action_space = observation_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return 0, {}
    def step(self, action):
        time.sleep(600)

class One:
    async def reply(self, messages):
        return Reply(text="1", finish_reason="stop", is_last=False)

async def play():
    environment = GymnasiumEnvironmentConfig(id="Endless-v0").build()
    try:
        async with asyncio.timeout(0.2):
            await environment.play(PromptRow(prompt_id="0", prompt="?"), One(), 0)
    except TimeoutError:
        print("took too long")

gymnasium.register("Endless-v0", Endless)
asyncio.run(play())
"""


def test_a_step_that_never_ends_keeps_no_process_from_ending():
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS], timeout=60, capture_output=True, text=True, check=True
    )
    assert done.stdout == "took too long\n"


class Closing(gymnasium.Env):
    """Takes its time to close, and has no more moves at once."""

    action_space = observation_space = gymnasium.spaces.Discrete(2)
    closed: ClassVar[list[str]] = []

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return next(iter(()))

    def close(self):
        time.sleep(0.2)
        self.closed.append(threading.current_thread().name)


async def test_an_environment_is_closed_whatever_it_raises_and_waited_for():
    gymnasium.register("Closing-v0", Closing)
    environment = GymnasiumEnvironmentConfig(id="Closing-v0").build()
    Closing.closed.clear()
    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await environment.play(ROW, Player("1", "1"), 0)
    await environment.aclose()
    assert Closing.closed == ["episode of Closing-v0"]
