"""What generated programs can do with files, devices and other processes, and what they still can.

Each that misbehaves says what came of it; what it attacks was made by the test.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from sandboxes import (
    RUNS,
    WITHOUT_NAMESPACES,
    command_of,
    needs_own_files,
    needs_rules,
    result_of,
    run_without_binds,
)

from cosmos_rollout import (
    CodeReward,
    ProgramResult,
    RewardError,
    RewardInput,
    SandboxError,
    SandboxLimits,
    SandboxProtection,
    run_program,
    sandbox_protection,
)
from cosmos_rollout.rewards.sandbox_landlock import shown_paths

PATIENT = SandboxLimits(timeout_s=60.0)
TRY = """
import ctypes, os, shutil, signal, socket, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(action):
    try:
        action()
    except BaseException as error:
        print(type(error).__name__, flush=True)
    else:
        print("done", flush=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)
"""

FIRSTS = [
    pytest.param("", marks=needs_own_files, id="own"),
    pytest.param(WITHOUT_NAMESPACES, marks=needs_rules, id="rules"),
]
Run = Callable[[str, SandboxLimits], ProgramResult]


@dataclass(frozen=True, kw_only=True)
class User:
    """A user's files, all in a folder of the test's."""

    home: Path
    project: Path
    shared: Path
    limits: SandboxLimits


@pytest.fixture
def user(tmp_path, monkeypatch) -> User:
    """A home with a secret, a project in which the run was started, and a folder to read."""
    folders = [tmp_path / name for name in ("home", "project", "shared")]
    for folder in folders:
        (folder / "below").mkdir(parents=True)
        (folder / "file").write_text(f"of {folder.name}")
    monkeypatch.setenv("HOME", str(folders[0]))
    monkeypatch.chdir(folders[1])
    limits = SandboxLimits(timeout_s=60.0, readable=(str(tmp_path),))
    return User(home=folders[0], project=folders[1], shared=folders[2], limits=limits)


def attempts(run: Run, limits: SandboxLimits, actions: Mapping[str, str]) -> dict[str, str]:
    """Return what came of each action: "done", or the class of its error."""
    tries = "".join(f"attempt(lambda: {action})\n" for action in actions.values())
    result = run(TRY + tries, limits)
    assert result.exit_code == 0, result.stderr
    return dict(zip(actions, result.stdout.split(), strict=True))


@pytest.mark.parametrize("run", RUNS)
def test_files_that_a_program_may_read_stay_as_they_are(user, run):
    at = user.shared
    found = attempts(
        run,
        user.limits,
        {
            "write": f"open('{at}/file', 'w')",
            "append": f"open('{at}/file', 'a')",
            "delete": f"os.unlink('{at}/file')",
            "remove": f"shutil.rmtree('{at}/below')",
            "make": f"open('{at}/new', 'w')",
            "rename": f"os.rename('{at}/file', '{at}/other')",
            "link": f"os.link('{at}/file', '{at}/other')",
            "open": f"os.open('{at}/file', os.O_RDWR)",
            "truncate": f"os.truncate('{at}/file', 0)",
            "take": f"os.rename('{at}/file', 'mine')",
            "other program": f"subprocess.run(['rm', '{at}/file'], check=True, stderr=-3)",
        },
    )
    assert "done" not in found.values()
    assert sorted(path.name for path in at.iterdir()) == ["below", "file"]
    read = run(f"print(open('{at}/file').read())", user.limits)
    assert read.stdout == "of shared\n"


@pytest.mark.parametrize("run", RUNS)
def test_packages_and_the_system_cannot_be_changed(run):
    name = "cosmos-test-of-a-sandbox"
    places = [
        sys.prefix,
        sys.base_prefix,
        Path(pytest.__file__).parent,
        "/",
        "/etc",
        "/usr",
        "/var",
    ]
    found = attempts(run, PATIENT, {place: f"open('{place}/{name}', 'w')" for place in places})
    try:
        assert "done" not in found.values()
    finally:
        for place in places:
            Path(place, name).unlink(missing_ok=True)


@pytest.mark.parametrize("run", RUNS)
def test_secrets_and_data_are_not_there_to_read(user, run, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "file"
    elsewhere.write_text("in a temporary folder")
    actions = {
        "home": f"open('{user.home}/file')",
        "by ~": "open(os.path.expanduser('~/file'))",
        "project": f"open('{user.project}/file')",
        "temporary": f"open('{elsewhere}')",
        "above": "open('../../file')",
        "by a link": f"os.symlink('{user.home}', 'link') or open('link/file')",
        "of another": "os.listdir('/proc/1/cwd')",
    }
    found = attempts(run, user.limits, actions)
    assert set(found.values()) <= {"FileNotFoundError", "PermissionError"}


@pytest.mark.parametrize("run", RUNS)
def test_other_processes_are_out_of_reach(run):
    with subprocess.Popen(["sleep", "600"], env={"SECRET": "s3cret"}) as other:
        try:
            found = attempts(
                run,
                PATIENT,
                {
                    "signal": f"os.kill({other.pid}, signal.SIGKILL)",
                    "ptrace": f"call('ptrace', 16, {other.pid}, None, None)",
                    "environment": f"open('/proc/{other.pid}/environ').read()",
                    "memory": f"open('/proc/{other.pid}/mem', 'rb')",
                    "folder": f"os.listdir('/proc/{other.pid}/cwd')",
                },
            )
            assert "done" not in found.values()
            assert other.poll() is None
            run("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", PATIENT)
            result = run(TRY + "attempt(lambda: os.kill(os.getppid(), 9))\nprint('on')", PATIENT)
            assert result.stdout.split()[-1] == "on"
        finally:
            other.kill()


@pytest.mark.parametrize("run", RUNS)
def test_no_mounts_and_no_powers_are_to_be_had(run):
    found = attempts(
        run,
        PATIENT,
        {
            "remount": "call('mount', None, b'/', None, ctypes.c_ulong(0x1020), None)",
            "mount": "call('mount', b'none', b'.', b'tmpfs', ctypes.c_ulong(0), None)",
            "unmount": "call('umount2', b'/tmp', 2)",
            "attributes": "call('syscall', 442, -100, b'/', 0, (ctypes.c_uint64 * 4)(0, 1), 32)",
            "name space": "call('unshare', 0x10020000)",
            "chroot": "os.chroot('.')",
            "device": "os.mknod('disk', 0o60600, os.makedev(254, 0))",
            "group": "os.setgroups([0])",
            "kernel": "open('/proc/sys/kernel/core_pattern', 'r+')",
        },
    )
    assert "done" not in found.values()
    powers = run("print(open('/proc/self/status').read())", PATIENT).stdout
    assert {"CapPrm:\t" + 16 * "0", "CapEff:\t" + 16 * "0"} <= set(powers.splitlines())
    again = "import subprocess\nsubprocess.run(['cat', '/proc/self/status'])"
    assert "CapEff:\t" + 16 * "0" in run(again, PATIENT).stdout


@needs_own_files
def test_a_program_sees_itself_alone():
    program = (
        "import os\nprint(sorted(os.listdir('/dev')), os.listdir('/run'), os.listdir('/var/tmp'))\n"
        "print([name for name in os.listdir('/proc') if name.isdigit()])\n"
        "print(os.listdir(os.path.expanduser('~')))\n"
    )
    devices, processes, home = run_program(program, PATIENT).stdout.splitlines()
    nodes = ["full", "null", "random", "tty", "urandom", "zero"]
    others = ["fd", "ptmx", "pts", "shm", "stderr", "stdin", "stdout"]
    assert devices == f"{sorted(nodes + others)} [] []"
    assert processes == "['1', '2']"
    assert home == "['program.py']"


@needs_own_files
@pytest.mark.parametrize("place", ["/dev/shm", "/tmp", "."])
def test_all_that_a_program_writes_has_a_limit(place):
    program = (
        "count = 0\ntry:\n"
        f"    for count in range(100): open('{place}/%d' % count, 'wb').write(bytes(1 << 20))\n"
        "except OSError as error:\n    print(count, error.strerror)\n"
    )
    count, reason = run_program(program, SandboxLimits(timeout_s=60.0, files_mib=8)).stdout.split(
        maxsplit=1
    )
    assert int(count) <= 8
    assert reason == "No space left on device\n"


HONEST = {
    "temporary files": (
        "import tempfile\n"
        "with tempfile.NamedTemporaryFile('w+') as f, tempfile.TemporaryDirectory() as d:\n"
        "    f.write('4'); f.seek(0); open(d + '/x', 'w').write(f.read())\n"
        "    print(open(d + '/x').read())"
    ),
    "multiprocessing": (
        "import multiprocessing as m\nc = m.get_context('fork')\n"
        "with c.Pool(2) as pool: found = pool.map(abs, [-3, -1])\n"
        "q = c.Queue(); p = c.Process(target=q.put, args=(sum(found),)); p.start()\n"
        "with c.Lock(): print(q.get())\np.join()"
    ),
    "shared memory": (
        "from multiprocessing import shared_memory\n"
        "s = shared_memory.SharedMemory(create=True, size=9)\n"
        "s.buf[0] = 4; print(s.buf[0]); s.close(); s.unlink()"
    ),
    "subprocess": (
        "import subprocess, sys\n"
        "print(subprocess.run([sys.executable, '-c', 'print(4)'], capture_output=True, text=True,"
        " check=True).stdout.strip())"
    ),
    "shell": "import os\nos.system('echo 4 > /dev/null; echo 3 | tr 3 4')",
    "numpy": "import numpy as np\nprint(np.ones((2, 2)).sum().astype(int))",
    "settings at home": (
        "import os, pathlib\np = pathlib.Path.home() / '.config' / 'matplotlib'\n"
        "p.mkdir(parents=True); (p / 'x').write_text('4'); print((p / 'x').read_text())\n"
    ),
    "streams": (
        "import sys\nsys.stdin = open('/dev/stdin')\n"
        "print(sys.stdin.read() or 4, file=open('/dev/stdout', 'w'))"
    ),
    "pytest": (
        "import subprocess, sys\nopen('test_a.py', 'w').write('def test_a(tmp_path): assert 4')\n"
        "done = subprocess.run([sys.executable, '-m', 'pytest', '-q'], stdout=-1, text=True)\n"
        "print(4 if '1 passed' in done.stdout else done)"
    ),
}


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("run", RUNS)
def test_an_honest_program_runs(name, run, user):
    result = run(HONEST[name], user.limits)
    assert result.stdout == "4\n", result.stderr


@pytest.mark.parametrize("first", FIRSTS)
def test_python_may_lie_in_a_temporary_folder(tmp_path, monkeypatch, first):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=300)
    package = next(venv.glob("lib/python*/site-packages")) / "answers.py"
    package.write_text("ANSWER = 4\n")
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    program = (
        "import answers, subprocess, sys\nprint(answers.ANSWER, flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'import answers; print(answers.ANSWER)'])\n"
        f"open({str(package)!r}, 'w')"
    )
    python = str(venv / "bin" / "python")
    result = result_of(command_of(program, PATIENT, first=first, python=python))
    assert result.stdout == "4\n4\n", result.stderr
    assert result.exit_code == 1
    assert package.read_text() == "ANSWER = 4\n"


@needs_own_files
@pytest.mark.parametrize("temporary", ["home/below", "home", "project", "/dev/shm", "cosmos-run-1"])
def test_temporary_folders_may_be_anywhere(user, monkeypatch, temporary):
    folder = user.home.parent / temporary
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("TMPDIR", str(folder))
    program = (
        "import os\nfor path in ('/tmp', '/dev/shm', '.'): open(path + '/x', 'w').write('4')\n"
        f"print(os.getcwd(), os.path.exists('{user.home}/file'))"
    )
    result = result_of(command_of(program, PATIENT, first=""))
    where, is_there = result.stdout.split()
    assert Path(where).parent.parent == folder
    assert is_there == "False"
    assert not Path(where).parent.exists()


@needs_own_files
def test_the_system_tells_how_it_protects():
    found = sandbox_protection(PATIENT)
    assert found == SandboxProtection(no_network=True, files="own")


@needs_rules
def test_a_reward_says_where_it_protects_less_or_refuses_to_run_there():
    code = WITHOUT_NAMESPACES + "from cosmos_rollout import CodeReward\n"
    code += "CodeReward().build()\nCodeReward(isolation='required').build()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "reward code: the network stays reachable to programs" in done.stderr
    assert "reward code: files are protected by Landlock" in done.stderr
    assert "SandboxError: this system gives no user name spaces" in done.stderr


@needs_rules
def test_rules_take_over_where_mounts_are_refused_half_way(user):
    found = attempts(
        run_without_binds,
        user.limits,
        {
            "own folder": "open('mine', 'w')",
            "shared": f"open('{user.shared}/file')",
            "home": f"open('{user.home}/file')",
            "write": f"open('{user.shared}/file', 'a')",
            "network": "socket.create_connection(('127.0.0.1', 9), 5)",
        },
    )
    assert found.pop("network") != "done"
    assert list(found.values()) == ["done", "done", "PermissionError", "PermissionError"]


def test_a_sandbox_that_cannot_be_made_is_an_error_and_no_result():
    with pytest.raises(SandboxError, match="no sandbox could be made: ValueError: embedded null"):
        run_program("pass", SandboxLimits(timeout_s=60.0, readable=("a\0b",)))


def test_what_a_reward_shall_read_has_to_be_there(user):
    with pytest.raises(RewardError, match="'/nowhere/x', which programs may read, is not there"):
        CodeReward(readable=("/nowhere/x",)).build()


@needs_own_files
def test_a_reward_lets_programs_read_what_it_is_told_to(user):
    sample = RewardInput(
        prompt="p",
        response=f"def f(): return open('{user.project}/file').read()",
        fields={"tests": "assert f() == 'of project'"},
    )
    assert CodeReward(timeout_s=60.0).build()(sample) == 0.0
    reward = CodeReward(timeout_s=60.0, readable=("file",)).build()
    assert reward(sample) == 1.0


def test_what_is_shown_leaves_out_what_is_hidden_and_names_as_little_as_it_can(tmp_path):
    for path in ("a/b/c", "a/d", "e"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    places = {"a/b": False, "a/b/c": True, "e": True}
    shown = shown_paths(str(tmp_path), {f"{tmp_path}/{path}": is_ for path, is_ in places.items()})
    assert sorted(shown) == [f"{tmp_path}/{path}" for path in ("a/b/c", "a/d", "e")]
