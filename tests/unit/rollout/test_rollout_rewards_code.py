"""The reward for programs, and the sandbox that runs them, with programs that misbehave."""

from pathlib import Path

import pytest
from sandboxes import needs_namespaces

from cosmos_rollout import (
    CodeReward,
    RewardError,
    RewardInput,
    RewardPoolConfig,
    SandboxLimits,
    Scored,
    run_program,
)

F = "```"
DOUBLE = "Here:\n```python\ndef f(x):\n    return 2 * x\n```\nDone."
READER = "```py\nprint(int(input()) + 1)\n```"
PATIENT = SandboxLimits(timeout_s=60.0)


def sample(response: str, tests) -> RewardInput:
    return RewardInput(prompt="p", response=response, fields={"tests": tests})


@pytest.mark.parametrize(
    ("score", "response", "tests", "value"),
    [
        ("all", DOUBLE, "assert f(2) == 4", 1.0),
        ("all", DOUBLE, ["assert f(2) == 4", "assert f(3) == 5"], 0.0),
        ("share", DOUBLE, ["assert f(2) == 4", "assert f(3) == 5"], 0.5),
        ("all", READER, [{"input": "4\n", "output": "5"}, {"input": "-1", "output": "0 \n"}], 1.0),
        ("all", READER, [{"input": "x", "output": "5"}], 0.0),  # it raises
        ("all", "```python\nf = 1\n```\n" + DOUBLE, "assert f(1) == 2", 1.0),  # the last block
        ("all", f"{F}bash\nls\n{F}\nThen:\n" + DOUBLE, "assert f(1) == 2", 1.0),  # one of Python
        ("all", f"{DOUBLE}\n{F}text\n4\n{F}\nor\n{F}json\n4\n{F}", "assert f(1) == 2", 1.0),
        ("all", f"{DOUBLE}\nOutput:\n{F}\n4\n{F}", "assert f(1) == 2", 1.0),  # what it prints
        ("all", f"{F}\nf = 1\n{F}\n{F}\ndef f(x): return x\n{F}", "assert f(1) == 1", 1.0),
        ("all", f"1. So:\n   {F}Python3 a.py\r\n   f = abs\n   {F}", "assert f(-1) == 1", 1.0),
        ("all", "def f(x): return x", "assert f(1) == 1", 1.0),  # no block: all of it
        ("all", "```python\nraise SystemExit(0)\n```", "assert False", 0.0),  # leaves early
        ("all", "```python\nimport os; os._exit(0)\n```", "assert False", 0.0),
    ],
)
def test_programs_are_worth_the_tests_they_pass(score, response, tests, value):
    reward = CodeReward(score=score, timeout_s=60.0).build()
    assert reward(sample(response, tests)) == value


@pytest.mark.parametrize(
    "tests",
    [None, [], 3, [{"input": "1"}], "", ["assert True", " \n"], [{"input": ["1"], "output": "1"}]],
)
def test_a_row_without_tests_is_an_error_and_not_a_zero(tests):
    with pytest.raises(RewardError, match="field 'tests' of the data row has to be a test"):
        CodeReward().build()(sample(DOUBLE, tests))


CASE = (
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(2), 4)\n"
)
TOLD = "assert unittest.main(exit=False).result.wasSuccessful()"


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("def check(f):\n    assert f(2) == 4", r"it defines check and calls nothing: write check"),
        ("def test_f(fixture):\n    assert f(2) == 4", "defines test_f and calls nothing"),
        ("@mark\ndef test_f():\n    assert f(2) == 4", "defines test_f and calls nothing"),
        (CASE, r"asserts nothing: write assert unittest\.main\(exit=False\)"),
        (f"{CASE}if __name__ == '__main__':\n    unittest.main()", "ends it, or tells nothing"),
        (f"{CASE}unittest.main(exit=False)", "ends it, or tells nothing"),
        ("# assert f(2) == 4", "it asserts nothing$"),
    ],
)
def test_a_test_that_holds_for_any_program_or_none_is_an_error(test, words):
    for response in (DOUBLE, "pass"):
        with pytest.raises(RewardError, match=words):
            CodeReward().build()(sample(response, test))


