#!/usr/bin/env bash
# Play environments of verifiers 0.4 with verifiers itself, in an environment of its own: it asks for
# other versions of openai and mcp than constraints.txt has.
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
env -u PYTHONPATH "$python" -m pytest -q -p no:cacheprovider -o pythonpath=tests/support -o addopts= \
    --import-mode=importlib --strict-markers -ra --require all,verifiers-0.4 \
    tests/unit/rollout/test_rollout_environments_verifiers_04.py \
    tests/unit/rollout/test_rollout_chat_endpoint.py
