"""Whether engines compute the model that is trained, by the log-probabilities of the same tokens.

Where both have the same version only rounding sets them apart. More than that says that the engine
serves another model, and nothing else would: rewards are given, losses fall, and each step's
correction cuts off what does not fit.
"""

import math
from collections.abc import Callable

from cosmos_app.recipe import Recipe
from cosmos_core.metrics import MetricRecord

_LIMIT = 0.1  # bfloat16 on both sides makes 0.01 to 0.05
_LIMIT_QUANTISED = 0.3  # weights of 8 bits make 0.02, of 4 bits up to 0.2
_MIN_TOKENS = 100


class Agreement:
    """Says it, once, when policy and engines have log-probabilities too far apart."""

    def __init__(self, recipe: Recipe, say: Callable[[str], None]) -> None:
        """Begin with nothing measured.

        Args:
            recipe: of the run: weights of few bits, and sampling from the nucleus alone, set
                log-probabilities apart by themselves.
            say: takes a line for who started the run.
        """
        limit = _LIMIT_QUANTISED if recipe.weight_sync.quantised else _LIMIT
        self._limit = limit - math.log(recipe.rollout.sampling.top_p)
        self._engine = recipe.rollout.engine.kind
        self._say = say
        self._tokens = 0.0
        self._distance = 0.0
        self._is_told = False

    def look(self, record: MetricRecord) -> None:
        """Take in one of the run's records; most say nothing of it."""
        share, distance = record.values.get("lag0_tokens"), record.values.get("lag0_abs")
        if self._is_told or record.role != "policy" or share is None or distance is None:
            return
        tokens = share * record.values.get("tokens", 0.0)
        self._tokens += tokens
        self._distance += tokens * distance
        if self._tokens < _MIN_TOKENS:
            return
        mean = self._distance / self._tokens
        self._tokens = self._distance = 0.0
        if mean > self._limit:
            self._is_told = True
            self._say(
                f"[yellow]step {record.step + 1}: policy and engine ({self._engine}) have the same "
                f"weights, and their log-probabilities of a token are {mean:.2g} apart in the mean "
                f"(rounding makes less than {self._limit:.2g}): they compute different models, and "
                "the run learns from what another model sampled; compare with "
                "rollout.engine.kind=transformers[/]"
            )
