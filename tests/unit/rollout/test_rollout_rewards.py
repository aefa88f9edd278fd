"""Rewards: the values of the built-in ones, and what a bad one costs."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import pytest_asyncio
from processes import parent_of

from cosmos_rollout import (
    BoxedMathReward,
    ExactReward,
    Failure,
    FormatReward,
    LengthReward,
    PythonReward,
    RewardCodeError,
    RewardError,
    RewardInput,
    RewardPool,
    RewardPoolClosedError,
    RewardPoolConfig,
    Scored,
)

NAN, INF = float("nan"), float("inf")

USER = """
import asyncio, os, subprocess, sys, time
from pathlib import Path
from json import dumps  # not its own

def polite(sample):
    return len(sample.response) + sample.fields["bonus"]

def rude(sample):
    match sample.response:
        case "raise": raise KeyError("answer")
        case "hang": time.sleep(1000)
        case "spin":
            while True: pass
        case "die": os._exit(3)
        case "exit": sys.exit("bye")
        case "interrupt": raise KeyboardInterrupt
        case "cancel": raise asyncio.CancelledError
        case "speechless":
            class Speechless(Exception):
                def __str__(self): raise ValueError
            raise Speechless
        case "run":
            with subprocess.Popen(["sleep", "1000"]) as program:
                Path(sample.fields["pid_file"]).write_text(str(program.pid))
        case "take": return float(sample.fields.pop("worth", -1))
        case "nan": return float("nan")
        case "none": return None
        case "pid": return os.getpid()
        case "memory": return len(bytearray(8 << 30))
    return 1.0

def no_argument():
    return 0.0

