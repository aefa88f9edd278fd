"""A run's teachers: who may have them, and what one answers."""

import asyncio
from collections.abc import Sequence

import httpx
import numpy as np
import pytest

from cosmos_app.recipe import Recipe
from cosmos_app.roles.teacher import Scores, scoring_app
from cosmos_core.config import ConfigError, load_config
from cosmos_core.trajectory import TeacherScores
from cosmos_rollout import EngineDeadError, PromptTooLongError, Shown

LEARNS = ["algorithm.kind=on_policy_distillation"]


def recipe(tmp_path, *overrides: str) -> Recipe:
    path = tmp_path / "recipe.toml"
    path.write_text("")
    return load_config(Recipe, path, overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["teacher.replicas=1"], "this algorithm learns from no teacher"),
        ([*LEARNS, "teacher.replicas=1"], "set model.teacher to its directory, or teacher.urls"),
        ([*LEARNS, "teacher.replicas=-1"], "neither may be negative"),
        ([*LEARNS, "model.teacher=big", "teacher.replicas=1", 'teacher.urls=["http://a/v1"]'],
         "this run's or somebody else's"),
        ([*LEARNS, 'teacher.urls=["a:1"]'], "begin with http"),
        ([*LEARNS, 'teacher.urls=["http://a/v1"]', "algorithm.temperature=0.5",
          "rollout.sampling.temperature=0.5"], r"algorithm\.temperature is 0\.5, and teachers"),
        ([*LEARNS, "model.teacher=big", "teacher.deadline_s=0"], "have to be positive"),
    ],
)  # fmt: skip
def test_teachers_that_do_not_fit_are_refused(tmp_path, overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        recipe(tmp_path, *overrides)


def test_a_teacher_may_score_in_the_policy_beside_it_or_elsewhere(tmp_path):
    own = recipe(tmp_path, *LEARNS, "model.teacher=big")
    beside = recipe(tmp_path, *LEARNS, "model.teacher=big", "teacher.replicas=2")
    elsewhere = recipe(tmp_path, *LEARNS, 'teacher.urls=["http://a/v1", "http://b/v1"]')
    assert [r.teacher.is_beside for r in (own, beside, elsewhere)] == [False, True, True]


class Scorer:
    """Knows up to 4 tokens; token 9 kills it."""

    context_length = 4

    def __init__(self, scores: Scores) -> None:
        self.shown: list[Shown | None] = []
        self._scores = scores

    async def score(
        self, token_ids: Sequence[int], top_k: int, shown: Shown | None = None
    ) -> TeacherScores:
        self.shown.append(shown)
        assert self._scores.standing() == (len(self.shown) - 1, True)
        if len(token_ids) > 4:
            raise PromptTooLongError("5 tokens, 4 at most")
        if 9 in token_ids:
            raise EngineDeadError("gone")
        count = len(token_ids)
        return TeacherScores(
            logprobs=-np.arange(count, dtype=np.float32),
            top_logprobs=np.zeros((count, top_k), np.float32),
            top_token_ids=np.tile(np.arange(top_k, dtype=np.int32), (count, 1)),
        )

    async def aclose(self) -> None: ...


async def test_a_teacher_answers_refuses_and_dies():
    died, scores = asyncio.Event(), Scores()
    scorer = Scorer(scores)
    transport = httpx.ASGITransport(app=scoring_app(scorer, died, scores))
    async with httpx.AsyncClient(transport=transport, base_url="http://teacher/v1/") as client:
        models = (await client.get("models")).json()
        assert models == {"data": [{"id": "teacher", "max_model_len": 4}]}

        async def ask(prompt: list[int], **others: object) -> httpx.Response:
            asked = {"model": "teacher", "prompt": prompt, "prompt_logprobs": 0, **others}
            return await client.post("completions", json=asked)

        told = (await ask([5, 6, 7])).json()["choices"][0]["prompt_logprobs"]
        assert told == [
            None,
            {"6": {"logprob": -1.0, "rank": 1}},
            {"7": {"logprob": -2.0, "rank": 1}},
        ]
        told = (await ask([5, 6], prompt_logprobs=2)).json()["choices"][0]["prompt_logprobs"]
        assert told[1] == {
            "0": {"logprob": 0.0, "rank": 1},
            "1": {"logprob": 0.0, "rank": 2},
            "6": {"logprob": -1.0, "rank": 3},
        }
        assert (await ask([5, 6], marked_prompt=[5], images=["red.png"])).status_code == 200
        assert scorer.shown == [None, None, Shown(marked_token_ids=(5,), images=("red.png",))]
        refused = await ask([1] * 5)
        assert (refused.status_code, refused.json()) == (
            400,
            {"error": "PromptTooLongError: 5 tokens, 4 at most"},
        )
        assert (await ask([])).status_code == 422
        assert (await ask([1], prompt_logprobs=-1)).status_code == 422
        assert not died.is_set()
        assert (await ask([9])).status_code == 503
        assert died.is_set()
    assert scores.standing() == (len(scorer.shown), False)
