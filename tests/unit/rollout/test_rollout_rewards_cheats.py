"""Programs that cheat their tests, and honest ones that the same fences let pass."""

import pytest

from cosmos_rollout import CodeReward, RewardInput, SandboxLimits, run_program
from cosmos_rollout.rewards.questions import ask
from cosmos_rollout.rewards.sandbox import passes_test

PATIENT = SandboxLimits(timeout_s=60.0)
FOUR = "assert f(2) == 4"
LOOP = "for x, y in [(2, 4), (3, 6)]:\n    assert f(x) == y"  # nothing to ask: judged inside
CHECK = "def check(double):\n    assert double(2) == 4\n    assert double(3) == 6\ncheck(f)"

ALWAYS_EQUAL = """
class Always{base}:
    def __eq__(self, other):
        return True
    def __bool__(self):
        return True
def f(x):
    return Always()
"""
WRITES_MARKS = """
import os, re, sys, glob
text = ''.join(open(path, errors='replace').read() for path in glob.glob('../*') + glob.glob('*')
    if os.path.isfile(path))
for path in ('/proc/self/cmdline', '/proc/self/environ', '/proc/%d/cmdline' % os.getppid()):
    try:
        text += open(path, errors='replace').read()
    except OSError:
        pass
import gc
text += str([x for x in gc.get_objects() if isinstance(x, dict) and 'mark' in x])
marks = re.findall('[0-9a-f]{32}', text)
os.set_blocking(0, False)
for fd in range(64):
    for mark in marks or ['none']:
        try:
            os.write(fd, b'?\\n0 4\\n0 6\\n1 6\\nend ' + mark.encode() + b'\\n')
        except OSError:
            pass
os._exit(0)
"""
READS_PARENTS = """
import os, re
found = set()
for pid in [p for p in os.listdir('/proc') if p.isdigit()]:
    try:
        if 'sandbox_child' not in open(f'/proc/{pid}/cmdline').read() or int(pid) == os.getpid():
            continue
        for fd in os.listdir(f'/proc/{pid}/fd'):
            text = os.pread(os.open(f'/proc/{pid}/fd/{fd}', os.O_RDONLY | os.O_NONBLOCK), 9999, 0)
            found |= set(re.findall(b'[0-9a-f]{32}', text))
    except OSError:
        pass
print(found, flush=True)
os._exit(0)
"""

CHEATS = {
    "leaves": "import os\nos._exit(0)",
    "exits": "import sys\nsys.exit(0)",
    "exits in f": "import sys\ndef f(x):\n    sys.exit(0)",
    "leaves in f": "import os\ndef f(x):\n    os._exit(0)",
    "exits at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x):\n    return 0",
    "excepthook": "import os, sys\nsys.excepthook = lambda *_: os._exit(0)\ndef f(x): return 0",
    "always equal": ALWAYS_EQUAL.format(base=""),
    "always equal number": ALWAYS_EQUAL.format(base="(int)"),
    "writes what it reads": WRITES_MARKS,
    "thread that outlives": (
        "import os, threading, time\n"
        "def late():\n    time.sleep(0.05)\n    os._exit(0)\n"
        "threading.Thread(target=late).start()\n"
        "def f(x):\n    time.sleep(5)\n    return 0"
    ),
    "built-in functions": (
        "import builtins\nbuiltins.AssertionError = SystemExit\n"
        "builtins.exec = lambda *_: None\nbuiltins.compile = lambda *_: 'pass'\n"
        "builtins.len = lambda _: 4\ndef f(x): return 0"
    ),
    "forks": "import os\ndef f(x):\n    if os.fork():\n        os._exit(0)\n    return 0",
    "optimised": "import os, sys\nos.execv(sys.executable, [sys.executable, '-O', '-c', ''])",
}


@pytest.mark.parametrize("test", [FOUR, CHECK, LOOP], ids=["line", "check", "loop"])
@pytest.mark.parametrize("name", [name for name in CHEATS if "equal" not in name])
def test_a_program_that_cheats_fails(name, test):
    assert not passes_test(CHEATS[name], test, PATIENT)


