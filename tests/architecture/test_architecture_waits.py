"""Nothing waits for ever: calls that block have a deadline, or a reason here why they need none.

What counts as blocking, and as a deadline, is in `waits`: calls such as ``x.get()``, ``recv`` and
``Condition.wait_for``, awaits of tasks, ``gather``, locks of asyncio, full queues, and loops that
sleep between two looks.
"""

import ast
from pathlib import Path

import pytest
from waits import waits

ROOT = Path(__file__).parents[2]
SOURCES = [*sorted((ROOT / "packages").glob("*/src")), ROOT / "apps" / "src"]

_DONE = "it is done: taking its result waits for nobody"
_IDLE = "a worker without work; who gives it some has the deadline"
_GROUP = "a collective: its process group was made with a timeout"
_ENGINE = "as long as the model takes; the replica's lease sees one that hangs"
_STORAGE = "as long as storage takes; launch.save_s ends a policy that takes longer"
_BATCH = "each call in it has a time limit of its own"
_INSIDE = "_within_deadline ends the process that it waits for"
_NO_WAIT = "adds up what it was given"
_PLACES = "as many as are before it, each of whom has a deadline"
_LOADS = "one load after another; each has a deadline"
_SPAWNED = "of a process that ends at once, or was killed"
_LOOKS_ON = "looks on beside what it looks at, at whose end it is cancelled; nobody waits for it"
_THREAD = "a thread of its own; whoever waits for it has the deadline"
_SHOWN = "as long as somebody looks at it"
# Why a call needs no deadline, by module and function.
ALLOWED: dict[str, dict[str, str]] = {
    "cosmos_app/ahead.py": {"next_wanted": "the launcher, which is gone or ends it in a second"},
    "cosmos_app/dashboard/address.py": {"announce_dashboard": _LOOKS_ON},
    "cosmos_app/dashboard/feed.py": {"follow": _SHOWN},
    "cosmos_app/wfm/dashboard/feed.py": {"follow": _SHOWN},
    "cosmos_app/status.py": {"_watch": _SHOWN},
    "cosmos_app/statuses.py": {"each_second": _LOOKS_ON},
    "cosmos_app/late.py": {"end": _LOOKS_ON},
    "cosmos_app/hung.py": {"end": _LOOKS_ON},
    "cosmos_app/suspended.py": {"end": _LOOKS_ON, "watch": _LOOKS_ON},
    "cosmos_app/redis_watch.py": {"look_on": _LOOKS_ON},
    "cosmos_app/impatience.py": {"_tell": "a thread that only speaks, of a process that ends"},
    "cosmos_app/full_disk.py": {
        "write": "for room on a disk: said, and at its end the run has launch.sink_s"
    },
    "cosmos_app/passing_on.py": {"_await_passed_on": "gives up after so many looks"},
    "cosmos_app/roles/controller.py": {"_control": "stands by until the end of the run ends it"},
    "cosmos_app/roles/gpu_turns.py": {"_is_mine": "until ends_at"},
    "cosmos_app/roles/lease.py": {"watch_work": _LOOKS_ON},
    "cosmos_weightsync/command_line/copying.py": {"_serve": "serves until a signal ends it"},
    "cosmos_app/temporary.py": {"_locked": "nobody else knows the file yet"},
    "cosmos_app/roles/weights.py": {"load": _ENGINE},
    "cosmos_app/hung_teachers.py": {"end": "each question has a time limit"},
    "cosmos_app/given/role.py": {"run": "what it did has been waited for"},
    "cosmos_wfm/reward_client.py": {"close": "each request has a deadline"},
    "cosmos_weightsync/integrations/vllm.py": {"connect": _LOADS, "load": _LOADS},
    "cosmos_rollout/tether.py": {"_end_group_with_me": _SPAWNED},
    "cosmos_rollout/teaching.py": {"score": _PLACES},
    "cosmos_rollout/rewards/sandbox_program.py": {
        "run_tested": "its parent ends it when its time is over"
    },
    "cosmos_rollout/rewards/pool.py": {"_score_batch": _BATCH},
    "cosmos_rollout/playing.py": {"play": "each episode has a time limit"},
    "cosmos_rollout/environments/tools.py": {"play": "each call of a tool has a time limit"},
    "cosmos_rollout/engines/sglang_engine.py": {"load_version": _LOADS},
    "cosmos_parallel/sft_store.py": {
        "_encode": "each answer has a deadline; nothing runs when all are there"
    },
    "cosmos_parallel/pictures_ahead.py": {
        "take": "as long as a picture takes to be read; the replica's lease sees one that hangs"
    },
    "cosmos_core/bus/cancelled.py": {"cancellable": "the client of Redis gives up by itself"},
    "cosmos_app/given/trainer.py": {"save_now": _STORAGE},
    "cosmos_app/roles/orders.py": {"orders": _DONE},
    "cosmos_app/roles/policy.py": {"_read_line": "the bus gives up by itself"},
    "cosmos_rollout/engines/vllm_pictures.py": {
        "_input": _ENGINE,
        "_num_bytes": "the task is done",
    },
    "cosmos_rollout/environments/verifiers_env_04.py": {
        "aclose": "at the end of its process, which is killed after launch.stop_grace_s",
        "_endpoint": "the episode has a time limit",
        "_serve": "aclose ends it; nobody waits for it before",
    },
    "cosmos_core/own_thread.py": {"_serve": _IDLE},
    "cosmos_parallel/checkpoint.py": {"close": _STORAGE, "wait": _STORAGE},
    "cosmos_parallel/export.py": {"export_hf": _STORAGE, "write": _STORAGE},
    "cosmos_parallel/membership.py": {"close": "one heartbeat; the store has a timeout"},
    "cosmos_parallel/pipeline.py": {"_look_ahead": _GROUP},
    "cosmos_parallel/nccl_groups.py": {"finish": _DONE, "move": _THREAD},
    "cosmos_parallel/replicas.py": {"receive": _GROUP, "_finish": _GROUP},
    "cosmos_parallel/stage_gathering.py": {"gather_to": _GROUP},
    "cosmos_parallel/tied_ends.py": {"_move": _GROUP},
    "cosmos_parallel/storage.py": {"write_state": _STORAGE, "read_state": _STORAGE},
    "cosmos_rollout/carried_through.py": {
        "carry_through": "for what must not be given up half-way; its parts have deadlines"
    },
    "cosmos_rollout/engines/endpoint.py": {
        "_answer": _PLACES,
        "_sample": _PLACES,
        "_streamed": "until whoever paused it resumes it",
    },
    "cosmos_rollout/engines/in_process.py": {
        "pause": _ENGINE,
        "_swap": _ENGINE,
        "sleep": _ENGINE,
        "wake": _ENGINE,
        "generate": _ENGINE,
        "load_version": "as the one who fetches does; the source gives up by itself",
        "aclose": _ENGINE,
        "_drive": "until whoever paused it resumes it",
    },
    "cosmos_rollout/engines/vllm_engine.py": {
        "load_version": _LOADS,
        "sleep": _LOADS,
        "_sample": "until whoever put it to sleep wakes it",
    },
    "cosmos_rollout/engines/tasks.py": {"samples_as_finished": _ENGINE},
    "cosmos_rollout/producer.py": {
        "_generate": "rewards and teachers have deadlines",
        "_score": "rewards and teachers have deadlines",
        "events": _IDLE,
        "_ended": _DONE,
    },
    "cosmos_rollout/rewards/batching.py": {"call": _BATCH, "_finish": _BATCH, "_hand_out": _DONE},
    "cosmos_rollout/rewards/sandbox_child.py": {
        "end_descendants": _SPAWNED,
        "become_program": "its parent ends it when its time is over",
        "_talk": "select has found something to read",
    },
    "cosmos_rollout/lasting_pool.py": {
        "aclose": "its workers have been killed by then",
        "_ended": _DONE,
        "_answer": _DONE,
        "_end": "its workers have been killed by then",
        "end": _BATCH,
    },
    "cosmos_weightsync/command_line/benching.py": {"serve": _IDLE},
    "cosmos_weightsync/integrations/cancelling.py": {
        "carry_through": "for what must not be given up half-way; its parts have deadlines"
    },
    "cosmos_weightsync/dialing.py": {"meet_all": _DONE},
    "cosmos_weightsync/edges.py": {"_end_oldest": "made of waits that have one"},
    "cosmos_weightsync/files/fetching.py": {
        "_read": "as long as storage takes; the replica's lease sees one that hangs",
        "_sums_of": _NO_WAIT,
    },
    "cosmos_weightsync/files/writing.py": {"_parts": _NO_WAIT},
    "cosmos_weightsync/server.py": {"_accept": _IDLE},
    "cosmos_weightsync/simulation.py": {"simulate": _NO_WAIT},
    "cosmos_weightsync/staging.py": {"run": _DONE},
    "cosmos_weightsync/transports/tcp.py": {
        "recv_into": "the system ends it at the deadline, which _receiving has set",
        "meet": "its socket was made with the deadline",
        "_welcome": "its sockets never block",
        "_shows_key": "its sockets never block",
    },
    "cosmos_weightsync/transports/process_group.py": {
        "move": _THREAD,
        "begin_recv": "only begins; both ends wait",
        "_finish": _DONE,
    },
    "cosmos_app/kept.py": {"_run": "as long as a replica lives"},
    "cosmos_app/meeting_place.py": {"run_meeting": "serves until a signal ends it"},
    "cosmos_app/preloaded.py": {
        "_connect": "one connection to a process of this machine",
        "_listen": "as long as the process lives",
        "wait": "as long as a replica lives, or who forked it",
    },
    "cosmos_app/preloading.py": {
        "_reap": "it has ended: its pidfd says so",
        "_unfit": _SPAWNED,
        "_say": "a few bytes to a launcher that reads them, or has gone",
        "_say_so": "a few bytes to a launcher that reads them, or has gone",
        "serve": "there is something to be received",
        "_meet": "serves until who started it ends it",
    },
    "cosmos_app/roles/colocated.py": {"alternate": _IDLE},
    "cosmos_app/roles/teacher.py": {"_serve": "serves until a signal ends it, or its engine dies"},
    "cosmos_app/roles/rollout.py": {"run": "the loops of the role", "_load": _IDLE},
    "cosmos_app/supervisor.py": {"wait": _DONE, "_keep": "as long as a replica lives"},
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
    "cosmos_app/wfm/reward_service/queue.py": {
        "work": _IDLE,
        "failed": _DONE,
        "answer": _DONE,
        "_serve": _IDLE,
    },
    "cosmos_app/wfm/reward_service/worker.py": {
        "score_requests": _IDLE,
        "_end_with_service": "a thread that ends the process when the service is gone",
    },
}


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
        ("def f(c): c.wait_for(lambda: done)", True),
        ("def f(c): c.wait_for(lambda: done, timeout=3)", False),
        ("async def f(task): await task", True),
        ("async def f(task):\n task.cancel()\n await task", False),
        ("async def f(self): await self.futures[3]", True),
        ("async def f(task):\n async with asyncio.timeout(3):\n  await task", False),
        ("async def f(t):\n w = asyncio.timeout(3)\n async with w:\n  await t", False),
        ("async def f(told): await told.wait()", True),
        ("async def f(told): await asyncio.wait_for(told.wait(), 3)", False),
        ("async def f(tasks): await asyncio.gather(*tasks)", True),
        ("async def f(a):\n for t in a: t.cancel()\n await asyncio.gather(*a)", False),
        ("async def f(task): await asyncio.shield(task)", True),
        ("async def f(lock):\n async with lock: pass", True),
        ("async def f(lock):\n async with asyncio.timeout(3), lock: pass", False),
        ("async def f(bus):\n async with bus.open(): pass", False),
        ("async def f():\n async with asyncio.TaskGroup() as group: pass", True),
        ("def f():\n q = Queue(3)\n q.put(1)", True),
        ("def f():\n q = Queue(3)\n q.put(1, timeout=3)", False),
        ("def f():\n q = Queue()\n q.put(1)", False),
        ("def f():\n with ThreadPoolExecutor(3) as pool: pass", True),
        ("def f(pool): pool.shutdown()", True),
        ("def f(pool): pool.shutdown(wait=False)", False),
        ("def f(file): fcntl.flock(file, fcntl.LOCK_EX)", True),
        ("def f(file): fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)", False),
        ("def f(pid): os.waitpid(pid, 0)", True),
        ("def f(pid): os.waitpid(pid, os.WNOHANG)", False),
        ("def f(ready): select.select(ready, [], [])", True),
        ("def f(ready): select.select(ready, [], [], 3)", False),
        ("def f(s): s.sendall(b'x')", True),
        ("async def f(stream): await stream.readline()", True),
        ("def f(p):\n while not p.exists(): time.sleep(1)", True),
        ("async def f(bus):\n while True:\n  await asyncio.sleep(1)", True),
        ("def f(p, end):\n while not p.exists():\n  end.sleep()\n", True),
        ("def f(p, deadline):\n while time.monotonic() < deadline: time.sleep(1)", False),
        ("def f(p, d):\n while not p():\n  time.sleep(1)\n  if d(): raise DeadlineError", False),
        (
            "async def f(c):\n async with asyncio.timeout(3):\n  while c(): await asyncio.sleep(1)",
            False,
        ),
        ("def f(work):\n while work.pop(): work.do()", False),
        ("def f(p):\n while p():\n  p = lambda: time.sleep(1)", False),
    ],
)
def test_endless_waits_are_told_from_others(text: str, is_found: bool) -> None:
    assert bool(waits(ast.parse(text))) == is_found
