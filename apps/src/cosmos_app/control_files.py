"""What the launcher leaves for the controller's process, which imports no torch and no recipe."""

import secrets
from pathlib import Path

from cosmos_app.errors import RunError
from cosmos_core.config import config_from_json, config_to_json
from cosmos_core.control import ControllerConfig
from cosmos_core.rundir import RunDirectory, write_atomic

_REDIS_FILE = "redis.url"
_NAMESPACE_FILE = "namespace"
_CONTROLLER_FILE = "controller.json"
_CUT_FILE = "cut.msgpack"
_WEIGHTS_TOKEN_FILE = "weights.token"
_MEETING_FILE = "meeting_place"
_TOKEN_BYTES = 24


def write_address(run: RunDirectory, redis_url: str, namespace: str) -> None:
    """Leave the run's Redis URL, which may hold a password, for its owner's processes."""
    path = run.path / _REDIS_FILE
    path.touch(mode=0o600)
    path.write_text(redis_url)
    (run.path / _NAMESPACE_FILE).write_text(namespace)


def read_address(run: RunDirectory) -> tuple[str, str]:
    """Return the Redis URL and namespace of a run.

    Raises:
        RunError: if the run was never started.
    """
    try:
        return (run.path / _REDIS_FILE).read_text(), (run.path / _NAMESPACE_FILE).read_text()
    except FileNotFoundError as error:
        raise RunError(f"{run.path} was never started; use 'cosmos-app run'") from error


def write_weights_token(run: RunDirectory) -> None:
    """Leave what policy replicas want to be shown by whoever fetches weights over a network."""
    path = run.path / _WEIGHTS_TOKEN_FILE
    path.touch(mode=0o600)
    if not path.read_text():
        path.write_text(secrets.token_urlsafe(_TOKEN_BYTES))


def read_weights_token(run: RunDirectory) -> str:
    """Return what `write_weights_token` left; empty for a run on one machine."""
    path = run.path / _WEIGHTS_TOKEN_FILE
    return path.read_text() if path.exists() else ""


def write_meeting_place(run: RunDirectory, address: str) -> None:
    """Leave where the replicas that train meet before each step."""
    write_atomic(run.path / _MEETING_FILE, address)


def forget_meeting_place(run: RunDirectory) -> None:
    """Remove what an earlier launch left."""
    (run.path / _MEETING_FILE).unlink(missing_ok=True)


def read_meeting_place(run: RunDirectory) -> str | None:
    """Return where the replicas that train meet, once that is known."""
    path = run.path / _MEETING_FILE
    return path.read_text() if path.exists() else None


def write_control(run: RunDirectory, config: ControllerConfig, cut: bytes) -> None:
    """Leave what the controller is told, and the sample stream it goes on with (or nothing)."""
    write_atomic(run.path / _CONTROLLER_FILE, config_to_json(config))
    write_atomic(run.path / _CUT_FILE, cut)


def read_control(run_dir: Path) -> tuple[ControllerConfig, bytes]:
    """Return what `write_control` left.

    Raises:
        RunError: if the run was never started.
    """
    try:
        text = (run_dir / _CONTROLLER_FILE).read_text()
        return config_from_json(ControllerConfig, text), (run_dir / _CUT_FILE).read_bytes()
    except FileNotFoundError as error:
        raise RunError(f"{run_dir} was never started; use 'cosmos-app run'") from error
