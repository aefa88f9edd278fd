"""What the documents promise: their code runs, their links lead somewhere, they name no machine."""

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from forked_scripts import Forked, Warm

_ROOT = Path(__file__).resolve().parents[2]
_READMES = [*sorted(_ROOT.glob("packages/*/README.md")), _ROOT / "apps" / "README.md"]
_DOCUMENTS = [
    *sorted(_ROOT.glob("*.md")), *_READMES, *sorted((_ROOT / "docs").rglob("*.md")),
    *sorted((_ROOT / "benchmarks").glob("*.md")), _ROOT / "configs" / "README.md",
]  # fmt: skip
_DEADLINE_S = 240
# of others alone: what an example forgets to import of ours is not there by this
_MODULES = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    "torchtitan.trainer",
    "accelerate",
    "peft",
)
_MAX_EXAMPLE_LINES = 20
_FENCED = re.compile(r"^```(?P<language>[\w-]*)[^\n]*\n(?P<code>.*?)^```\s*$", re.M | re.S)
_LINK = re.compile(r"(?<!\!)\[[^\]\n]+\]\((?P<target>[^)\s]+)\)")
_NAMED_FILE = re.compile(
    r"(?<![\w/-])((?:tests|benchmarks|configs|scripts|examples|packages|apps|docs)/[\w./-]*\w\.\w+)"
)
_NAMED_TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
# In pieces, so that this file does not name what no file may name.
_UNWANTED = [
    "/wo" + "rk/", "/opt/" + "pypi", "/opt/" + "wheels", "pypi" + ".org", "python" + "hosted.org",
    "/tmp/" + "plan", "/r" + "oot/", "download." + "pytorch.org",
    "registry." + "npmjs.org", "../" + "shared",
]  # fmt: skip


class Block(NamedTuple):
    """One fenced block of Python in a document."""

    path: Path
    line: int
    code: str

    @property
    def name(self) -> str:
        return f"{self.path.relative_to(_ROOT).as_posix()}:{self.line}"


def _blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    return [
        Block(path, text.count("\n", 0, match.start()) + 1, match["code"])
        for match in _FENCED.finditer(text)
        if match["language"] == "python"
    ]


_BLOCKS = [block for path in _DOCUMENTS for block in _blocks(path)]


def _run(block: Block, directory: Path) -> tuple[int, str]:
    """Run a block as a script of its own, in a session that ends with the deadline."""
    script = directory / "example.py"
    script.write_text(block.code, encoding="utf-8")
    search = [str(path) for path in [*_ROOT.glob("packages/*/src"), _ROOT / "apps" / "src"]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1"}
    warm = Warm(_MODULES, environment)
    process = Forked([script], warm, stderr=subprocess.STDOUT, directory=directory)
    try:
        output, _ = process.communicate(timeout=_DEADLINE_S)
    except subprocess.TimeoutExpired:
        return 124, f"did not end within {_DEADLINE_S} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, output


@pytest.mark.parametrize("block", _BLOCKS, ids=[block.name for block in _BLOCKS])
def test_python_in_the_documents_runs_as_it_stands(block, tmp_path):
    status, output = _run(block, tmp_path)
    assert status == 0, f"{block.name}: {output[-3000:]}"


@pytest.mark.parametrize("readme", _READMES, ids=lambda path: path.parent.name)
def test_readme_opens_with_a_short_example(readme):
    blocks = _blocks(readme)
    assert blocks, f"{readme}: show one example of under {_MAX_EXAMPLE_LINES} lines as ```python"
    lines = [line for line in blocks[0].code.splitlines() if line.strip()]
    assert len(lines) < _MAX_EXAMPLE_LINES, f"{blocks[0].name}: {len(lines)} lines of code"


def _anchors(path: Path) -> set[str]:
    """Return what a link to a heading of a document is called, as GitHub makes it of the words."""
    text = _FENCED.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+?)\s*$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_relative_links_resolve():
    found = []
    for path in _DOCUMENTS:
        text = _FENCED.sub("", path.read_text(encoding="utf-8"))
        for match in _LINK.finditer(text):
            target, _, anchor = match["target"].partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            document = path.parent / target if target else path
            if not document.exists():
                found.append(f"{path.relative_to(_ROOT)}: no {target}")
            elif anchor and anchor not in _anchors(document):
                found.append(f"{path.relative_to(_ROOT)}: no heading #{anchor} in {target}")
    assert not found, "\n".join(found)


def test_files_named_in_documents_exist():
    """Decisions and the log tell what was so at their date."""
    dated = {_ROOT / "docs" / "log.md", *(_ROOT / "docs" / "decisions").glob("[0-9]*.md")}
    found = []
    for path in set(_DOCUMENTS) - dated:
        text = path.read_text(encoding="utf-8")
        found += [
            f"{path.relative_to(_ROOT)}: no {name}"
            for name in _NAMED_FILE.findall(text)
            if not ((_ROOT / name).exists() or (path.parent / name).exists())
        ]
    assert not found, "\n".join(found)


def test_every_test_that_a_document_names_is_there():
    for path in _DOCUMENTS:
        for name, test in _NAMED_TEST.findall(path.read_text(encoding="utf-8")):
            source = (_ROOT / name).read_text(encoding="utf-8")
            assert f"def {test}(" in source, f"{path.relative_to(_ROOT)}: no {name}::{test}"


def test_decisions_have_their_own_number_and_say_it():
    numbers: dict[str, str] = {}
    found = []
    for path in sorted((_ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        number = path.name[:4]
        if number in numbers:
            found.append(f"{path.name} has the number of {numbers[number]}")
        numbers[number] = path.name
        title = path.read_text(encoding="utf-8").partition("\n")[0]
        if not title.startswith(f"# {number}: "):
            found.append(f"{path.name}: begin with '# {number}: the decision as one statement'")
    assert not found, "\n".join(found)


def test_every_decision_is_in_a_range_of_one_subject():
    folder = _ROOT / "docs" / "decisions"
    rows = re.findall(r"^\| (\d{4})(?:-(\d{4}))? \|", (folder / "README.md").read_text(), re.M)
    ranges = [range(int(first), int(last or first) + 1) for first, last in rows]
    for path in folder.glob("[0-9]*.md"):
        subjects = [numbers for numbers in ranges if int(path.name[:4]) in numbers]
        assert len(subjects) == 1, f"{path.name}: in {len(subjects)} ranges of docs/decisions"


def test_no_file_names_a_machine_or_a_package_index(text_files):
    found = []
    for path in text_files:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            found += [
                f"{path.relative_to(_ROOT)}:{number}: names {word}"
                for word in _UNWANTED
                if word in line
            ]
    assert not found, "\n".join(found)
