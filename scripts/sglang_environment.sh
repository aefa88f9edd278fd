#!/usr/bin/env bash
# An environment in which SGLang serves on a CPU, beside the workspace's own, whose libraries it sees
# (decision 0307): its wheel without the CUDA libraries it asks for. Prints its Python, for
#   COSMOS_SGLANG_PYTHON=$(scripts/sglang_environment.sh) make test PYTEST_ARGS="-k sglang"
# and as rollout.engine.interpreter of a recipe. On a GPU: an environment with `pip install sglang`.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-runs/sglang}
python=$folder/bin/python
wanted="sglang==0.5.23 gguf==0.19.0 ipython==9.18.1 orjson==3.13.0 soundfile==0.14.0 traitlets==5.16.1"

if [ "$(cat "$folder/installed.txt" 2>/dev/null)" != "$wanted" ]; then
    .venv/bin/python -m venv --clear --without-pip "$folder"
    purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
    {
        .venv/bin/python -c "$purelib"
        echo "$PWD/tests/support/stand_ins_for_cpus"
    } >"$("$python" -c "$purelib")/workspace.pth"
    # shellcheck disable=SC2086 # one word each
    .venv/bin/python -m pip --python "$python" install --quiet --no-deps $wanted >&2
    echo "$wanted" >"$folder/installed.txt"
fi
realpath --no-symlinks "$python"
