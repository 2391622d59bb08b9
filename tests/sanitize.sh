#!/usr/bin/env bash
# compute-sanitizer's four tools over every kernel, side by side, where it is installed.
# What each printed is in build/sanitizer, or in $OUT/sanitizer if OUT is set.
# usage: tests/sanitize.sh [PYTHON]
set -uo pipefail
cd "$(dirname "$0")/.."

python=${1:-python3}
logs=${OUT:-build}/sanitizer
PATH=$PATH:/usr/local/cuda/bin
if ! command -v compute-sanitizer >/dev/null; then
    echo "compute-sanitizer is not installed: its four tools did not run" >&2
    exit 0
fi
mkdir -p "$logs"
tools=(memcheck racecheck initcheck synccheck)
declare -A running
for tool in "${tools[@]}"; do
    OMP_NUM_THREADS=1 timeout 400 compute-sanitizer --tool "$tool" --error-exitcode 1 \
        "$python" -m pytest --quiet --tb short -p no:benchmark -p no:cacheprovider -m gpu \
        tests/cuda/test_every_kernel.py >"$logs/$tool.log" 2>&1 &
    running[$tool]=$!
done
failed=()
for tool in "${tools[@]}"; do
    wait "${running[$tool]}"
    status=$?
    tests=$(grep -E '(passed|failed|error).* in [0-9.]+s' "$logs/$tool.log")
    errors=$(sed -n 's/^=* \([A-Z]*CHECK SUMMARY\|ERROR SUMMARY\): //p' "$logs/$tool.log")
    echo "compute-sanitizer: $tool: ${errors:-did not end}; ${tests:-no test ended}"
    if ((status)); then
        failed+=("$tool: $status")
        grep -E '^(=========|FAILED|ERROR)' "$logs/$tool.log" | head -n 20
    fi
done
if ((${#failed[@]})); then
    echo "compute-sanitizer failed: ${failed[*]} (124: out of time); see $logs" >&2
    exit 1
fi
