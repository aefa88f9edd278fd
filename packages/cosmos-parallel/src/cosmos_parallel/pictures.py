"""What a model that sees takes besides tokens: its pictures as tensors, and marks made wide.

A chat template writes one mark for a picture; the model wants as many tokens as it makes of it.

    rendered    <user> [mark]                what is it?  <assistant>
    expanded    <user> [img] [img] [img]     what is it?  <assistant>
    arguments   pixel_values of 3 tokens; mm_token_type_ids 0 1 1 1 0 ...

Both are the work of the model's own processor, one picture at a time. Where torchvision can be
imported, pixels are those of its resampling, as in vLLM; else Pillow's, which differ by a grey
level here and there where a picture is made smaller or larger. Videos stand among the pictures,
told by their references (`cosmos_parallel.videos`).
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cosmos_core.images import image_size, read_image
from cosmos_core.videos import is_video
from cosmos_parallel.errors import PackingError, PictureError
from cosmos_parallel.generic_weights import auto_class
from cosmos_parallel.models import read_config
from cosmos_parallel.picture_tokens import Kind, check_marks, check_row, kinds_of, naming
from cosmos_parallel.pictures_ahead import PicturesAhead, num_bytes
from cosmos_parallel.processors import load_processor
from cosmos_parallel.rotary_axes import RotaryAxes, has_rotary_axes, sees
from cosmos_parallel.videos import VideoReader

if TYPE_CHECKING:
    from PIL import Image
    from transformers import PretrainedConfig

# 32 x 32 pixels, black
BLANK_PICTURE = (
    "data:;base64,iVBORw0KGgoAAAANSUhEUgAAACAAAAAgAQAAAABbAUdZAAAADElEQVR42mNgGNwAAACgAAGO+7G0AAAAAEl"
    "FTkSuQmCC"
)
_BLANK_SIZE = (32, 32)
_MOST_BYTES = 256 << 20  # of pictures that may be shown again: 10 of a megapixel each
_MOST_BYTES_AHEAD = 1 << 30
# by which names models are told which tokens are pictures
TOKEN_KINDS = frozenset({"mm_token_type_ids", "token_type_ids"})
_OF_TEXT = TOKEN_KINDS | {"input_ids", "attention_mask", "labels"}
# attend to a prompt both ways, or to pictures beside the tokens: a row of tokens says neither
_UNTOLD = ("paligemma", "mllama")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class PictureReader:
    """Turns pictures and videos into the arguments of one model.

    References of both stand in the same sequences, in the order of their marks.

    Attributes:
        image_token_ids: the tokens in whose places the model puts what it sees of pictures.
        mark_id: the token that a chat template writes for a picture.
        mark_ids: the same, and that of a video where the model sees videos.
        packs: whether rows may hold several samples.
    """

    def __init__(self, processor: Any, config: "PretrainedConfig") -> None:
        """Take a processor that marks pictures by a token, and the model's config; see `of`.

        Raises:
            PictureError: if the processor refuses the picture of a blank row.
        """
        self.packs = has_rotary_axes(config)
        self._processor = processor
        self._config = config
        kind: Any = auto_class(config)._model_mapping[type(config)]
        self._arguments = frozenset(inspect.signature(kind.forward).parameters)
        self._kind_name = next(iter(TOKEN_KINDS & self._arguments), None)
        self._axes = RotaryAxes(config) if self.packs else None
        self._mark: str = processor.image_token
        self.mark_id = int(processor.tokenizer.convert_tokens_to_ids(self._mark))
        self.image_token_ids: tuple[int, ...] = tuple(processor.image_token_ids)
        self._videos = VideoReader(processor, config)
        pictures = Kind(
            name="pictures",
            mark=self._mark,
            mark_id=self.mark_id,
            token_ids=self.image_token_ids,
        )
        self._kinds = (pictures, *self._videos.kinds)
        self.mark_ids = tuple(kind.mark_id for kind in self._kinds)
        self._expansions: dict[tuple[int, int], list[int]] = {}
        self._recent = _Recent(_MOST_BYTES)
        self._ahead = PicturesAhead(self._made, _MOST_BYTES_AHEAD)
        self._one_at_a_time = Lock()  # a tokenizer is of one thread
        self._repeats = False
        with naming(BLANK_PICTURE, "blank row"):
            self._repeats = self._can_count()

    @classmethod
    def of(cls, model_dir: Path) -> "PictureReader | None":
        """Return the reader of a model directory; ``None`` where no pictures can be shown to it.

        That is a model without a vision part, a directory without its processor's settings, and
        a type to which tokens do not tell all about its pictures, which trains on text alone.

        Raises:
            ModelMismatchError: if transformers does not know such a model.
            PictureError: if its processor cannot be loaded.
        """
        config = read_config(model_dir)
        has_settings = any((model_dir / name).is_file() for name in _PROCESSOR_FILES)
        if not sees(config) or not has_settings or config.model_type in _UNTOLD:
            return None
        processor = load_processor(model_dir, config)
        has_mark = getattr(processor, "image_token", None) is not None
        return cls(processor, config) if has_mark else None

    def check_videos(self) -> None:
        """Check that the model can be shown videos.

        Raises:
            PictureError: if it cannot, or torchvision is not installed.
        """
        self._videos.check()

    def blank_row(self) -> list[int]:
        """Return the tokens of a sample that shows ``BLANK_PICTURE``, with nothing to train on.

        Ranks that share a model must all enter its vision part, or none: a batch without pictures
        of its own has this row.
        """
        return [0, *self._expansion(*_BLANK_SIZE)]

    def expand(
        self, token_ids: Sequence[int], images: Sequence[str], where: str = "prompt"
    ) -> list[int]:
        """Return tokens in which each mark has become what its picture or video takes.

        Of pictures only the sizes are read, and of videos which frames are shown.

        Args:
            token_ids: as a chat template renders them, with one mark for each picture or video.
            images: references, in the order of the marks.
            where: named in errors.

        Raises:
            PictureError: if marks and references do not meet, or one cannot be read; for a video
                too, if the model is not shown any, or torchvision is not installed.
        """
        return [token for span in self.spans(token_ids, images, where) for token in span]

    def spans(
        self, token_ids: Sequence[int], images: Sequence[str], where: str = "prompt"
    ) -> list[list[int]]:
        """Return, for each token, the tokens that stand for it; see `expand`."""
        for reference in images:
            if is_video(reference):
                with naming(reference, where):
                    self._videos.check()
        check_marks(token_ids, images, self._kinds, where)
        waiting = iter(images)
        return [
            self._expansion_of(next(waiting), where) if token in self.mark_ids else [token]
            for token in token_ids
        ]

    def inputs(
        self, token_ids: Tensor, images: Sequence[Sequence[str]], names: Sequence[str] = ()
    ) -> dict[str, Tensor]:
        """Return what the model takes besides its tokens, which it is given `as_seen`.

        Args:
            token_ids: int64[B, T], expanded and padded.
            images: the pictures and videos of each row.
            names: of the rows, for errors; their numbers if not given.

        Returns:
            Tensors of all rows' pictures and videos, one after the other, by the model's own names
            for pictures, such as ``pixel_values`` and ``image_grid_thw``; ``mm_token_type_ids`` or
            ``token_type_ids`` [B, T] where the model takes it, 1 on pictures and 2 on videos; and
            if there is a video ``position_ids`` [3, B, T].

        Raises:
            PictureError: naming the row, if a picture cannot be read, or its tokens are not there;
                or if no row has a picture (see `blank_row`).
        """
        if not any(images):
            raise PictureError("no row has a picture; add one with blank_row()")
        found: dict[str, list[Tensor]] = {}
        pictures: list[Tensor] = []  # grids of both
        videos: list[Tensor] = []
        seconds: list[Tensor] = []
        for index, references in enumerate(images):
            name = names[index] if index < len(names) else f"row {index}"
            shown = [self._seen(reference, name) for reference in references]
            taken = [tensors["input_ids"][0] for tensors in shown]
            row = token_ids[index].cpu()
            check_row(row, list(zip(references, taken, strict=True)), self._kinds, name)
            for reference, tensors in zip(references, shown, strict=True):
                for key in tensors.keys() & self._arguments - _OF_TEXT:
                    found.setdefault(key, []).append(tensors[key])
                if self.packs:
                    grids = videos if is_video(reference) else pictures
                    grids.append(tensors["image_grid_thw"])
                if "seconds" in tensors:
                    seconds.append(tensors["seconds"])
        inputs = {key: self._join(key, parts) for key, parts in found.items()}
        kinds = kinds_of(token_ids, self._kinds)
        if self._kind_name is not None:
            inputs[self._kind_name] = kinds
        if videos:
            assert self._axes is not None  # who has none is shown no videos
            inputs["position_ids"] = self._axes.positions(
                kinds, pictures=pictures, videos=videos, seconds=seconds
            )
        return inputs

    def show_next(self, images: Iterable[str]) -> None:
        """Begin to make tensors of pictures and videos, in a thread: of those that come next.

        Args:
            images: references in the order in which `inputs` will want them; what was said before
                is forgotten.
        """
        self._ahead.begin(images)

    def as_seen(self, token_ids: Tensor) -> Tensor:
        """Return tokens [B, T] as the model is given them: those of videos are those of pictures.

        So it looks at all at once, as all ranks that share it must.
        """
        is_video_token = kinds_of(token_ids, self._kinds) > 1
        return token_ids.masked_fill(is_video_token, self.image_token_ids[0])

    def positions(self, token_ids: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return positions [4, B, T] with which samples of several rows may share one.

        The first axis counts each row's tokens, which tells samples apart; the others are the
        model's own for time, height and width.

        Args:
            token_ids: int64[B, T], one sample in each row, padded on the right.
            inputs: of these rows.

        Raises:
            PackingError: if the model has no such positions.
        """
        if self._axes is None:
            raise PackingError(
                f"{self._config.model_type} models do not tell samples of a row with pictures "
                "apart; use the padded layout"
            )
        axes = inputs.get("position_ids")
        if axes is None:
            kinds, grids = inputs["mm_token_type_ids"], inputs["image_grid_thw"]
            axes = self._axes.positions(kinds, pictures=[grids])
        count = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
        return torch.cat([count[None], axes])

    def _can_count(self) -> bool:
        """Whether a picture's tokens are one token, as often as the processor says of its size."""
        expansion = self._expansion(*_BLANK_SIZE)
        counted = self._count(*_BLANK_SIZE)
        return expansion == [self.image_token_ids[0]] * counted

    def _count(self, height: int, width: int) -> int:
        count = getattr(self._processor, "_get_num_multimodal_tokens", None)
        if count is None:
            return -1
        return int(count(image_sizes=[(height, width)])["num_image_tokens"][0])

    def _expansion_of(self, reference: str, where: str) -> list[int]:
        with naming(reference, where):
            if is_video(reference):
                return self._videos.expansion(reference)
            return self._expansion(*image_size(reference))

    def _expansion(self, height: int, width: int) -> list[int]:
        """Return the tokens of a picture of this size."""
        if (height, width) not in self._expansions:
            if self._repeats:
                made = [self.image_token_ids[0]] * self._count(height, width)
            else:
                from PIL import Image

                tensors = self._process(Image.new("RGB", (width, height)))
                made = tensors["input_ids"][0].tolist()
            self._expansions[height, width] = made
        return self._expansions[height, width]

    def _seen(self, reference: str, name: str) -> dict[str, Tensor]:
        """Return a picture as tensors; samples of a group show the same, one after the other."""
        tensors = self._recent.get(reference)
        if tensors is None:
            tensors = self._ahead.take(reference)
            if tensors is None:
                with naming(reference, name):
                    tensors = self._made(reference)
            self._recent.put(reference, tensors)
        return tensors

    def _made(self, reference: str) -> dict[str, Tensor]:
        with self._one_at_a_time:
            if is_video(reference):
                return self._videos.tensors(reference)
            return self._process(read_image(reference))

    def _process(self, picture: "Image.Image") -> dict[str, Tensor]:
        """Return what the processor makes of one mark and its picture."""
        given = self._processor(
            images=[picture], text=[self._mark], add_special_tokens=False, return_tensors="pt"
        )
        return dict(given)

    def _join(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        shapes = sorted({tuple(part.shape[1:]) for part in parts})
        if len(shapes) > 1:
            raise PictureError(
                f"{self._config.model_type} models have {name} of several shapes "
                f"({', '.join(map(str, shapes))}) for pictures of several sizes, which are not "
                "joined into one batch; make the pictures of one size"
            )
        return torch.cat(list(parts))


class _Recent:
    """The pictures used last as tensors, up to so many bytes; older ones are forgotten."""

    def __init__(self, most_bytes: int) -> None:
        self._room = most_bytes
        self._kept: dict[str, dict[str, Tensor]] = {}  # the least recent first

    def get(self, reference: str) -> dict[str, Tensor] | None:
        tensors = self._kept.pop(reference, None)
        if tensors is not None:
            self._kept[reference] = tensors
        return tensors

    def put(self, reference: str, tensors: dict[str, Tensor]) -> None:
        self._kept[reference] = tensors
        self._room -= num_bytes(tensors)
        while self._room < 0:
            self._room += num_bytes(self._kept.pop(next(iter(self._kept))))
