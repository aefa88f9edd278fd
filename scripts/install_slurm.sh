#!/usr/bin/env bash
# Install SLURM for the tests that run a cluster of network namespaces, where that is a matter of one
# apt-get. Its services are not started: the tests start daemons of their own.
set -uo pipefail

has_all() { command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v sbatch >/dev/null; }

if has_all; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "slurm: none here, and no root with apt-get: no job runs over several machines in the tests"
    exit 1
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
install() { timeout 300 apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge; }
if ! install >"$log" 2>&1; then
    timeout 120 apt-get update >>"$log" 2>&1
    install >>"$log" 2>&1
fi
if ! has_all; then
    tail -n 3 "$log"
    echo "slurm: could not be installed: no job runs over several machines in the tests"
    exit 1
fi
echo "slurm: $(slurmd -V)"
