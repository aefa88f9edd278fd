#!/usr/bin/env bash
# Run the MLflow sink's test with MLflow itself, in an environment of its own: MLflow asks for older
# versions of importlib_metadata, cachetools and FastAPI than constraints.txt has.
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
env -u PYTHONPATH "$python" -m pytest -q -p no:cacheprovider -o pythonpath=tests/support -o addopts= \
    --import-mode=importlib --strict-markers -ra --require mlflow -k test_mlflow \
    tests/unit/core/test_core_metrics_services.py
