#!/usr/bin/env bash
# An environment with OpenStack Swift, an object store that speaks S3, beside the workspace's own (decision 0405): tests that
# need S3 have one of it, and moto's stand-in where there is none. Prints its Python, for
#   COSMOS_SWIFT_PYTHON=$(scripts/s3_environment.sh) make test PYTEST_ARGS="-k s3"
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-runs/swift}
python=$folder/bin/python
wanted="swift==2.38.3 certifi==2026.10.19.post1 cffi==2.1.1 charset-normalizer==3.5.3 cryptography==50.0.2 dnspython==2.9.2
eventlet==0.41.3 greenlet==3.5.6 idna==3.20 lxml==6.1.3 PasteDeploy==3.1.0 pycparser==3.12 pyeclib==1.8.0 requests==2.34.2
urllib3==2.8.0 xattr==1.3.0"

if [ "$(cat "$folder/installed.txt" 2>/dev/null)" != "$wanted" ]; then
    .venv/bin/python -m venv --clear --without-pip "$folder"
    # shellcheck disable=SC2086 # one word each
    .venv/bin/python -m pip --python "$python" install --quiet --no-deps $wanted >&2
    echo "$wanted" >"$folder/installed.txt"
fi
realpath --no-symlinks "$python"