value = 3
"""


def sample(response: str, answer: str | None = None, **fields) -> RewardInput:
    return RewardInput(prompt="p", response=response, answer=answer, fields=fields)


@pytest.mark.parametrize(
    ("config", "response", "answer", "value"),
    [
        (ExactReward(), " 42\n", "42", 1.0),
        (ExactReward(), "42.", "42", 0.0),
        (ExactReward(), "a  b", "a b", 1.0),  # runs of blanks are one
        (ExactReward(ignore_case=True), "Paris", "paris", 1.0),
        (ExactReward(after="="), "1+1=2 so 2=2", "2", 1.0),  # after the last one
        (ExactReward(after="####"), "2", "2", 0.0),  # the marker is missing
        (BoxedMathReward(), r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (BoxedMathReward(), r"\boxed{3} no, \boxed{x^2+2x+1}", "(x+1)^2", 1.0),  # the last box
        (BoxedMathReward(), r"\boxed{3}", r"\boxed{4}", 0.0),
        (BoxedMathReward(), "0.5", "0.5", 0.0),  # no box
        (BoxedMathReward(), r"\boxed{0.5", "0.5", 0.0),  # never closed
        (FormatReward(pattern="<a>.*</a>"), "<a>x\ny</a>", None, 1.0),
        (FormatReward(pattern="<a>.*</a>"), "x<a></a>", None, 0.0),  # the whole response
    ],
)
def test_built_in_values(config, response, answer, value):
    assert config.build()(sample(response, answer)) == value


@pytest.mark.parametrize(("tokens", "value"), [(0, 0.0), (10, 0.0), (15, -0.5), (20, -1), (99, -1)])
def test_length_falls_from_target_to_limit(tokens, value):
    reward = LengthReward(target=10, limit=20).build()
    assert reward(RewardInput(prompt="", response="", num_response_tokens=tokens)) == value


def test_a_reward_that_needs_an_answer_says_so():
    with pytest.raises(RewardError, match="exact needs a field 'answer'"):
        ExactReward().build()(sample("2"))


@pytest.fixture(scope="module")
def user_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(USER)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(user_file):
    config = RewardPoolConfig(
        rewards=(
            ExactReward(weight=2.0),
            PythonReward(function=f"{user_file}:rude", weight=0.5),
        ),
        timeout_s=1.0,
        memory_mib=1024,
    )
    pool = config.build()
    await pool.start()
    yield pool
    await pool.aclose()


@pytest.mark.asyncio(loop_scope="module")
async def test_rewards_are_named_and_their_weighted_sum_is_the_total(pool):
    outcome = await pool.score(sample("7", "7"))
    assert outcome == Scored(rewards={"exact": 1.0, "rude": 1.0}, total=2.5)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        ("raise", "KeyError", "'answer'"),
        ("hang", "TimeoutError", "no result within 1.0 s"),
        ("spin", "TimeoutError", "no result within 1.0 s"),
        ("die", "ProcessDied", "the worker process died (exit code 3)"),
        ("exit", "SystemExit", "bye"),
        ("interrupt", "KeyboardInterrupt", ""),
        ("cancel", "CancelledError", ""),
        ("speechless", "Speechless", "(its words cannot be had)"),
        ("nan", "ValueError", "the reward is nan"),
        ("none", "TypeError", None),
        ("memory", "MemoryError", ""),
    ],
)
async def test_a_bad_reward_costs_its_sample_only(pool, response, error, message):
    before = pool.failures.get(f"rude: {error}", 0)
    bad, good = await asyncio.gather(
        pool.score(sample(response, "x")), pool.score(sample("a", "a"))
    )
    assert isinstance(bad, Failure)
    assert (bad.reward, bad.error) == ("rude", error)
    assert message is None or bad.message == message
    assert bad.is_own == (error not in {"TimeoutError", "ProcessDied"})
    assert good == Scored(rewards={"exact": 1.0, "rude": 1.0}, total=2.5)
    assert pool.failures[f"rude: {error}"] == before + 1


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("victim", ["idle worker", "fork server"])
async def test_rewards_go_on_when_processes_that_do_nothing_are_killed(pool, victim):
    failures = dict(pool.failures)
    outcome = await pool.score(sample("pid", "x"))
    worker = int(outcome.rewards["rude"])
    os.kill(worker if victim == "idle worker" else parent_of(worker), signal.SIGKILL)
    for _ in range(20):  # through the moments in which the pool finds out
        outcome = await pool.score(sample("pid", "x"))
        assert isinstance(outcome, Scored), outcome
        await asyncio.sleep(0.05)
    assert int(outcome.rewards["rude"]) != worker
    assert pool.failures == failures


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("response", ["hang", "die"])
async def test_a_worker_lost_over_a_batch_costs_the_culprit_only(pool, response):
    for _ in range(40):  # quick ones, so that many are handed over at once
        await pool.score(sample("a", "a"))
    texts = ["a"] * 5 + [response] + ["b"] * 5
    outcomes = await asyncio.gather(*(pool.score(sample(text, "a")) for text in texts))
    assert [isinstance(outcome, Failure) for outcome in outcomes] == [t == response for t in texts]
    assert [o.rewards["exact"] for o in outcomes if isinstance(o, Scored)] == [1.0] * 5 + [0.0] * 5


@pytest.mark.asyncio(loop_scope="module")
async def test_a_program_that_a_reward_waits_for_ends_with_it(pool, tmp_path):
    outcome = await pool.score(sample("run", "x", pid_file=f"{tmp_path}/pid"))
    assert isinstance(outcome, Failure)
    assert outcome.error == "TimeoutError"
    program = Path("/proc") / (tmp_path / "pid").read_text()
    for _ in range(100):
        if not program.exists() or " Z " in (program / "stat").read_text():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the program runs on")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_reward_nobody_waits_for_any_more_is_given_up(pool):
    task = asyncio.create_task(pool.score(sample("hang", "x")))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert isinstance(await pool.score(sample("a", "a")), Scored)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("{file}:nothing", "has no function nothing; it has polite, rude, no_argument$"),
        ("{file}:value", "has no function value"),
        ("{file}:no_argument", "has to be callable as function"),
        ("no_such_module:f", "cannot import the module no_such_module"),
        ("{file}.py:f", r"there is no file .*mine\.py\.py"),
    ],
)
async def test_a_reward_that_cannot_be_used_is_known_at_the_start(user_file, function, words):
    config = PythonReward(function=function.format(file=user_file), name="mine")
    pool = RewardPool(RewardPoolConfig(rewards=(config,)))
    try:
        with pytest.raises(RewardCodeError, match=f"reward mine cannot be used: .*{words}"):
            await pool.start()
    finally:
        await pool.aclose()


async def test_a_module_that_exits_when_it_is_imported_is_known_at_the_start(tmp_path):
    (tmp_path / "exits.py").write_text("import sys\nsys.exit('no arguments')")
    config = PythonReward(function=f"{tmp_path}/exits.py:f", name="mine")
    pool = RewardPool(RewardPoolConfig(rewards=(config,)))
    try:
        with pytest.raises(RewardCodeError, match="mine cannot be used: SystemExit: no arguments"):
            await pool.start()
    finally:
        await pool.aclose()


async def test_what_a_reward_makes_of_a_row_is_seen_by_no_other(user_file):
    both = tuple(PythonReward(function=f"{user_file}:rude", name=name) for name in ("one", "two"))
    pool = RewardPool(RewardPoolConfig(rewards=both))
    await pool.start()
    shared = sample("take", worth=3)  # as siblings share their row
    try:
        outcomes = await asyncio.gather(*(pool.score(shared) for _ in range(40)))
    finally:
        await pool.aclose()
    assert all(outcome.rewards == {"one": 3.0, "two": 3.0} for outcome in outcomes)


async def test_a_pool_that_was_closed_says_so_whatever_it_is_asked():
    pool = RewardPool(RewardPoolConfig())
    await pool.aclose()

    for asked in (
        pool.start(),
        pool.score(RewardInput(prompt="1 + 1?", response="2", answer="2")),
        pool.score_group((), ()),
    ):
        with pytest.raises(RewardPoolClosedError, match="was closed"):
            await asked
    assert pool.failures == {}


OWNER = """
import asyncio, sys
from cosmos_rollout import PythonReward, RewardInput, RewardPool, RewardPoolConfig

