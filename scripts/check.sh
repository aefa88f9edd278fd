#!/usr/bin/env bash
# Everything a change must pass before it is committed. Runs every step, then says which failed.
#   scripts/check.sh                 all steps
#   scripts/check.sh lint layers     only these
set -uo pipefail
cd "$(dirname "$0")/.."

bin=${COSMOS_VENV:-.venv}/bin

step_format() { "$bin/ruff" format --check .; }
step_lint() { "$bin/ruff" check .; }
step_layers() { "$bin/lint-imports"; }
step_types() { "$bin/pyright" && "$bin/pyright" --project benchmarks; }
step_spelling() { "$bin/codespell" --toml pyproject.toml; }
step_unit() { "$bin/python" -m pytest -q tests/unit tests/architecture; }

steps=("$@")
if [ ${#steps[@]} -eq 0 ]; then
    steps=(format lint layers types spelling unit)
fi
failed=()
for step in "${steps[@]}"; do
    begun=$SECONDS
    printf '== %s\n' "$step"
    if "step_$step"; then
        printf '== %s passed in %d s\n' "$step" $((SECONDS - begun))
    else
        failed+=("$step")
        printf '== %s FAILED\n' "$step"
    fi
done
if [ ${#failed[@]} -gt 0 ]; then
    printf 'check: failed: %s\n' "${failed[*]}" >&2
    exit 1
fi
printf 'check: all passed\n'
