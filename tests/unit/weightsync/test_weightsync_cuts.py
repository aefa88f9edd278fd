"""Layouts cut as a person says it: which degrees make sense, and that long work is shown."""

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import cosmos_weightsync
from cosmos_weightsync import Box, ConfigurationError, Layout, ShardSpec
from cosmos_weightsync.command_line import main
from cosmos_weightsync.cuts import cut_layout, parse_cut

TENSORS = {
    "q_proj": ((8, 4), "bfloat16"),
    "o_proj": ((8, 4), "bfloat16"),
    "k_proj": ((8, 4), "float32"),
    "scale": ((6,), "bfloat16"),
    "steps": ((), "int64"),
}


def whole() -> Layout:
    return Layout.from_ranks([[ShardSpec(n, s, Box.full(s), d) for n, (s, d) in TENSORS.items()]])


def test_every_tensor_is_cut_by_its_shape_and_keeps_its_dtype():
    cut = cut_layout(whole(), parse_cut("fsdp=2,tp=2"))
    rows = Box((6, 0), (8, 4))  # The second half of the second half.
    last = [
        ShardSpec("q_proj", (8, 4), rows, "bfloat16"),
        ShardSpec("o_proj", (8, 4), Box((4, 2), (8, 4)), "bfloat16"),
        ShardSpec("k_proj", (8, 4), rows, "float32"),
        ShardSpec("scale", (6,), Box((3,), (6,)), "bfloat16"),
    ]
    assert list(cut.specs_of(3)) == last
    assert [spec.name for spec in cut.specs_of(1)] == list(TENSORS)
    assert cut.specs_of(1)[4] == ShardSpec("steps", (), Box((), ()), "int64")
    assert len(cut.geometries) == 4
    assert cut_layout(whole(), parse_cut("replicas=3,fsdp=2,tp=2")).specs_of(11) == cut.specs_of(3)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("tp=9", r"tp=9: no tensor can be cut into so many parts.* has 8 \(q_proj\)"),
        ("fsdp=9", r"fsdp=9: no tensor can be cut into so many parts.* has 8 \(q_proj\)"),
    ],
)
def test_a_degree_longer_than_any_dim_is_refused(text, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        cut_layout(whole(), parse_cut(text))
    assert cut_layout(whole(), parse_cut(text.replace("9", "8"))).num_ranks == 8


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_command_refuses_it_at_once(command):
    result = CliRunner().invoke(main, [command, "1GB", "--receivers", "tp=100000"])
    assert result.exit_code == 1
    assert "tp=100000: no tensor can be cut into so many parts" in result.output
    assert "layers.0.weight" in result.output


def test_long_work_is_shown_on_a_terminal_and_not_in_a_pipe():
    terminal, its_end = pty.openpty()
    command = [sys.executable, "-m", "cosmos_weightsync", "plan", "16GB", "--receivers", "tp=20000"]
    source = str(Path(cosmos_weightsync.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "TERM": "xterm"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=its_end, env=environment)
    os.close(its_end)
    shown = bytearray()
    with contextlib.suppress(OSError):  # The terminal's end is gone.
        while part := os.read(terminal, 1 << 16):
            shown += part
    out, _ = process.communicate(timeout=120)
    os.close(terminal)
    assert process.returncode == 0
    assert b"planning" in shown
    assert b"planning" not in out
    assert b"20000" in out
