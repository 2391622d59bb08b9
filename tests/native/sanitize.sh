#!/usr/bin/env bash
# The compiled CPU backend under AddressSanitizer and UndefinedBehaviorSanitizer, in the suite's own tests,
# and its threads under ThreadSanitizer, without Python.
# usage: [MARCH=x86-64-v3] tests/native/sanitize.sh PYTHON [pytest's arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."

python=$1
shift
out=build/sanitized
flags="-std=c++17 -O1 -g1 -Wall -Wextra -ffp-contract=off -fno-sanitize-recover=all -pthread"
mkdir -p $out

echo "ThreadSanitizer: the pool and the norms over rows"
# shellcheck disable=SC2086
g++ $flags -fsanitize=thread -DISA=baseline -c kernels/cpu/rows.cpp -o $out/rows.o
# shellcheck disable=SC2086
g++ $flags -fsanitize=thread -Ikernels/cpu tests/native/threads.cpp kernels/cpu/pool.cpp \
    kernels/cpu/row_calls.cpp $out/rows.o -o $out/threads
$out/threads

march=${MARCH-native}
echo "AddressSanitizer and UndefinedBehaviorSanitizer: the tests, with kernels for $march"
"$python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --no-build-isolation \
    --upgrade --target $out/package --config-settings build-dir=$out/cmake \
    --config-settings cmake.define.GRADKIT_SANITIZE=$march .
library=$(echo "$PWD/$out/package/gradkit/_cpu"/compiled*.so)
# The sanitizer's library comes first, and C++'s exceptions from where it expects them.
preload="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)"
# Python itself leaks, and so does the pool, which lives as long as the process.
GRADKIT_COMPILED=$library LD_PRELOAD=$preload ASAN_OPTIONS=detect_leaks=0 \
    UBSAN_OPTIONS=print_stacktrace=1 HYPOTHESIS_PROFILE=quick \
    "$python" -m pytest -p tests.native.sanitized -p no:xdist -q "$@"
