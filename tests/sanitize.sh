#!/usr/bin/env bash
# The GPU tests of the kernels under compute-sanitizer's four tools, where it is installed.
# usage: tests/sanitize.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."

python=${1:-python3}
if ! command -v compute-sanitizer >/dev/null; then
    echo "compute-sanitizer is not installed: its four tools did not run" >&2
    exit 0
fi
for tool in memcheck racecheck initcheck synccheck; do
    echo "compute-sanitizer: $tool"
    HYPOTHESIS_PROFILE=quick compute-sanitizer --tool "$tool" --error-exitcode 1 \
        "$python" -m pytest -q -m gpu tests/test_clipping.py tests/test_accumulation.py \
        tests/test_normalization.py tests/test_batch_norm.py
done
