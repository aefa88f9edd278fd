"""Pictures and videos of supervised rows: taken out of messages, and tokens by their sizes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_core.media import MediaError, text_of, with_media
from cosmos_core.videos import VideoSampling
from cosmos_parallel.errors import PictureError, SftDataError
from cosmos_parallel.pictures import PictureReader
from cosmos_parallel.sft_examples import SftExample


def take_media(
    messages: Sequence[dict[str, Any]],
    where: str,
    *,
    images: Sequence[object],
    videos: Sequence[object],
    folder: Path,
    sampling: VideoSampling,
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return messages as chat templates take them, and references of their pictures and videos.

    What is text alone becomes a plain text, which templates of models without sight need.

    Args:
        messages: checked; contents are texts or lists of parts.
        where: the row, named in errors.
        images: the row's pictures beside its messages.
        videos: the same of videos.
        folder: paths are relative to it.
        sampling: which frames are shown of videos that do not say it themselves.

    Raises:
        SftDataError: naming the message and the part that is wrong.
    """
    try:
        taken, references = with_media(messages, images, videos, folder=folder, sampling=sampling)
    except MediaError as error:
        raise SftDataError(f"{where}: {error}") from error
    if references:
        return list(taken), references
    plain = [
        message | {"content": text_of(message["content"])}
        if isinstance(message["content"], list)
        else message
        for message in taken
    ]
    return plain, ()


def widen(
    example: SftExample, images: tuple[str, ...], reader: PictureReader | None, where: str
) -> SftExample:
    """Return an example whose pictures and videos have the tokens that the model makes of them.

    These are not trained on, whoever shows them.

    Args:
        example: with one mark for each picture or video.
        images: references, in the order of the marks.
        reader: of the model; ``None`` for one that sees nothing.
        where: the row, named in errors and later by batches.

    Raises:
        SftDataError: if the model sees nothing, a picture cannot be read, or marks are not those
            of the pictures and videos.
    """
    if reader is None:
        if images:
            raise SftDataError(
                f"{where}: has {len(images)} pictures or videos, and the model sees none: its "
                "directory has no vision part in config.json, no preprocessor_config.json, or a "
                "type that is not trained with pictures"
            )
        return example
    try:
        spans = reader.spans(example.token_ids.tolist(), images, where)
    except PictureError as error:
        raise SftDataError(str(error)) from error
    sizes = [len(span) for span in spans]
    is_text = ~np.isin(example.token_ids, reader.mark_ids)
    return replace(
        example,
        token_ids=np.asarray([token for span in spans for token in span], dtype=np.int32),
        trainable=np.repeat(example.trainable & is_text, sizes),
        images=images,
        name=where if images else "",
    )
