"""What the launcher leaves for the controller's process, which imports no torch and no recipe."""

import contextlib
import secrets
from pathlib import Path

from cosmos_app.errors import RunError
from cosmos_core.config import config_from_json, config_to_json
from cosmos_core.control import ControllerConfig
from cosmos_core.rundir import RunDirectory, write_atomic

_REDIS_FILE = "redis.url"
_NAMESPACE_FILE = "namespace"
_CONTROLLER_FILE = "controller.json"
_BEGUN_FILE = "begun"
_CUT_FILE = "cut.msgpack"
_WEIGHTS_TOKEN_FILE = "weights.token"
_MEETING_FILE = "meeting_place"
OWN_TEACHER = "teacher"
"""What the model of a run's own teachers is called."""
_TEACHER_TOKEN_FILE = "teachers.token"
_TEACHERS = "teachers"
_TOKEN_BYTES = 24


def write_address(run: RunDirectory, redis_url: str, namespace: str) -> None:
    """Leave the run's Redis URL, which may hold a password, for its owner's processes."""
    write_atomic(run.path / _REDIS_FILE, redis_url, mode=0o600)
    (run.path / _NAMESPACE_FILE).write_text(namespace)


def read_address(run: RunDirectory) -> tuple[str, str]:
    """Return the Redis URL and namespace of a run.

    Raises:
        RunError: if the run was never started, or is about to be, or is somebody else's.
    """
    try:
        return (run.path / _REDIS_FILE).read_text(), (run.path / _NAMESPACE_FILE).read_text()
    except FileNotFoundError as error:
        holder = run.holder()
        if holder is None:
            raise RunError(f"{run.path} was never started; use 'cosmos-app run'") from error
        raise RunError(
            f"{run.path} is being prepared by {holder}; ask again in a moment"
        ) from error
    except PermissionError as error:
        raise RunError(
            f"{run.path} is somebody else's: where its Redis is may be read by who started it alone"
        ) from error


def last_namespace(run: RunDirectory) -> str:
    """Return the namespace of the run's last start; empty if there was none."""
    path = run.path / _NAMESPACE_FILE
    return path.read_text() if path.exists() else ""


def note_begun(run: RunDirectory, namespace: str) -> None:
    """Leave that a controller has committed in this namespace."""
    write_atomic(run.path / _BEGUN_FILE, namespace)


def is_begun(run: RunDirectory, namespace: str) -> bool:
    """Tell whether a controller has committed in a namespace; each start of a run has its own."""
    path = run.path / _BEGUN_FILE
    return path.exists() and path.read_text() == namespace


def write_weights_token(run: RunDirectory) -> None:
    """Leave what policy replicas want to be shown by whoever fetches weights.

    Every user of a machine reaches its loopback, so runs on one machine have a token, too.
    """
    _write_token(run.path / _WEIGHTS_TOKEN_FILE)


def read_weights_token(run: RunDirectory) -> str:
    """Return what `write_weights_token` left; empty where a launcher before it started the run."""
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


def write_teacher_token(run: RunDirectory) -> None:
    """Leave what teachers want to be shown by whoever asks them; forget where they once were."""
    _write_token(run.path / _TEACHER_TOKEN_FILE)
    for left in (run.path / _TEACHERS).glob("*.url"):
        left.unlink()


def read_teacher_token(run: RunDirectory) -> str:
    """Return what `write_teacher_token` left.

    Raises:
        RunError: if there is none.
    """
    try:
        return (run.path / _TEACHER_TOKEN_FILE).read_text()
    except FileNotFoundError as error:
        raise RunError(f"{run.path} was started without teachers") from error


def teacher_url_file(run: RunDirectory, replica: str) -> Path:
    """Return where a teacher leaves its address while it listens."""
    return run.path / _TEACHERS / f"{replica}.url"


def teacher_urls(run: RunDirectory) -> list[str]:
    """Return where teachers listen now."""
    urls: list[str] = []
    for path in sorted((run.path / _TEACHERS).glob("*.url")):
        with contextlib.suppress(FileNotFoundError):  # it ended meanwhile
            urls.append(path.read_text())
    return urls


def _write_token(path: Path) -> None:
    token = path.read_text() if path.exists() else ""
    write_atomic(path, token or secrets.token_urlsafe(_TOKEN_BYTES), mode=0o600)


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
