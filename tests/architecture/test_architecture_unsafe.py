"""What runs what it reads is not used: SECURITY.md promises it, and names the exceptions."""

import ast

_CALLS = {
    "eval": "parse it; ast.literal_eval reads values",
    "exec": "parse it",
    "pickle.load": "use JSON, msgspec or safetensors",
    "pickle.loads": "use JSON, msgspec or safetensors",
    "pickle.Unpickler": "use JSON, msgspec or safetensors",
    "marshal.loads": "use JSON, msgspec or safetensors",
    "shelve.open": "use JSON, msgspec or safetensors",
    "torch.load": "use safetensors",
    "yaml.load": "use yaml.safe_load",
    "os.system": "use subprocess with a list of arguments",
    "tarfile.extractall": "read members; extract none",
    "shutil.unpack_archive": "read members; extract none",
}
_KEYWORDS = {
    "trust_remote_code": "a model's own code is not run",
    "allow_pickle": "arrays of objects are pickles",
    "shell": "use a list of arguments",
}
_EXCEPTIONS = {
    "packages/cosmos-parallel/src/cosmos_parallel/checkpoint_index.py": "builds a dozen classes",
    "packages/cosmos-rollout/src/cosmos_rollout/rewards/sandbox_program.py": "is the sandbox",
}


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _unsafe(node: ast.AST) -> str:
    """Return what to do instead of what a node does; empty if it is harmless."""
    if isinstance(node, ast.ClassDef):
        return next((why for base in node.bases if (why := _CALLS.get(_name_of(base)))), "")
    if not isinstance(node, ast.Call):
        return ""
    if why := _CALLS.get(_name_of(node.func)):
        return why
    for keyword in node.keywords:
        is_off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
        if keyword.arg in _KEYWORDS and not is_off:
            return _KEYWORDS[keyword.arg]
    return ""


def _found(sources) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for source in sources:
        if source.path.startswith(("packages/", "apps/")):
            for node in ast.walk(source.tree):
                if why := _unsafe(node):
                    found.setdefault(source.path, []).append(f"line {node.lineno}: {why}")
    return found


def test_nothing_runs_what_it_reads(sources):
    found = {path: why for path, why in _found(sources).items() if path not in _EXCEPTIONS}
    assert not found, "\n".join(f"{path}: {'; '.join(why)}" for path, why in found.items())


def test_no_exception_has_outlived_its_reason(sources):
    assert not _EXCEPTIONS.keys() - _found(sources).keys(), "delete these from _EXCEPTIONS"
