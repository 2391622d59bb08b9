"""Wheels with compiled code for Linux, on x86-64 and 64-bit ARM, built and tried: `make wheels`.

No container is needed: Zig compiles for both, and for an old glibc. auditwheel finds out from a
library's symbols which systems it runs on, and names the wheel for them. Each wheel is installed
where nothing else is, and runs the examples of all functions: for ARM on an emulated processor.
"""

import os
import shutil
import sys
import tempfile
from functools import partial
from itertools import product
from pathlib import Path

from tests.check_package import (
    EXAMPLES,
    ROOT,
    TOOLS,
    check,
    expect_compiled,
    interpreters,
    run,
    tool,
    uv,
    with_compiled_code,
)

PLATFORM = "manylinux2014"  # which NumPy 2's wheels are for, too
BUILD = ("build", "cmake", "hatch-fancy-pypi-readme", "nanobind", "ninja", "scikit-build-core")
COMPILER = """#!/bin/sh
# Zig's names of processors have underscores.
for option; do
    shift
    case $option in -march=x86-64*) option=-march=$(echo "${{option#*=}}" | tr - _) ;; esac
    set -- "$@" "$option"
done
exec {python} -m ziglang c++ -target {architecture}-linux-gnu.2.17 "$@" -idirafter {headers}
"""
# Where Debian's Python has the part of its headers that depends on the architecture.
ARM = ROOT / "build/arm/root"
HEADERS = {"x86_64": "/usr/include", "aarch64": ARM / "usr/include"}


def main() -> None:
    (ROOT / "dist").mkdir(exist_ok=True)
    run(ROOT / "tests/native/arm_root.sh", ARM)
    with tempfile.TemporaryDirectory(prefix="gradkit-") as name:
        folder = Path(name)
        pythons = interpreters()
        for architecture, version in product(("x86_64", "aarch64"), ("3.11", "3.12")):
            place = folder / f"{architecture}-{version}"
            check(place.name, partial(build, place, architecture, pythons[version]))
        for version, python in pythons.items():
            wheel = built(folder, "x86_64", version)
            place = folder / f"bare-{version}"
            check(f"on {version}", partial(with_compiled_code, place, wheel, python))
        arm = built(folder, "aarch64", "3.11")
        check("on 3.11 for ARM", partial(on_arm, folder / "site-packages", arm))
        for wheel in folder.glob("*/manylinux/*.whl"):
            shutil.copy(wheel, ROOT / "dist")


def build(folder, architecture, python):
    """Build a wheel for an architecture, and name it for all systems that it runs on."""
    environment = folder / "tools"
    uv("venv", "--python", python, environment)
    pinned = ROOT / "requirements/package.txt"
    into = ["--python", environment / "bin/python", "--constraint", pinned]
    uv("pip", "install", *into, *BUILD)
    compiler = ROOT / f"build/wheels/{architecture}-c++"
    compiler.parent.mkdir(parents=True, exist_ok=True)
    compiler.write_text(
        COMPILER.format(
            python=sys.executable, architecture=architecture, headers=HEADERS[architecture]
        )
    )
    compiler.chmod(0o755)
    command = ["-m", "build", "--no-isolation", "--wheel", "--outdir", folder, ROOT]
    settings = {"CXX": str(compiler), **(for_arm(python) if architecture == "aarch64" else {})}
    run(environment / "bin/python", *command, env=os.environ | settings)
    (wheel,) = folder.glob("*.whl")
    if wheel.name.endswith("-none-any.whl"):
        sys.exit(f"{python} compiled nothing; `CXX={compiler} pip install -v .` shows why")
    on_path = {"PATH": f"{TOOLS}:{os.environ['PATH']}"}
    tool(
        "auditwheel", "repair", "--wheel-dir", folder / "manylinux", wheel, env=os.environ | on_path
    )
    (repaired,) = folder.glob("manylinux/*.whl")
    if PLATFORM not in repaired.name:
        sys.exit(f"{repaired.name} needs a newer glibc than manylinux2014's")
    return f"{repaired.name}, {repaired.stat().st_size // 1000} kB"


def for_arm(python):
    """Variables for a build on x86-64 for ARM: of CMake, of the library's name, of the wheel's."""
    asked = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"
    return {
        "CMAKE_ARGS": "-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "SETUPTOOLS_EXT_SUFFIX": run(python, "-c", asked).strip().replace("x86_64", "aarch64"),
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
    }


def built(folder, architecture, version):
    """The wheel for a Python: of 3.12's stable ABI for all later ones."""
    of = "3.11" if version == "3.11" else "3.12"
    (wheel,) = (folder / f"{architecture}-{of}" / "manylinux").glob("*.whl")
    return wheel


def on_arm(place, wheel):
    """The examples on Debian's Python for ARM."""
    target = ["--target", place, "--python-platform", "aarch64-manylinux_2_28"]
    uv("pip", "install", *target, "--python-version", "3.11", "--only-binary", ":all:", wheel)
    command = ["qemu-aarch64", "-L", ARM, ARM / "usr/bin/python3.11", "-s", "-W", "error"]
    said = run(*command, "-c", EXAMPLES, env=os.environ | {"PYTHONPATH": str(place)}, cwd=place)
    return expect_compiled(wheel, said)


if __name__ == "__main__":
    main()