@pytest.mark.parametrize(
    "test",
    [
        f"{CASE}{TOLD}",
        "def check(f):\n    assert f(2) == 4\ncheck(f)",
        "X = [2]\nasync def more(): ...\ndef test_f():\n    assert f(2) == 4",
        "from solution import f\ndef test_f():\n    assert f(2) == 4",
        "import math\nfrom solution import f as g\n\ndef test_one():\n    assert g(0) == 0\n\n"
        "def test_two():\n    x = math.prod([1, 2])\n    assert g(x) == 4\n",
        "for i in [2]: assert f(i) == 4",
    ],
)
def test_what_is_written_instead_tells_programs_apart(test):
    score = CodeReward().build()
    assert [score(sample(response, test)) for response in (DOUBLE, "f = abs")] == [1.0, 0.0]


async def test_code_is_one_reward_among_others_in_a_worker():
    pool = RewardPoolConfig(rewards=(CodeReward(timeout_s=30.0),), timeout_s=60.0).build()
    try:
        await pool.start()
        outcome = await pool.score(sample(DOUBLE, "assert f(2) == 4"))
        assert outcome == Scored(rewards={"code": 1.0}, total=1.0)
    finally:
        await pool.aclose()


def test_output_and_exit_status_come_back():
    result = run_program("import sys; print(input()); sys.exit(3)", PATIENT, stdin="hello\n")
    assert (result.exit_code, result.stdout) == (3, "hello\n")


def test_a_program_that_hangs_is_ended():
    result = run_program("while True: pass", SandboxLimits(timeout_s=0.5))
    assert result.exit_code is None


def test_memory_is_limited():
    limits = SandboxLimits(timeout_s=60.0, memory_mib=128)
    result = run_program("x = bytearray(1 << 30)", limits)
    assert result.exit_code == 1
    assert "MemoryError" in result.stderr


def test_a_file_cannot_grow_beyond_its_limit():
    limits = SandboxLimits(timeout_s=60.0, file_mib=1)
    result = run_program("open('big', 'wb').write(bytes(3 << 20))", limits)
    assert result.exit_code != 0


def test_endless_output_is_cut_and_fails():
    limits = SandboxLimits(timeout_s=60.0, file_mib=2)
    result = run_program("while True: print('x' * 65536)", limits)
    assert result.exit_code != 0
    assert len(result.stdout) == 1 << 20


def test_an_expected_output_of_several_mib_is_compared_to_its_end():
    rows = [{"input": "", "output": "7\n" * (3 << 19) + end} for end in ("8", "9")]
    response = "```python\nprint('7\\n' * (3 << 19) + '8')\n```"
    reward = CodeReward(score="share", timeout_s=60.0).build()
    assert [reward(sample(response, [row])) for row in rows] == [1.0, 0.0]


def test_a_program_sees_no_environment_and_leaves_no_files(monkeypatch):
    monkeypatch.setenv("COSMOS_SECRET", "s3cret")
    program = "import os; open('left', 'w').close(); print(os.getcwd(), dict(os.environ))"
    result = run_program(program, PATIENT)
    assert "s3cret" not in result.stdout
    assert not Path(result.stdout.split()[0]).exists()


def test_a_program_is_ended_by_a_signal_of_its_own():
    program = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert run_program(program, PATIENT).exit_code == 128 + 15


@needs_namespaces
def test_there_is_no_network_not_even_loopback():
    program = (
        "import socket\n"
        "with socket.socket() as s:\n"
        "    s.bind(('127.0.0.1', 0)); s.listen(); s.settimeout(5)\n"
        "    socket.create_connection(s.getsockname(), 5)\n"
    )
    result = run_program(program, PATIENT)
    assert result.exit_code == 1
    assert "OSError" in result.stderr


@pytest.mark.parametrize(
    "program",
    [
        "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')",
        "import os\nos.mkdir('d')\nopen('d/f', 'w').close()\nos.chmod('d', 0)",
    ],
    ids=["deep", "locked"],
)
def test_what_a_program_leaves_goes_however_it_is_nested_or_locked(program):
    result = run_program(f"import os\nprint(os.getcwd())\n{program}", PATIENT)
    assert result.exit_code == 0
    assert not Path(result.stdout.strip()).parent.exists()
