"""GenEval (arXiv 2310.11513): whether objects, counts, colours and places are as asked.

A detector of transformers finds objects; a colour is the nearest named one of the middle of a box.
What is asked for is told by the request, for each sample, as in GenEval's own metadata:

    {"geneval_includes": [[{"class": "dog", "count": 2, "color": "black",
                            "position": ["left of", 1]}, {"class": "car", "count": 1}]]}
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoModelForObjectDetection

from cosmos_wfm.errors import RewardRequestError
from cosmos_wfm.model_rewards.pictures import from_directory, middle_frames, normalised, resized
from cosmos_wfm.reward_wire import RewardRequest
from cosmos_wfm.scenes import COLOURS

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SHORTER, _LONGER = 800, 1333
_COLOURS = {
    **COLOURS,
    "orange": (0.95, 0.55, 0.10),
    "purple": (0.50, 0.10, 0.55),
    "pink": (0.98, 0.70, 0.78),
    "brown": (0.50, 0.27, 0.12),
}
"""The ten that GenEval's prompts ask for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundObject:
    """An object that the detector saw.

    Attributes:
        name: its class.
        colour: nearest of GenEval's ten to the middle of its box.
        x: of its middle, 0 to 1 from the left.
        y: of its middle, 0 to 1 from the top.
    """

    name: str
    colour: str
    x: float
    y: float


class GenEval:
    """Scores ``gen_eval_score`` (share of what was asked) and ``gen_eval_strict`` (0 or 1)."""

    def __init__(self, directory: str, *, threshold: float = 0.3) -> None:
        """Load the detector.

        Args:
            directory: of a model of ``AutoModelForObjectDetection``.
            threshold: probability from which on an object counts.
        """
        self._model = from_directory(AutoModelForObjectDetection, directory, "gen_eval")
        self._threshold = threshold

    def __call__(self, request: RewardRequest) -> Mapping[str, list[float]]:
        """Return both scores of each sample.

        Raises:
            RewardRequestError: if the request does not say what is to be in each sample.
        """
        wanted = request.extra.get("geneval_includes")
        if not isinstance(wanted, list) or len(wanted) != len(request.prompts):
            raise RewardRequestError("gen_eval: geneval_includes has no list for each prompt")
        found = self.find(middle_frames(request))
        shares = [share_right(w, f) for w, f in zip(wanted, found, strict=True)]
        return {
            "gen_eval_score": shares,
            "gen_eval_strict": [float(share == 1.0) for share in shares],
        }

    @torch.no_grad()
    def find(self, pictures: Float[Tensor, "B 3 H W"]) -> list[list[FoundObject]]:
        """Return the objects in each picture."""
        height, width = pictures.shape[-2:]
        scale = min(_SHORTER / min(height, width), _LONGER / max(height, width))
        larger = resized(pictures, round(height * scale), round(width * scale))
        seen = self._model(pixel_values=normalised(larger, _MEAN, _STD))
        chances, classes = chances_of(seen.logits, self._model.config.num_labels).max(-1)
        names: Mapping[int, str] = self._model.config.id2label
        return [
            [
                FoundObject(name=names[int(c)], colour=_colour(p, b), x=float(b[0]), y=float(b[1]))
                for chance, c, b in zip(
                    chances[row], classes[row], seen.pred_boxes[row], strict=True
                )
                if chance > self._threshold
            ]
            for row, p in enumerate(pictures)
        ]


def chances_of(logits: Float[Tensor, "B N L"], num_classes: int) -> Float[Tensor, "B N C"]:
    """Return the probability of each class.

    DETR, YOLOS and Table Transformer have one logit more, the last, for "no object"; RT-DETR,
    Deformable DETR and others have one for each class, which is there or not.
    """
    if logits.shape[-1] == num_classes:
        return logits.sigmoid()
    return logits.softmax(-1)[..., :num_classes]


def share_right(wanted: Sequence[Mapping[str, Any]], found: Sequence[FoundObject]) -> float:
    """Return the share of the demands that are met: each count, colour and place is one.

    Raises:
        RewardRequestError: if a colour or a place is none that can be checked.
    """
    groups = [[f for f in found if f.name == want["class"]] for want in wanted]
    met: list[bool] = []
    for want, group in zip(wanted, groups, strict=True):
        count = int(want.get("count", 1))
        met.append(len(group) == count if count > 1 else bool(group))
        if "color" in want:
            if want["color"] not in _COLOURS:
                raise RewardRequestError(
                    f"gen_eval: {want['color']!r} is no colour that can be checked; there are "
                    f"{', '.join(sorted(_COLOURS))}"
                )
            met.append(sum(f.colour == want["color"] for f in group) >= count)
        if "position" in want:
            relation, other = want["position"]
            pairs = [(one, there) for one in group for there in groups[int(other)]]
            met.append(any(_is_placed(one, there, relation) for one, there in pairs))
    return sum(met) / len(met) if met else 1.0


def _is_placed(one: FoundObject, other: FoundObject, relation: str) -> bool:
    match relation:
        case "left of":
            return one.x < other.x
        case "right of":
            return one.x > other.x
        case "above":
            return one.y < other.y
        case "below":
            return one.y > other.y
        case _:
            raise RewardRequestError(f"gen_eval: {relation!r} is no place that can be checked")


def _colour(picture: Float[Tensor, "3 H W"], box: Float[Tensor, "4"]) -> str:
    """Return the colour of the middle half of a box, given as middle and size, 0 to 1."""
    height, width = picture.shape[-2:]
    x, y, across, down = box.tolist()
    top, bottom = int((y - down / 4) * height), int((y + down / 4) * height)
    left, right = int((x - across / 4) * width), int((x + across / 4) * width)
    rows = slice(max(top, 0), max(bottom, top + 1, 1))
    columns = slice(max(left, 0), max(right, left + 1, 1))
    mean = picture[:, rows, columns].mean(dim=(1, 2))
    far = {name: float((mean - torch.tensor(c)).square().sum()) for name, c in _COLOURS.items()}
    return min(far, key=lambda name: far[name])
