#!/usr/bin/env bash
# Play environments of verifiers 0.4 with verifiers itself, in an environment of its own: it asks for
# other versions of openai and mcp than constraints.txt has. First with cosmos-rollout alone, then in whole
# runs, for which the workspace's libraries are found behind those of that environment.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python=$environment/bin/python
constraints=$environment/constraints.txt
wanted=(-c "$constraints" ./packages/cosmos-core "./packages/cosmos-rollout[verifiers]"
    verifiers==0.4.0 pytest pytest-asyncio pytest-timeout hypothesis beartype jsonschema)

.venv/bin/python -m venv "$environment"
grep -vE '^(verifiers|openai|mcp|mcp-types)==' constraints.txt >"$constraints"
# uv is there if make setup got it; pip takes longer.
.venv/bin/python -m uv pip install --quiet --python "$python" "${wanted[@]}" ||
    PIP_NO_COMPILE=1 "$python" -m pip install --quiet --disable-pip-version-check "${wanted[@]}"
tests=("$python" -m pytest -q -p no:cacheprovider -o addopts= --import-mode=importlib --strict-markers -ra)
tests+=(--require all,verifiers-0.4)
env -u PYTHONPATH "${tests[@]}" -o pythonpath=tests/support \
    tests/unit/rollout/test_rollout_environments_verifiers_04.py \
    tests/unit/rollout/test_rollout_chat_endpoint.py

purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
.venv/bin/python -c "$purelib" >"$("$python" -c "$purelib")/workspace.pth"
env -u PYTHONPATH "${tests[@]}" --durations=3 tests/e2e/test_e2e_verifiers_04.py
