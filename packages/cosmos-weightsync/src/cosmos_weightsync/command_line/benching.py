"""``bench``: how fast each transport moves weights between two processes of this machine."""

import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import click

from cosmos_weightsync.command_line.output import (
    examples,
    human_bytes,
    report,
    show_errors,
    show_progress,
)
from cosmos_weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    PeerLostError,
    TransportUnavailableError,
)

__all__ = ["bench", "measure", "serve"]

_TRANSPORTS = ("shared_memory", "cross_memory", "tcp", "process_group", "nixl")
_NUM_COPIES = 5
"""Live weights, a version published, one received, and both ends of the copy."""
_PATIENCE_S = 120.0
_COUNT = click.IntRange(min=1)


def serve(pipe: Connection, num_mib: int) -> None:
    """The sending process: publishes a version whenever it is told to."""
    from cosmos_weightsync.sender import WeightSender

    os.dup2(2, 1)  # NIXL logs to stdout, which is for results.
    with WeightSender(_shards(num_mib)) as sender:
        pipe.send(sender.endpoint)
        while (version := pipe.recv()) is not None:
            sender.publish(version)
            pipe.send(version)


def measure(answers: Connection, sender: Connection, edge: tuple[str, str], first: int) -> None:
    """A receiving process of its own: answers with the times of as many transfers as it is told."""
    os.dup2(2, 1)
    answers.send(_times(sender, edge, first, _answer(answers)))


def _shards(num_mib: int) -> Any:
    import torch

    from cosmos_weightsync.shards import shards_of

    torch.set_num_threads(1)
    count = max(1, num_mib // 16)
    rows = num_mib * (1 << 20) // count // 2 // 1024
    return shards_of(
        [(f"layers.{i}.weight", torch.ones(rows, 1024).bfloat16()) for i in range(count)]
    )


@click.command(
    epilog=examples(
        "cosmos-weightsync bench --size 1024",
        "cosmos-weightsync bench --transport tcp --json",
    ),
    short_help="How fast each transport is on this machine, against a copy.",
)
@click.option("--size", "num_mib", default=256, show_default=True, type=_COUNT, help="MiB to move.")
@click.option(
    "--repeats", default=5, show_default=True, type=_COUNT, help="Transfers per transport."
)
@click.option(
    "--transport", "names", multiple=True, type=click.Choice(_TRANSPORTS), help="Only these."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def bench(num_mib: int, repeats: int, names: tuple[str, ...], as_json: bool) -> None:
    """Move a made-up model between two processes over each transport, checksums included.

    The bound is one copy of as many bytes in this process. One transfer warms up and is not
    counted. nixl is among them where it is installed.
    """
    with show_errors():
        _check_memory(num_mib)
        chosen = _to_measure(names)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, num_mib), daemon=True)
        process.start()
        theirs.close()
        try:
            steps = repeats * len(chosen)
            with show_progress("moving", steps * (num_mib << 20), as_json=as_json) as advance:
                facts: dict[str, Any] = {
                    "copy_bound": _speed(_copy_times(num_mib, repeats), num_mib)
                }
                endpoint = _answer(ours)
                for number, name in enumerate(chosen):
                    # NIXL may end its process, as it ends, by a crash.
                    times_of = _times_apart if name == "nixl" else _times
                    times = times_of(ours, (endpoint, name), 1000 * number, repeats)
                    advance(repeats * (num_mib << 20))
                    facts[name] = _speed(times, num_mib) if times else "not to be had here"
            ours.send(None)
            process.join(10)
        finally:
            process.kill()
        bound = facts["copy_bound"]
        for name in chosen:
            if isinstance(facts[name], dict):
                facts[name]["times_the_copy"] = (
                    bound["median_gb_per_s"] / (facts[name]["median_gb_per_s"])
                )
        if not as_json:
            facts = {name: _line(value) for name, value in facts.items()}
        report({"moved": human_bytes(num_mib << 20), **facts}, as_json=as_json)


def _to_measure(names: tuple[str, ...]) -> tuple[str, ...]:
    """The transports that were asked for, or all that are installed.

    Raises:
        ConfigurationError: one that was asked for is not.
    """
    from cosmos_weightsync.transports import NixlTransport

    if NixlTransport.is_installed():
        return names or _TRANSPORTS
    if "nixl" in names:
        raise ConfigurationError('nixl is not installed: pip install "cosmos-weightsync[nixl]"')
    return names or tuple(name for name in _TRANSPORTS if name != "nixl")


def _check_memory(num_mib: int) -> None:
    """Refuse what would fail half-way, or have the system kill somebody.

    Raises:
        ConfigurationError: so much does not fit into this machine's memory.
    """
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    if _NUM_COPIES * num_mib > there:
        raise ConfigurationError(
            f"--size {num_mib} takes {_NUM_COPIES} times as much memory, and this machine has "
            f"{there} MiB: up to {there // _NUM_COPIES} will do"
        )


def _answer(pipe: Connection) -> Any:
    """Return what the other process says next.

    Raises:
        DeadlineError: it says nothing.
        PeerLostError: it has ended.
    """
    if not pipe.poll(_PATIENCE_S):
        raise DeadlineError(f"the other process said nothing for {_PATIENCE_S:g} s")
    try:
        return pipe.recv()
    except EOFError as error:
        raise PeerLostError("the other process of this benchmark has ended") from error


def _line(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{key.replace('_', ' ')} {number:.2f}" for key, number in value.items())


def _copy_times(num_mib: int, repeats: int) -> list[float]:
    import torch

    source = torch.ones(num_mib << 20, dtype=torch.uint8)
    target = torch.zeros_like(source)
    times: list[float] = []
    for _ in range(repeats):
        started = time.monotonic()
        target.copy_(source)
        times.append(time.monotonic() - started)
    return times


def _times(pipe: Connection, edge: tuple[str, str], first: int, repeats: int) -> list[float]:
    from cosmos_weightsync.receiver import ReceiverConfig, WeightReceiver

    endpoint, transport = edge
    receiver = WeightReceiver([endpoint], config=ReceiverConfig(transport=transport))
    times: list[float] = []
    try:
        for version in range(first, first + repeats + 1):
            pipe.send(version)
            _answer(pipe)
            started = time.monotonic()
            receiver.stage(version, timeout_s=120.0)
            times.append(time.monotonic() - started)
    except TransportUnavailableError:
        return []
    finally:
        receiver.close()
    return times[1:]


def _times_apart(
    sender: Connection, edge: tuple[str, str], first: int, repeats: int
) -> list[float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=measure, args=(theirs, sender, edge, first), daemon=True)
    process.start()
    theirs.close()
    try:
        ours.send(repeats)
        return _answer(ours)
    finally:
        process.kill()
        process.join(10)


def _speed(times: list[float], num_mib: int) -> dict[str, float]:
    giga = (num_mib << 20) / 1e9
    return {
        "best_gb_per_s": giga / min(times),
        "median_gb_per_s": giga / statistics.median(times),
    }
