"""Nothing waits for ever: calls that block have a deadline, or a reason here why they need none.

What counts as blocking is told by the call: ``x.get()``, ``join``, ``wait``, ``acquire``,
``result``, ``communicate``, ``accept`` without an argument, ``recv*``, ``asyncio.wait``,
``subprocess.run``, ``urlopen``, ``create_connection``. It has a deadline if it is given one, or if
its function sets one on the socket or polls first; a process is collected where it was killed.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [*sorted((ROOT / "packages").glob("*/src")), ROOT / "apps" / "src"]
_WITHOUT_ARGUMENTS = {"get", "join", "wait", "acquire", "result", "communicate", "accept"}
_RECEIVING = {"recv", "recv_into", "recv_bytes"}
_WITH_TIMEOUT = {"urlopen", "create_connection", "check_output", "check_call"}
_DEADLINES = {"timeout", "timeout_s", "deadline"}


_DONE = "it is done: taking its result waits for nobody"
_IDLE = "a worker without work; who gives it some has the deadline"
_GROUP = "a collective: its process group was made with a timeout"
_ENGINE = "as long as the model takes; the replica's lease sees one that hangs"
_STORAGE = "as long as storage takes; launch.save_s ends a policy that takes longer"
_BATCH = "each call in it has a time limit of its own"
_INSIDE = "_within_deadline ends the process that it waits for"
_NO_WAIT = "adds up what it was given"
# Why a call needs no deadline, by module and function.
ALLOWED: dict[str, dict[str, str]] = {
    "cosmos_app/given/trainer.py": {"save_now": _STORAGE},
    "cosmos_app/roles/policy.py": {"_read_line": "the bus gives up by itself"},
    "cosmos_rollout/engines/vllm_pictures.py": {"_num_bytes": "the task is done"},
    "cosmos_rollout/environments/verifiers_env_04.py": {
        "_serve": "aclose ends it; nobody waits for it before"
    },
    "cosmos_core/own_thread.py": {"_serve": _IDLE},
    "cosmos_parallel/checkpoint.py": {"wait": _STORAGE},
    "cosmos_parallel/export.py": {"write": _STORAGE},
    "cosmos_parallel/membership.py": {"close": "one heartbeat; the store has a timeout"},
    "cosmos_parallel/pipeline.py": {"_look_ahead": _GROUP},
    "cosmos_parallel/nccl_groups.py": {"finish": _DONE},
    "cosmos_parallel/replicas.py": {"receive": _GROUP, "_finish": _GROUP},
    "cosmos_parallel/stage_gathering.py": {"gather_to": _GROUP},
    "cosmos_parallel/tied_ends.py": {"_move": _GROUP},
    "cosmos_parallel/storage.py": {"write_state": _STORAGE, "read_state": _STORAGE},
    "cosmos_rollout/carried_through.py": {
        "carry_through": "for what must not be given up half-way; its parts have deadlines"
    },
    "cosmos_rollout/engines/endpoint.py": {"_streamed": "until whoever paused it resumes it"},
    "cosmos_rollout/engines/in_process.py": {
        "generate": _ENGINE,
        "load_version": "as the one who fetches does; the source gives up by itself",
        "aclose": _ENGINE,
        "_drive": "until whoever paused it resumes it",
    },
    "cosmos_rollout/engines/vllm_engine.py": {"_sample": "until whoever put it to sleep wakes it"},
    "cosmos_rollout/engines/tasks.py": {"samples_as_finished": _ENGINE},
    "cosmos_rollout/producer.py": {"events": _IDLE, "_ended": _DONE},
    "cosmos_rollout/rewards/batching.py": {"_finish": _BATCH, "_hand_out": _DONE},
    "cosmos_rollout/rewards/sandbox_child.py": {"_talk": "select has found something to read"},
    "cosmos_rollout/lasting_pool.py": {
        "_answer": _DONE,
        "_end": "its workers have been killed by then",
        "end": _BATCH,
    },
    "cosmos_weightsync/command_line/benching.py": {"serve": _IDLE},
    "cosmos_weightsync/integrations/cancelling.py": {
        "carry_through": "for what must not be given up half-way; its parts have deadlines"
    },
    "cosmos_weightsync/dialing.py": {"meet_all": _DONE},
    "cosmos_weightsync/edges.py": {"_end": "made of waits that have one"},
    "cosmos_weightsync/files/fetching.py": {"_sums_of": _NO_WAIT},
    "cosmos_weightsync/files/writing.py": {"_parts": _NO_WAIT},
    "cosmos_weightsync/server.py": {"_accept": _IDLE},
    "cosmos_weightsync/simulation.py": {"simulate": _NO_WAIT},
    "cosmos_weightsync/staging.py": {"run": _DONE},
    "cosmos_weightsync/transports/tcp.py": {
        "_welcome": "its sockets never block",
        "_shows_key": "its sockets never block",
    },
    "cosmos_weightsync/transports/process_group.py": {
        "begin_recv": "only begins; both ends wait",
        "_finish": _DONE,
    },
    "cosmos_app/kept.py": {"keep": "wait_for is around it", "_run": "as long as a replica lives"},
    "cosmos_app/meeting_place.py": {"run_meeting": "serves until a signal ends it"},
    "cosmos_app/preloaded.py": {"wait": "as long as a replica lives, or who forked it"},
    "cosmos_app/preloading.py": {
        "serve": "there is something to be received",
        "_meet": "serves until who started it ends it",
    },
    "cosmos_app/roles/colocated.py": {
        "alternate": _IDLE,
        "_work": "asyncio.timeout is around it",
    },
    "cosmos_app/roles/teacher.py": {"_serve": "serves until a signal ends it, or its engine dies"},
    "cosmos_app/roles/rollout.py": {"run": "the loops of the role", "_load": _IDLE},
    "cosmos_app/supervisor.py": {"wait": _DONE},
    "cosmos_wfm/scoring.py": {"_call_all": _IDLE},
    "cosmos_app/wfm/disaggregated/replica.py": {
        "go_on": "until the run orders something or hangs up",
        "_draw": "there is something to read",
    },
    "cosmos_app/wfm/disaggregated/running.py": {"connect": _DONE},
    "cosmos_app/wfm/disaggregated/trainer.py": {
        "_accept": _IDLE,
        "_take_all": "a thread of its own; whoever waits for samples has the deadline",
    },
    "cosmos_app/wfm/reward_service/processes.py": {
        "_launch": _INSIDE,
        "_exchange": _INSIDE,
        "_within_deadline": "after the process was killed",
    },
    "cosmos_app/wfm/reward_service/queue.py": {"failed": _DONE, "answer": _DONE, "_serve": _IDLE},
    "cosmos_app/wfm/reward_service/worker.py": {
        "score_requests": _IDLE,
        "_end_with_service": "a thread that ends the process when the service is gone",
    },
}


def _terminal(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _owner(call: ast.Call) -> str:
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _has_deadline(call: ast.Call, function: ast.AST) -> bool:
    words = {k.arg for k in call.keywords} | {ast.unparse(each) for each in call.args}
    if words & _DEADLINES:
        return True
    name, around = _terminal(call.func), ast.unparse(function)
    if "poll(" in around and name in _RECEIVING:
        return True
    if name in {*_RECEIVING, "accept"} and ("settimeout(" in around or "_limit(" in around):
        return True
    return name == "wait" and "process" in _owner(call) and "kill" in around.lower()


def _blocks(call: ast.Call) -> bool:
    name, owner = _terminal(call.func), _owner(call)
    if owner in {"self", "super()"}:
        return False  # that method is looked at itself
    if name in _WITHOUT_ARGUMENTS and not call.args:
        return True
    if name == "wait" and owner in {"asyncio", "futures", ""}:
        return True
    if name in _RECEIVING and owner:
        return True
    return name in _WITH_TIMEOUT or (name == "run" and owner == "subprocess")


def _calls(node: ast.AST, function: ast.AST) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Yield every call with the function around it."""
    for child in ast.iter_child_nodes(node):
        inner = child if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(child, ast.Call):
            yield inner, child
        yield from _calls(child, inner)


