"""Coloured shapes in a picture, found by plain segmentation, and what a prompt asks for of them.

The tasks are GenEval's (arXiv 2310.11513) without its detector: one object, two objects, counts,
colours, places, and colours of two objects.

    "two red squares left of a blue disc"
        objects: 2 red square, 1 blue disc        relation: the first is left of the second
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from cosmos_wfm.errors import WfmConfigError

Mask = npt.NDArray[np.bool_]

COLOURS: Mapping[str, tuple[float, float, float]] = {
    "red": (0.86, 0.12, 0.12),
    "green": (0.12, 0.78, 0.12),
    "blue": (0.12, 0.12, 0.86),
    "yellow": (0.86, 0.86, 0.12),
    "white": (0.98, 0.98, 0.98),
    "black": (0.02, 0.02, 0.02),
}
SHAPES = ("diamond", "disc", "square", "triangle")
_SYNONYMS = {"circle": "disc", "disk": "disc", "box": "square", "rhombus": "diamond"}
_FEW = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6}
_NUMBERS = {**_FEW, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12}
_RELATIONS: Mapping[str, Callable[["SeenShape", "SeenShape"], bool]] = {
    "left of": lambda one, other: one.x < other.x,
    "right of": lambda one, other: one.x > other.x,
    "above": lambda one, other: one.y < other.y,
    "below": lambda one, other: one.y > other.y,
}
_LONGEST_SIDE = 96
_BACKGROUND = 0.08
"""Squared distance to the background's colour from which on a pixel belongs to a shape."""
_TEMPLATE = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenShape:
    """A shape in a picture.

    Attributes:
        shape: one of ``SHAPES``.
        colour: the nearest of ``COLOURS``.
        x: of its middle, 0 at the left edge to 1.
        y: of its middle, 0 at the top to 1.
    """

    shape: str
    colour: str
    x: float
    y: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedShape:
    """What a prompt asks for.

    Attributes:
        shape: one of ``SHAPES``.
        colour: one of ``COLOURS``, or empty if any will do.
        num: how many.
    """

    shape: str
    colour: str = ""
    num: int = 1

    def among(self, seen: Sequence[SeenShape]) -> list[SeenShape]:
        """Return those of this shape, and of this colour if one is asked for."""
        return [s for s in seen if s.shape == self.shape and self.colour in ("", s.colour)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A prompt that is understood.

    Attributes:
        objects: that it names, in order.
        relation: of the first to the second: ``left of``, ``right of``, ``above``, ``below``, or
            empty.
    """

    objects: tuple[WantedShape, ...]
    relation: str = ""


def read_scene(prompt: str) -> Scene:
    """Return what a prompt asks for.

    Raises:
        WfmConfigError: if it names no shape, or a relation without two objects.
    """
    number, colour = "|".join([*_NUMBERS, "[1-9][0-9]?"]), "|".join(COLOURS)
    names = "|".join([*SHAPES, *_SYNONYMS])
    pattern = rf"\b(?:({number})\s+)?(?:({colour})\s+)?({names})(?:s|es)?\b"
    text = prompt.lower()
    objects = tuple(
        WantedShape(
            shape=_SYNONYMS.get(found[3], found[3]),
            colour=found[2] or "",
            num=_NUMBERS.get(found[1] or "a") or int(found[1]),
        )
        for found in re.finditer(pattern, text)
    )
    relation = next((name for name in _RELATIONS if re.search(rf"\b{name}\b", text)), "")
    if not objects or (relation and len(objects) < 2):
        wanted = "two shapes to be" if relation else "a shape:"
        raise WfmConfigError(
            f"reward: {prompt!r} does not name {wanted} {relation or ', '.join(SHAPES)}"
        )
    return Scene(objects=objects, relation=relation)


def find_shapes(frame: Float[Tensor, "3 H W"]) -> list[SeenShape]:
    """Return the shapes in a picture in [0, 1] before a background of one colour.

    The background is what most of the border is. What differs from it falls into connected parts
    of one named colour; each is the shape whose outline covers it best. Parts thinner than three
    pixels, such as blurred edges, are none.
    """
    small = _at_most(frame.float().clamp(0.0, 1.0), _LONGEST_SIDE)
    height, width = small.shape[-2:]
    border = torch.cat([small[:, 0], small[:, -1], small[:, :, 0], small[:, :, -1]], dim=1)
    background = border.median(dim=1).values
    is_shape = (small - background[:, None, None]).square().sum(0) > _BACKGROUND
    palette = torch.tensor(list(COLOURS.values()))
    nearest = (small[None] - palette[:, :, None, None]).square().sum(1).argmin(0)
    seen: list[SeenShape] = []
    for number, colour in enumerate(COLOURS):
        for part in _parts((is_shape & (nearest == number)).numpy()):
            rows, columns = np.nonzero(part)
            box = part[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
            x = (columns.min() + columns.max() + 1) / (2 * width)
            y = (rows.min() + rows.max() + 1) / (2 * height)
            seen.append(SeenShape(shape=_outline(box), colour=colour, x=float(x), y=float(y)))
    return seen


def present(scene: Scene, seen: Sequence[SeenShape]) -> float:
    """Return the share of the named shapes of which one is seen, in whatever colour."""
    return _mean([any(s.shape == want.shape for s in seen) for want in scene.objects])


def counted(scene: Scene, seen: Sequence[SeenShape]) -> float:
    """Return 1 - |seen - asked| / max of both, the mean over objects."""
    pairs = [(len(want.among(seen)), want.num) for want in scene.objects]
    return _mean([1.0 - abs(found - asked) / max(found, asked) for found, asked in pairs])


def coloured(scene: Scene, seen: Sequence[SeenShape]) -> float:
    """Return the share of the objects with a colour that are seen in it; 1 if none has one."""
    named = [want for want in scene.objects if want.colour]
    return _mean([bool(want.among(seen)) for want in named]) if named else 1.0


def placed(scene: Scene, seen: Sequence[SeenShape]) -> float:
    """Return 1 if some pair of the two objects is as asked, else 0; 1 if no place is asked for."""
    if not scene.relation:
        return 1.0
    holds = _RELATIONS[scene.relation]
    first, second = (want.among(seen) for want in scene.objects[:2])
    pairs = [(one, other) for one in first for other in second if one is not other]
    return float(any(holds(one, other) for one, other in pairs))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _at_most(frame: Float[Tensor, "3 H W"], longest: int) -> Float[Tensor, "3 h w"]:
    """Leave out rows and columns of large pictures: colours stay as they are."""
    step = max(1, -(-max(frame.shape[-2:]) // longest))
    return frame[:, ::step, ::step].cpu()


def _parts(mask: Mask) -> list[Mask]:
    """Return the connected parts (by edges) of a mask that have room for 3 x 3 pixels."""
    left, parts = mask.copy(), list[Mask]()
    for start in zip(*np.nonzero(mask), strict=True):
        if not left[start]:
            continue
        part = np.zeros_like(mask)
        stack = [(int(start[0]), int(start[1]))]
        left[start] = False
        while stack:
            y, x = stack.pop()
            part[y, x] = True
            for row, column in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                inside = 0 <= row < mask.shape[0] and 0 <= column < mask.shape[1]
                if inside and left[row, column]:
                    left[row, column] = False
                    stack.append((row, column))
        if _has_room(part):
            parts.append(part)
    return parts


def _has_room(part: Mask) -> bool:
    if min(part.shape) < 3:
        return False
    windows = np.lib.stride_tricks.sliding_window_view(part, (3, 3))
    return bool(windows.all(axis=(2, 3)).any())


def _outline(box: Mask) -> str:
    """Return the shape whose outline, stretched over the box, agrees with it on most pixels."""
    rows = (np.arange(_TEMPLATE) * box.shape[0]) // _TEMPLATE
    columns = (np.arange(_TEMPLATE) * box.shape[1]) // _TEMPLATE
    stretched = box[rows][:, columns]
    agreement = {name: (stretched == template).mean() for name, template in _templates().items()}
    return max(agreement, key=lambda name: agreement[name])


def _templates() -> dict[str, Mask]:
    at = (np.arange(_TEMPLATE) + 0.5) / _TEMPLATE * 2.0 - 1.0
    y, x = at[:, None], at[None, :]
    return {
        "diamond": np.abs(x) + np.abs(y) <= 1.0,
        "disc": x**2 + y**2 <= 1.0,
        "square": np.ones((_TEMPLATE, _TEMPLATE), dtype=np.bool_),
        "triangle": np.abs(x) <= (y + 1.0) / 2.0,
    }
