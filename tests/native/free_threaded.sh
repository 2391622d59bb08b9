#!/usr/bin/env bash
# The CPU backends' tests on CPython without the GIL: Debian's source of it, compiled here once, and the compiled
# backend for it. PYTHON_GIL is not set, so that Python itself says whether an extension needs the GIL.
# usage: tests/native/free_threaded.sh [pytest's arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."

source=python3.13_3.13.5.orig.tar.xz
sha256=93e583f243454e6e9e4588ca2c2662206ad961659863277afcdb96801647d640
suite=trixie # of Debian
out=$PWD/build/free-threaded
bin=$out/venv/bin

missing=()
for tool in apt-get:apt g++:g++ make:make xz:xz-utils; do
    command -v "${tool%:*}" >/dev/null || missing+=("${tool#*:}")
done
for header in ffi.h:libffi-dev openssl/ssl.h:libssl-dev zlib.h:zlib1g-dev; do
    g++ -E -include "${header%:*}" -x c++ /dev/null >/dev/null 2>&1 || missing+=("${header#*:}")
done
if ((${#missing[@]})); then
    echo "CPython is compiled with these, on Debian and Ubuntu: apt install ${missing[*]}" >&2
    exit 1
fi

if [ ! -e "$out/python/.installed" ]; then
    echo "CPython without the GIL: Debian's $source (3 min)"
    rm -rf "$out"
    mkdir -p "$out/apt/lists/partial" "$out/apt/cache/archives/partial"
    cd "$out"
    echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]" \
        "http://deb.debian.org/debian $suite main" > apt/sources.list
    apt=(apt-get -qq -o Dir::Etc::SourceList="$out/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o Dir::State::Lists="$out/apt/lists" -o Dir::Cache="$out/apt/cache" -o APT::Sandbox::User=root)
    "${apt[@]}" update
    "${apt[@]}" source --download-only --tar-only python3.13
    echo "$sha256  $source" | sha256sum --check --quiet
    mkdir source
    tar --extract --file "$source" --strip-components 1 --directory source
    cd source
    ./configure --quiet --prefix="$out/python" --disable-gil --disable-test-modules CFLAGS=-O1 > ../configure.log 2>&1
    make -s -j "$(nproc)" > ../make.log 2>&1
    make -s altbininstall libinstall inclinstall sharedinstall > ../install.log 2>&1
    cd ../../..
    touch "$out/python/.installed"
fi

pip() { "$bin/python" -m pip "$@" --quiet --disable-pip-version-check --no-compile; }
if [ ! -e "$bin/.installed" ]; then
    echo "NumPy and pytest for it" # of three packages the last versions with wheels for it
    "$out/python/bin/python3.13t" -m venv --clear "$out/venv"
    sed -E 's/ *\\$//; /^ *--hash/d; /^(numpy|ml-dtypes|hypothesis)==/d' requirements/ci.txt > "$out/constraints.txt"
    pip install --only-binary=:all: --constraint "$out/constraints.txt" numpy==2.4.6 ml_dtypes==0.5.4 \
        hypothesis==6.155.7 array-api-strict cmake hatch-fancy-pypi-readme mpmath nanobind ninja pytest \
        pytest-xdist scikit-build-core
    touch "$bin/.installed"
fi

echo "The compiled backend for it"
pip install --no-deps --no-build-isolation --config-settings build-dir="$out/cpu" --editable .

unset PYTHON_GIL
"$bin/python" -W error -c 'import sys, gradkit; assert not sys._is_gil_enabled(), "gradkit needs the GIL"'
HYPOTHESIS_PROFILE=quick "$bin/python" -m pytest --quiet --numprocesses auto --dist worksteal \
    -m 'not (slow or ptx or emulated or cuda or cudnn or gpu)' "$@"
