#!/usr/bin/env bash
# Install each package alone into an empty environment, with plain pip and only the siblings it
# declares, and run its own unit tests there.
#   scripts/check_standalone.sh                  all seven
#   scripts/check_standalone.sh core rollout     only these
# Two at a time, since pip mostly waits for the disk; COSMOS_STANDALONE_JOBS says otherwise. What a
# package printed comes out in one piece when it is done.
#
# Helpers of tests (tests/support) are on the path, siblings that are not declared are not.
# What is installed is a wheel built from the tree, not the tree: a module that the wheel forgets, or
# an import that the package does not declare, fails here and nowhere else.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
export PIP_NO_COMPILE=1  # most of what is installed here is never imported
export OMP_NUM_THREADS=1
jobs=${COSMOS_STANDALONE_JOBS:-2}
test_tools=(pytest pytest-asyncio pytest-timeout hypothesis beartype jsonschema)
if [ -n "${COSMOS_STANDALONE_DIR:-}" ]; then
    scratch=$COSMOS_STANDALONE_DIR
    mkdir -p "$scratch"
else
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
fi

# What `pip install` is given for a package: itself, and the siblings it depends on.
sources_of() {
    local core=packages/cosmos-core
    case $1 in
        core) echo "$core[server,mlflow]" ;;
        weightsync) echo packages/cosmos-weightsync ;;
        parallel | rollout | algos) echo "$core packages/cosmos-$1" ;;
        wfm) echo "$core packages/cosmos-parallel packages/cosmos-rollout packages/cosmos-algos" \
            packages/cosmos-wfm ;;
        app) echo "$core packages/cosmos-parallel packages/cosmos-rollout packages/cosmos-algos" \
            packages/cosmos-wfm packages/cosmos-weightsync apps ;;
        *) return 1 ;;
    esac
}

install() {
    local package=$1 python=$2 sources constraints=(-c constraints.txt)
    read -ra sources <<<"$(sources_of "$package")"
    case $package in
        core) constraints=() ;; # MLflow asks for older versions than the others
        rollout) ;;             # neither requires torch
        *) scripts/install_torch.sh "$python" || return 1 ;;
    esac
    "$python" -m pip install --disable-pip-version-check \
        "${constraints[@]}" "${sources[@]/#/./}" "${test_tools[@]}"
}

check() {
    local package=$1 begun=$SECONDS environment=$scratch/$1 installed status
    "$python" -m venv --clear "$environment" || return 1
    install "$package" "$environment/bin/python" >"$scratch/$package.log" 2>&1 || {
        tail -n 20 "$scratch/$package.log"
        return 1
    }
    installed=$SECONDS
    "$environment/bin/python" -m pytest -q -p no:cacheprovider -o pythonpath=tests/support -o addopts= \
        --import-mode=importlib --strict-markers -ra -m "not gpu" "tests/unit/$package"
    status=$?
    rm -rf "$environment"
    if [ $status -eq 5 ]; then
        printf 'standalone: %s: no test was collected in tests/unit/%s\n' "$package" "$package"
    fi
    printf 'standalone: %s: install %d s, tests %d s\n' \
        "$package" $((installed - begun)) $((SECONDS - installed))
    return $status
}

packages=("$@")
if [ ${#packages[@]} -eq 0 ]; then
    packages=(weightsync algos core parallel rollout wfm app)
fi
for package in "${packages[@]}"; do
    if ! sources_of "$package" >/dev/null; then
        printf 'standalone: no package %s\n' "$package" >&2
        exit 2
    fi
done

# One package from begin to end; its verdict is a file, since it runs in a process of its own.
run_one() {
    local package=$1
    if check "$package" >"$scratch/$package.out" 2>&1; then
        touch "$scratch/$package.passed"
    fi
    printf '== standalone: %s\n%s\n' "$package" "$(<"$scratch/$package.out")"
}

rm -f "$scratch"/*.passed
for package in "${packages[@]}"; do
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do
        wait -n
    done
    run_one "$package" &
done
wait
failed=()
for package in "${packages[@]}"; do
    [ -e "$scratch/$package.passed" ] || failed+=("$package")
done
if [ ${#failed[@]} -gt 0 ]; then
    printf 'standalone: failed: %s\n' "${failed[*]}" >&2
    exit 1
fi
printf 'standalone: all passed\n'
