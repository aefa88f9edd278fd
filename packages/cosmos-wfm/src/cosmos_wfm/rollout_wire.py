"""What a rank and the processes that draw for it say to each other, as bytes; nothing is pickled.

An order is JSON. A micro-batch of samples is a line of JSON, then tensors as safetensors has them:

    {"step": 3, "place": 0, "numbers": [0, 2], "prompts": [...], "metadata": [{...}, {...}],
     "rewards": [0.5, null], "problems": [...], "levels": [[1.0, 0.9, 0.7], ...],
     "cost": {"sample_s": 2.5, ...}}
    <LF> SAFETENSORS...
"""

import json
import math
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, cast

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from cosmos_wfm.errors import RewardRequestError
from cosmos_wfm.prompts import Prompt, metadata_of
from cosmos_wfm.rollouts import Rollout
from cosmos_wfm.sampling import NoisyStep
from cosmos_wfm.scoring import NONE, Scores
from cosmos_wfm.speed import DrawingCost

_STEP_TENSORS = ("latents", "following", "log_probs")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutOrder:
    """A micro-batch that a rank wants drawn.

    Attributes:
        step: of the run.
        place: among the micro-batches that the rank has in that step.
        numbers: of its samples in that step.
        version: of the weights that it may be drawn with, at least.
    """

    step: int
    place: int
    numbers: tuple[int, ...]
    version: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RolloutMessage:
    """A micro-batch, and where it belongs.

    Attributes:
        step: of the run.
        place: among the micro-batches that the asking rank has in that step.
        rollout: samples with their rewards.
    """

    step: int
    place: int
    rollout: Rollout


def pack_order(order: RolloutOrder) -> bytes:
    """Return the bytes of an order."""
    return json.dumps(asdict(order)).encode()


def parse_order(data: bytes) -> RolloutOrder:
    """Read the bytes of an order.

    Raises:
        RewardRequestError: if they are none.
    """
    try:
        fields = cast("dict[str, Any]", json.loads(data))
        numbers = tuple(int(number) for number in fields.pop("numbers"))
        return RolloutOrder(numbers=numbers, **fields)
    except (ValueError, KeyError, TypeError) as error:
        raise RewardRequestError(f"no order of samples: {error!r}") from error


def pack_rollout(message: RolloutMessage) -> bytes:
    """Return the bytes of a micro-batch whose rewards are there.

    Raises:
        TimeoutError: if they are not.
    """
    rollout = message.rollout
    scores = rollout.rewards.result(0.0)
    head = {
        "step": message.step,
        "place": message.place,
        "numbers": list(rollout.numbers),
        "prompts": list(rollout.prompts),
        "metadata": metadata_of(rollout.prompts),
        "rewards": [None if math.isnan(value) else value for value in scores.values],
        "problems": list(scores.problems),
        "levels": [[s.sigma, s.next_sigma, s.noise_level] for s in rollout.steps],
        "cost": asdict(rollout.cost),
    }
    tensors = {"latents": rollout.latents}
    tensors |= {f"text.{name}": value for name, value in rollout.text.items()}
    tensors |= {f"negative.{name}": value for name, value in (rollout.negative or {}).items()}
    for number, step in enumerate(rollout.steps):
        tensors |= {f"steps.{number}.{name}": getattr(step, name) for name in _STEP_TENSORS}
    # safetensors refuses tensors that share memory, and a step's x' is the next one's x
    own = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    return json.dumps(head).encode() + b"\n" + save(own)


def parse_rollout(data: bytes) -> RolloutMessage:
    """Read the bytes of a micro-batch.

    Raises:
        RewardRequestError: if they are none.
    """
    line, _, rest = data.partition(b"\n")
    try:
        head = cast("dict[str, Any]", json.loads(line))
        return _message(head, load(rest))
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise RewardRequestError(f"no micro-batch of samples: {error!r}") from error


def _message(head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RolloutMessage:
    values = tuple(NONE if value is None else float(value) for value in head["rewards"])
    problems = tuple(str(problem) for problem in head["problems"])
    rewards: Future[Scores] = Future()
    rewards.set_result(Scores(values=values, problems=problems))
    steps = [
        NoisyStep(
            sigma=float(sigma),
            next_sigma=float(next_sigma),
            noise_level=float(noise_level),
            **{name: tensors[f"steps.{number}.{name}"] for name in _STEP_TENSORS},
        )
        for number, (sigma, next_sigma, noise_level) in enumerate(head["levels"])
    ]
    rollout = Rollout(
        numbers=[int(number) for number in head["numbers"]],
        prompts=[Prompt(*row) for row in zip(head["prompts"], head["metadata"], strict=True)],
        latents=tensors["latents"],
        steps=steps,
        text=_below("text.", tensors),
        negative=_below("negative.", tensors) or None,
        rewards=rewards,
        cost=DrawingCost(**{name: float(value) for name, value in head["cost"].items()}),
    )
    return RolloutMessage(step=int(head["step"]), place=int(head["place"]), rollout=rollout)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
