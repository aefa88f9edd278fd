"""The two sides of a transfer as a person names them: files, checkpoints or just a size."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.command_line.options import bundled
from cosmos_weightsync.cuts import cut_layout, parse_cut
from cosmos_weightsync.errors import LayoutError
from cosmos_weightsync.files.checkpoints import read_checkpoint
from cosmos_weightsync.layout import Layout, ShardSpec

__all__ = ["Sides", "made_up_layout", "read_layout", "sides_arguments"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]B)", re.IGNORECASE)
_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_NUM_COLUMNS = 1024
_MAX_TENSORS = 64


@dataclass(frozen=True, slots=True)
class Sides:
    """What the arguments say about both sides."""

    sender: str
    receiver: str | None
    sender_cut: str | None
    receiver_cut: str | None

    def layouts(self) -> tuple[Layout, Layout]:
        """Both layouts, cut as asked.

        Raises:
            LayoutError: one cannot be read.
            ConfigurationError: a cut makes no sense.
        """
        offered = read_layout(self.sender)
        wanted = read_layout(self.receiver) if self.receiver else offered
        if self.sender_cut:
            offered = cut_layout(offered, parse_cut(self.sender_cut))
        if self.receiver_cut:
            wanted = cut_layout(wanted, parse_cut(self.receiver_cut))
        return offered, wanted


def sides_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the arguments that name two layouts, as its argument ``sides``."""
    options = (
        click.argument("sender"),
        click.argument("receiver", required=False),
        click.option(
            "--senders",
            "sender_cut",
            metavar="CUT",
            help="Cut SENDER anew: fsdp=8,tp=2 or replicas=2,fsdp=4.",
        ),
        click.option(
            "--receivers", "receiver_cut", metavar="CUT", help="Cut RECEIVER: tp=2,replicas=4."
        ),
    )
    return bundled(command, "sides", Sides, options)


def read_layout(where: str) -> Layout:
    """A layout in a ``.json`` or ``.msgpack`` file, that of a safetensors directory, or of a size.

    Raises:
        LayoutError: it is none of these.
    """
    size = _SIZE.fullmatch(where)
    if size is not None:
        return made_up_layout(int(float(size[1]) * _UNITS[size[2].upper()]))
    path = Path(where)
    try:
        if path.suffix == ".msgpack":
            return Layout.from_msgpack(path.read_bytes())
        if path.suffix == ".json":
            return Layout.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise LayoutError(f"{where}: {error}") from error
    if "://" not in where and not path.exists():
        raise LayoutError(
            f"{where}: there is no such file or directory; give a layout (.json, .msgpack), a "
            "safetensors checkpoint, or a size such as 16GB"
        )
    return read_checkpoint(where).layout()


def made_up_layout(num_bytes: int) -> Layout:
    """Equal bfloat16 matrices of about so many bytes together, whole on one rank."""
    count = min(_MAX_TENSORS, max(1, num_bytes >> 20))
    shape = (max(1, round(num_bytes / count / 2 / _NUM_COLUMNS)), _NUM_COLUMNS)
    box = Box.full(shape)
    specs = [ShardSpec(f"layers.{i}.weight", shape, box, "bfloat16") for i in range(count)]
    return Layout.from_ranks([specs])
