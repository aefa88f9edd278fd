#!/usr/bin/env bash
# Run the tests of the MLflow sink with MLflow itself, in an environment of its own: MLflow asks for older
# versions of importlib_metadata and cachetools than constraints.txt has. First with cosmos-core alone,
# then a whole run, for which the workspace's libraries are found behind those of that environment.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python=$environment/bin/python
wanted=("./packages/cosmos-core[mlflow]" mlflow==3.17.2
    pytest pytest-asyncio pytest-timeout hypothesis beartype jsonschema)

.venv/bin/python -m venv "$environment"
# uv is there if make setup got it; pip takes longer.
.venv/bin/python -m uv pip install --quiet --python "$python" "${wanted[@]}" ||
    PIP_NO_COMPILE=1 "$python" -m pip install --quiet --disable-pip-version-check "${wanted[@]}"
tests=("$python" -m pytest -q -p no:cacheprovider -o addopts= --import-mode=importlib --strict-markers -ra)
tests+=(--require all,mlflow)
env -u PYTHONPATH "${tests[@]}" -o pythonpath=tests/support -k test_mlflow \
    tests/unit/core/test_core_metrics_services.py

purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
.venv/bin/python -c "$purelib" >"$("$python" -c "$purelib")/workspace.pth"
env -u PYTHONPATH "${tests[@]}" --durations=1 tests/e2e/test_e2e_mlflow.py
