#!/usr/bin/env bash
# The suite's own tests on the compiled CPU backend for 64-bit ARM, by a cross compiler, on ARM's Python in an
# emulated processor. On Debian and Ubuntu: apt install g++-aarch64-linux-gnu qemu-user, and as root
# dpkg --add-architecture arm64 && apt update. The emulator hangs where a process with busy threads forks.
# usage: tests/native/arm.sh PYTHON [pytest's arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."

python=$(realpath -s "$1")
bin=$(dirname "$python")
shift
out=$PWD/build/arm
root=$out/root
mkdir -p "$out/site"

version=3.11
echo "Debian's Python $version for ARM"
tests/native/arm_root.sh "$root"

echo "NumPy and pytest for ARM"
sed -E 's/ *\\$//; /^ *--hash/d' requirements/ci.txt > "$out/constraints.txt"
"$python" -m pip install --quiet --disable-pip-version-check --upgrade --target "$out/site" --python-version $version \
    --only-binary=:all: --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
    --platform manylinux2014_aarch64 --constraint "$out/constraints.txt" \
    array-api-strict hypothesis ml-dtypes mpmath numpy pytest pytest-xdist

echo "The compiled backend for ARM"
"$bin/cmake" -S . -B "$out/cmake" -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DCMAKE_SYSTEM_NAME=Linux \
    -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
    -DCMAKE_CXX_FLAGS="-isystem $root/usr/include" -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" \
    -DPython_EXECUTABLE="$python" -DPython_INCLUDE_DIR="$root/usr/include/python$version" > "$out/cmake.log"
"$bin/cmake" --build "$out/cmake"

# What tests start is on the emulated processor too.
cat > "$out/python" <<END
#!/bin/sh
exec qemu-aarch64 -L "$root" -0 "$out/python" "$root/usr/bin/python$version" "\$@"
END
chmod +x "$out/python"
cp tests/native/sanitized.py "$out/site/compiled_elsewhere.py"
printf 'import sys\nimport compiled_elsewhere\nsys.executable = "%s"\n' "$out/python" > "$out/site/sitecustomize.py"

library=$(echo "$out"/cmake/compiled*.so)
GRADKIT_COMPILED=$library PYTHONPATH=$out/site HYPOTHESIS_PROFILE=quick \
    "$out/python" -m pytest -p tests.native.sanitized -q "$@"
