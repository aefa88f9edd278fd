#!/usr/bin/env bash
# Install Chromium and its driver for the dashboard's tests, by apt-get as root. Where they cannot be
# had this fails: those tests would be skipped, and nobody would have opened the dashboard.
set -uo pipefail

is_there() { command -v chromedriver >/dev/null && command -v chromium >/dev/null; }

if is_there; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "browser: no chromium and chromedriver here, and no root with apt-get: install them" >&2
    exit 1
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
install() { timeout 300 apt-get install -y --no-install-recommends chromium chromium-driver; }
# Package lists may be missing or old, and mirrors be away for a moment.
for pause_s in 0 5 20 60; do
    sleep "$pause_s"
    install >>"$log" 2>&1 && break
    timeout 120 apt-get update >>"$log" 2>&1
done
if ! is_there; then
    tail -n 20 "$log" >&2
    echo "browser: Chromium could not be installed, see above: the dashboard's page is not tested" >&2
    exit 1
fi
echo "browser: $(chromium --version 2>/dev/null)"