@pytest.mark.parametrize("test", [FOUR, CHECK], ids=["line", "check"])
@pytest.mark.parametrize("name", [name for name in CHEATS if "equal" in name])
def test_what_calls_itself_equal_to_anything_fails(name, test):
    assert not passes_test(CHEATS[name], test, PATIENT)


def test_a_module_that_a_program_puts_in_the_place_of_another_is_not_used_by_its_test():
    program = (
        "import math, sys, types\n"
        "math.isclose = lambda *_, **__: True\n"
        "fake = types.ModuleType('statistics')\n"
        "fake.mean = lambda _: 4.0\n"
        "sys.modules['statistics'] = fake\n"
        "def f(x): return 0.0"
    )
    assert not passes_test(program, "import math\nassert math.isclose(f(2), 4.0)", PATIENT)
    assert not passes_test(
        program, "import statistics\nassert statistics.mean([f(2)]) == 4.0", PATIENT
    )


def test_a_guard_keeps_its_descriptors_to_itself():
    result = run_program(READS_PARENTS, PATIENT)
    assert result.stdout == "set()\n"


HONEST = {
    "subclass of list": ("class L(list): pass\ndef f(x): return L([x])", "assert f(2) == [2]"),
    "fraction": (
        "from fractions import Fraction\ndef f(x): return Fraction(x, 4)",
        "assert f(2) == 0.5",
    ),
    "own class": (
        "class P:\n    def __init__(self, x): self.x = x\n"
        "    def __eq__(self, other): return self.x == other.x",
        "assert P(2) == P(2) and P(2).x == 2\nassert not P(2) == P(3)",
    ),
    "infinite": (
        "def f(x): return {'a': (float('inf'), {x}, None)}",
        "assert f(2) == {'a': (1e999, {2}, None)}",
    ),
    "raises": (
        "def f(x): raise ValueError(x)",
        "try:\n    f(2)\nexcept ValueError:\n    pass\nelse:\n    assert False",
    ),
    "global of the test": ("def f(): return limit + 1", "limit = 3\nassert f() == 4, 'counts'"),
    "in place": (
        "def f(xs): xs.sort()",
        "xs = [2, 1]\nf(xs)\nassert xs == [1, 2]\nassert [1, 2] == xs",
    ),
    "bounds": (
        "def f(x): return x / 3",
        "assert 0.6 < f(2) < 0.7\nassert abs(f(2) - 0.6667) < 1e-3",
    ),
    "words": ("def f(x): return 'ä\\n\\x85' + x", "assert f('ü') == 'ä\\n\\x85ü'"),
    "thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
        "def f(x): return 4",
        FOUR,
    ),
    "returns early": (
        "def f(x): return x",
        "def check(f):\n    if f(1) == 1:\n        return\n    assert f(2) == 9\ncheck(f)",
    ),
    "main": ("def f(x): return y\nif __name__ == '__main__':\n    y = 4", FOUR),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass D:\n    x: 'int'\n"
        "def f(x): return D(x).x * 2",
        FOUR,
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_passes(name):
    program, test = HONEST[name]
    assert passes_test(program, test, PATIENT)


@pytest.mark.parametrize("name", HONEST)
def test_the_same_tests_hold_in_plain_python(name):
    program, test = HONEST[name]
    result = run_program(
        f"{program}\n{test}\nimport os\nprint('held')\nos.sys.stdout.flush()\nos._exit(0)", PATIENT
    )
    assert result.stdout == "held\n"


def test_questions_leave_out_what_is_expected():
    asked = ask(
        "import math\nassert f(2) == 4 and g() is None\nassert not h(3), 'no'\nassert 5 < k()"
    )
    assert not [expected for expected in ("4", "None", "5") if expected in asked.text]
    right = [(0, "4"), (1, "None"), (2, "True"), (3, "6")]
    assert asked.is_passed(right)
    assert not asked.is_passed(right[:-1])
    assert not asked.is_passed([*right, (3, "5")])
    assert not asked.is_passed([*right, (9, "5")])


def test_cheats_are_worth_nothing_as_a_reward():
    reward = CodeReward(timeout_s=60.0).build()
    response = f"```python\n{CHEATS['always equal']}\n```"
    assert reward(RewardInput(prompt="p", response=response, fields={"tests": FOUR})) == 0.0
