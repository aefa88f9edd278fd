"""``push``, ``pull`` and ``verify``: checkpoints between machines, whole and bit for bit."""

import secrets
import socket
import time
from pathlib import Path

import click

from cosmos_weightsync.command_line.output import (
    examples,
    fail,
    human_bytes,
    report,
    show_errors,
    show_progress,
)
from cosmos_weightsync.errors import ConfigurationError
from cosmos_weightsync.files.checkpoints import read_checkpoint
from cosmos_weightsync.files.manifests import MANIFEST_NAME, read_manifest
from cosmos_weightsync.files.pulling import PushedDirectory, files_of, pull_directory
from cosmos_weightsync.files.pushing import DirectoryServer
from cosmos_weightsync.files.storage import ReadableStorage, Storage, open_storage
from cosmos_weightsync.files.verifying import compare_checkpoints, verify_against_manifest
from cosmos_weightsync.frames import is_loopback, parse_endpoint
from cosmos_weightsync.server import is_every_address

__all__ = ["pull", "push", "verify"]

_OTHERS = (
    "cannot connect: begin again with --host and an address of this machine, or 0.0.0.0 for all"
)
_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object a line on stdout.")


@click.command(
    epilog=examples(
        "cosmos-weightsync push ./model --host 10.0.0.5",
        "cosmos-weightsync push ./model --once --json",
    ),
    short_help="Serve a checkpoint directory to other machines.",
)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=0, help="Port; a free one when not given.")
@click.option("--token", default="", help="What pullers must show; made up when not given.")
@click.option("--once", is_flag=True, help="End when one puller has everything.")
@_JSON
def push(directory: Path, host: str, port: int, token: str, once: bool, as_json: bool) -> None:
    """Serve a checkpoint DIRECTORY until Ctrl-C; prints the command that fetches it.

    Only this host can connect unless --host names another address. Whoever pulls needs the token.
    """
    with show_errors():
        found = read_checkpoint(directory)
        server = DirectoryServer(
            directory, host=host, port=port, token=token or secrets.token_urlsafe(16)
        )
        total = sum(server.files.values())
        facts = {
            "endpoint": server.endpoint,
            "token": server.token,
            "files": len(server.files),
            "tensors": len(found.tensors),
            "total_bytes": total,
            "pull": f"cosmos-weightsync pull {_reached_at(server)} DIR --token {server.token}",
        }
        if is_loopback(parse_endpoint(server.endpoint)[0]):
            facts["other_machines"] = _OTHERS
        try:
            report(facts, as_json=as_json)
            _serve(server, total, once=once, as_json=as_json)
        except KeyboardInterrupt:
            if not as_json:
                click.echo(f"Ended after {human_bytes(server.bytes_sent)}.", err=True)
        finally:
            server.close()


def _reached_at(server: DirectoryServer) -> str:
    """Where others find it: by the name of this host, if it listens on all addresses."""
    host, port = parse_endpoint(server.endpoint)
    return f"{socket.gethostname()}:{port}" if is_every_address(host) else server.endpoint


def _serve(server: DirectoryServer, total: int, *, once: bool, as_json: bool) -> None:
    sent = 0
    with show_progress("sent", total, as_json=as_json) as advance:
        while not (once and server.num_finished and not server.num_open):
            time.sleep(0.1)
            advance(server.bytes_sent - sent)
            sent = server.bytes_sent


@click.command(
    epilog=examples(
        "cosmos-weightsync pull 10.0.0.5:4321 ./model --token-file token",
        "cosmos-weightsync pull s3://bucket/run/v00000007 ./model",
    ),
    short_help="Fetch a checkpoint; run it again to go on.",
)
@click.argument("source")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--token", default="", help="As 'push' printed it.")
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file that holds the token, which other users of this machine then do not see.",
)
@click.option(
    "--timeout",
    "timeout_s",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds to wait for any one answer.",
)
@_JSON
def pull(
    source: str,
    directory: Path,
    token: str,
    token_file: Path | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Fetch a checkpoint from SOURCE into DIRECTORY; run it again to go on after an interruption.

    SOURCE is the endpoint that 'push' printed, a directory, or a URL such as s3://bucket/v00000007.
    Every chunk is checked. What is there already and is the same is not fetched again.
    """
    with show_errors("Run the same command again to go on where it stopped."):
        if token_file is not None:
            token = _token_in(token_file)
        started = time.monotonic()
        storage = _opened(source, token, timeout_s)
        try:
            total = sum(size for _, size in files_of(storage))
            with show_progress("pulling", total, as_json=as_json) as advance:
                pulled = pull_directory(storage, directory, advance)
        finally:
            if isinstance(storage, PushedDirectory):
                storage.close()
        seconds = time.monotonic() - started
        kept = sum(item.num_kept for item in pulled)
        facts = {
            "directory": str(directory),
            "files": len(pulled),
            "total_bytes": total,
            "kept_bytes": kept,
            "fetched_bytes": total - kept,
            "seconds": seconds,
        }
        report(facts, as_json=as_json)


def _token_in(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file}: no token can be read there: {error}") from error


def _opened(source: str, token: str, timeout_s: float) -> ReadableStorage:
    host, _, port = source.rpartition(":")
    if source and ("://" in source or Path(source).is_dir()):
        return open_storage(source)
    if host and port.isdecimal():
        return PushedDirectory(source, token=token, timeout_s=timeout_s)
    raise ConfigurationError(
        f"{source or 'an empty SOURCE'}: neither host:port, nor a directory that exists, nor a URL "
        "such as s3://..."
    )


@click.command(
    epilog=examples(
        "cosmos-weightsync verify checkpoints/v00000007",
        "cosmos-weightsync verify ./model ./copy --json",
    ),
    short_help="Check a directory against its manifest or another one.",
)
@click.argument("directory")
@click.argument("other", required=False)
@_JSON
def verify(directory: str, other: str | None, as_json: bool) -> None:
    """Check DIRECTORY against its manifest, or compare its tensors with those of OTHER.

    Both may be local directories or URLs. Files may be cut differently; names, shapes, dtypes and
    every bit of the tensors count. Ends with status 1 where there is a difference.
    """
    with show_errors():
        for name in (directory, *([] if other is None else [other])):
            if not name or ("://" not in name and not Path(name).is_dir()):
                raise ConfigurationError(f"{name or 'an empty name'}: there is no such directory")
        storage = open_storage(directory)
        if other is None and storage.size(MANIFEST_NAME) is None:
            raise ConfigurationError(
                f"{directory} has no {MANIFEST_NAME}: name a second checkpoint to compare with"
            )
        total = _bytes_to_check(storage, by_manifest=other is None)
        with show_progress("verifying", total, as_json=as_json) as advance:
            if other is not None:
                found = compare_checkpoints(storage, open_storage(other), advance)
            else:
                _, found = verify_against_manifest(storage, advance)
        differences = [f"{item.name}: {item.reason}" for item in found]
        facts = {"same": not found, "checked_bytes": total, "differences": differences}
        report(facts, as_json=as_json)
    if found:
        fail(f"{len(found)} differences")


def _bytes_to_check(storage: Storage, *, by_manifest: bool) -> int:
    if by_manifest:
        return sum(box.stored.spec.num_bytes for box in read_manifest(storage).boxes)
    return read_checkpoint(storage).num_bytes