async def main():
    rewards = (PythonReward(function=sys.argv[1] + ":rude"),)
    pool = RewardPool(RewardPoolConfig(rewards=rewards, timeout_s=1000.0))
    await pool.start()
    sys.stdout.write("started\\n")
    sys.stdout.flush()
    await pool.score(RewardInput(prompt="", response="spin"))

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_kill_9_of_the_owner_ends_a_busy_worker(user_file, tmp_path):
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    owner = subprocess.Popen(
        [sys.executable, str(script), str(user_file)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        text=True,
        start_new_session=True,
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "started\n"
        time.sleep(0.3)
        members = session_members(owner.pid)
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
        deadline = time.monotonic() + 10
        while session_members(owner.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(members) >= 3  # the owner, the fork server, a worker
        assert session_members(owner.pid) == []
    finally:
        owner.kill()
        owner.wait(10)
        owner.stdout.close()


def session_members(session: int) -> list[int]:
    """Return the processes of a session that are not dead."""
    members: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, sid = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue  # it ended while we looked
            if int(sid) == session and state != "Z":
                members.append(int(entry.name))
    return members


def test_a_script_that_starts_workers_wherever_it_is_imported_is_told_so_at_once(tmp_path):
    """Before a single worker has imported it, which would have to import all that it does."""
    script, imports = tmp_path / "train.py", tmp_path / "imports"
    script.write_text(
        "import asyncio\n"
        f"open({str(imports)!r}, 'a').write('once ')\n"
        "from cosmos_rollout import ExactReward, RewardPoolConfig\n"
        "asyncio.run(RewardPoolConfig(rewards=(ExactReward(),)).build().start())\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 1
    assert (
        "RewardError: reward exact cannot be used: no worker process could be had" in ended.stderr
    )
    assert 'under `if __name__ == "__main__":`' in ended.stderr
    assert str(script) in ended.stderr
    assert imports.read_text() == "once "
