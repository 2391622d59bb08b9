#!/usr/bin/env bash
# Debian's Python for 64-bit ARM, with the libraries that it needs, in a new directory: `qemu-aarch64 -L` runs it.
# It needs, as root, dpkg --add-architecture arm64 && apt update.
# usage: tests/native/arm_root.sh DIRECTORY
set -euo pipefail

[ ! -d "$1" ] || exit 0
packages="python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libpython3.11-dev"
libraries="libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libffi8 libbz2-1.0 liblzma5"
mkdir -p "$1.debs"
# shellcheck disable=SC2046,SC2086
(cd "$1.debs" && apt-get download -q $(printf '%s:arm64 ' $packages $libraries))
for package in "$1".debs/*.deb; do dpkg -x "$package" "$1.part"; done
mv "$1.part" "$1"