def waits(tree: ast.AST) -> list[tuple[str, str]]:
    """Return the function and the text of every call that may block without a deadline."""
    return [
        (getattr(function, "name", ""), ast.unparse(call))
        for function, call in _calls(tree, tree)
        if _blocks(call) and not _has_deadline(call, function)
    ]


@pytest.fixture(scope="module")
def all_waits() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for source in SOURCES:
        for path in sorted(source.rglob("*.py")):
            if hits := waits(ast.parse(path.read_text())):
                found[path.relative_to(source).as_posix()] = hits
    return found


def test_every_wait_has_a_deadline_or_a_reason(all_waits) -> None:
    endless = [
        f"{module}: {function}: {call}"
        for module, hits in all_waits.items()
        for function, call in hits
        if function not in ALLOWED.get(module, {})
    ]
    assert not endless, "\n".join(["give these a deadline:", *endless])


def test_no_reason_is_left_over(all_waits) -> None:
    found = {module: {function for function, _ in hits} for module, hits in all_waits.items()}
    stale = [
        f"{module}: {function}"
        for module, reasons in ALLOWED.items()
        for function in reasons
        if function not in found.get(module, set())
    ]
    assert not stale


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("def f(q): q.get()", True),
        ("def f(q): q.get(timeout=3)", False),
        ("def f(d): d.get('key')", False),
        ("def f(process): process.wait()", True),
        ("def f(process):\n process.kill()\n process.wait()", False),
        ("def f(s): s.recv(3)", True),
        ("def f(s):\n s.settimeout(1.0)\n s.recv(3)", False),
        ("def f(c, view, deadline): c.recv_into(view, deadline)", False),
        ("async def f(tasks): await asyncio.wait(tasks)", True),
        ("def f(): subprocess.run(['true'])", True),
        ("def f(): ', '.join(names)", False),
    ],
)
def test_endless_waits_are_told_from_others(text: str, is_found: bool) -> None:
    assert bool(waits(ast.parse(text))) == is_found
