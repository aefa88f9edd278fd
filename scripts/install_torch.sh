#!/usr/bin/env bash
# Install the one torch this project is built against, before anything else, so that no later pip
# call can resolve another. Usage: scripts/install_torch.sh PYTHON
#
# Without a GPU the CPU build is asked for first (200 MB rather than 3 GB). Where the configured
# package index does not carry it, the default build of the same version is taken instead.
set -euo pipefail

python=$1
version=2.13.0

pip_install() { "$python" -m pip install --disable-pip-version-check "$@"; }

if "$(dirname "$0")/has_gpu.sh"; then
    pip_install "torch==$version"
elif ! pip_install "torch==$version+cpu"; then
    echo "no CPU build of torch $version on the configured index, taking the default build"
    pip_install "torch==$version"
fi
