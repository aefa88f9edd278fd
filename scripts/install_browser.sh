#!/usr/bin/env bash
# Install Chromium and its driver for the dashboard's tests, where that is a matter of one apt-get.
# Best effort: without them those tests are skipped and say so, hence never a failure.
set -uo pipefail

if command -v chromedriver >/dev/null && command -v chromium >/dev/null; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "browser: no Chromium here, and no root with apt-get: the dashboard's page is not tested"
    exit 0
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
install() { timeout 300 apt-get install -y --no-install-recommends chromium chromium-driver; }
if ! install >"$log" 2>&1; then
    timeout 120 apt-get update >>"$log" 2>&1
    install >>"$log" 2>&1
fi
if command -v chromedriver >/dev/null; then
    echo "browser: $(chromium --version 2>/dev/null)"
else
    tail -n 3 "$log"
    echo "browser: Chromium could not be installed: the dashboard's page is not tested"
fi
exit 0
