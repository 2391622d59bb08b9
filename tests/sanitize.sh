#!/usr/bin/env bash
# compute-sanitizer's four tools over every kernel, where it is installed. Run the GPU tests
# first: they fill CuPy's cache of compiled kernels.
# usage: tests/sanitize.sh [PYTHON]
set -uo pipefail
cd "$(dirname "$0")/.."

python=${1:-python3}
if ! command -v compute-sanitizer >/dev/null; then
    echo "compute-sanitizer is not installed: its four tools did not run" >&2
    exit 0
fi
failed=()
for tool in memcheck racecheck initcheck synccheck; do
    echo "compute-sanitizer: $tool"
    timeout 150 compute-sanitizer --tool "$tool" --error-exitcode 1 \
        "$python" -m pytest -q -m gpu tests/cuda/test_every_kernel.py || failed+=("$tool: $?")
done
if ((${#failed[@]})); then
    echo "compute-sanitizer failed: ${failed[*]} (124: out of time)" >&2
    exit 1
fi
