"""A release, built and tried as its users get it: `make check-package`.

Runs with the Python of .venv-package, whose tools `requirements/package.txt` pins. It installs into
environments of its own, in a temporary folder, and prints what it has checked.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = Path(sys.executable).parent
OLDEST = (3, 11)

# Where extras are to resolve; those of CUDA install nothing on macOS. CUDA 12 and 13 exclude each
# other, and so do cuDNN 8 and 9.
PLATFORMS = (
    "x86_64-unknown-linux-gnu",
    "aarch64-unknown-linux-gnu",
    "x86_64-apple-darwin",
    "aarch64-apple-darwin",
    "x86_64-pc-windows-msvc",
)
EXTRAS = ("cudnn12,demo,lint,test", "cudnn13", "cudnn8")
# What of the CUDA toolkit each brings: the compiler and headers, and for cuDNN 9 what it needs.
LIBRARIES = {"cuda12": {"nvrtc", "runtime"}, "cuda13": {"nvrtc", "runtime"}}

# Tests of an sdist: those that look at its files. The others see what they see in a checkout.
OF_FILES = (
    "tests/package/test_benchmarks.py",
    "tests/package/test_contract.py",
    "tests/package/test_pages.py",
    "tests/package/test_public_api.py",
    "tests/package/test_structure.py",
    "tests/package/test_supply_chain.py",
    "tests/package/test_types.py",
    "tests/typing",
)
TEST_NEEDS = ("array-api-strict", "hypothesis", "matplotlib", "mpmath", "packaging", "pytest")

# Every public example, in an environment that has nothing but gradkit and what it needs.
EXAMPLES = """
import doctest, importlib, pathlib, pkgutil, sys
import gradkit, ml_dtypes, numpy
modules = [gradkit] + [
    importlib.import_module(f"gradkit.{found.name}")
    for found in pkgutil.iter_modules(gradkit.__path__)
    if found.name not in ("_cpu", "jax", "torch")  # compiled, or importing those
]
results = [doctest.testmod(module) for module in modules]
failed, run = (sum(part) for part in zip(*results))
assert run > 100, run
assert "site-packages" in gradkit.__file__
assert pathlib.Path(gradkit.__file__).with_name("kernels").joinpath("norm.cu").is_file()
compiled = gradkit.show_config("dicts")["backends"]["compiled"]["available"]
print(f"numpy {numpy.__version__}, ml_dtypes {ml_dtypes.__version__}: {run} examples", end="")
print(", compiled" if compiled else "")
sys.exit(failed)
"""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="gradkit-") as name:
        folder = Path(name)
        check("build", partial(build, folder))
        (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*-none-any.whl")
        (compiled,) = set(folder.glob("*.whl")) - {wheel}
        pythons = interpreters()
        version, python = list(pythons.items())[-1]
        last, newest = f"Python {version}, highest", folder / f"{version}-highest"
        alone = {
            f"Python {each}, {resolution}": partial(
                bare, folder / f"{each}-{resolution}", pythons[each], resolution, wheel
            )
            for each, resolution in product(pythons, ("lowest", "highest"))
        }
        tests = partial(tests_of, sdist, newest, folder)
        in_newest = {last: alone.pop(last), "the sdist's tests": tests}
        others = alone | {
            "pyright": pyright,
            "without a compiler": partial(without_a_compiler, folder / "no compiler"),
            "extras": partial(extras, wheel),
            "with compiled code": partial(with_compiled_code, folder / "compiled", compiled),
            "the testbed alone": partial(testbed, folder / "testbed"),
            "archives": partial(archives, wheel, compiled, sdist),
            "metadata": partial(metadata, wheel),
            f"CMake for {version}": partial(configured, folder / "configured", python),
            "workflows": workflows,
            "sp-repo-review": repo_review,
        }
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each is one process at a time
            jobs = [pool.submit(in_turn, in_newest)]
            jobs += [pool.submit(check, *step) for step in others.items()]
            for job in jobs:
                job.result()


def in_turn(steps):
    for label, work in steps.items():
        check(label, work)


def check(label, work):
    """Run a step, and print what it says and how long it took."""
    start = time.monotonic()
    said = work()
    print(f"{label:24} {time.monotonic() - start:5.1f} s  {said}", flush=True)


def run(*command, **options):
    """A command's output; its failure ends the check."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def tool(name, *arguments, **options):
    """Run one of the pinned tools."""
    return run(TOOLS / name, *arguments, **options)


uv = partial(tool, "uv", "--quiet", "--no-config", "--no-python-downloads")


def build(folder):
    """A wheel with compiled code, for the Python that runs this, and one without, for any."""
    command = ("python", "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    tool(*command)
    tool(*command, "--wheel", env=os.environ | {"GRADKIT_PURE": "1"})
    return ", ".join(f"{path.stat().st_size // 1000} kB" for path in folder.iterdir())


def without_a_compiler(folder):
    """The wheel that an installation makes then: it succeeds, says so, and so will gradkit."""
    command = ("python", "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, ROOT)
    said = tool(*command, env=os.environ | {"CXX": "false"})
    (wheel,) = folder.glob("*.whl")
    if "NumPy computes in its place" not in said or not wheel.name.endswith("-none-any.whl"):
        sys.exit(f"{wheel.name}, and it said\n{said}")
    if "gradkit/_not_compiled.py" not in zipfile.ZipFile(wheel).namelist():
        sys.exit(f"{wheel.name} has no module of which `import gradkit` warns")
    return wheel.name


def archives(wheel, compiled, sdist):
    """All are well-formed; the wheels have all of gradkit, the sdist all of the repository."""
    tool("twine", "check", "--strict", wheel, compiled, sdist)
    tool("check-wheel-contents", wheel, compiled)
    tracked = run("git", "ls-files", cwd=ROOT).splitlines() if (ROOT / ".git").exists() else []
    inside, more = (
        {name for name in zipfile.ZipFile(path).namelist() if ".dist-info/" not in name}
        for path in (wheel, compiled)
    )
    (code,) = more - inside
    if inside - more or not code.startswith("gradkit/_cpu/compiled."):
        sys.exit(f"{compiled.name} has {code}, and lacks {sorted(inside - more)}")
    if tracked:
        package = {name for name in tracked if name.startswith("gradkit/")}
        package |= {f"gradkit/{name}" for name in tracked if name.startswith("kernels/")}
        expect_equal("the wheel", inside, package)
        with tarfile.open(sdist) as archive:
            held = {name.partition("/")[2] for name in archive.getnames()} - {"PKG-INFO"}
        expect_equal("the sdist", held, {n for n in tracked if not n.startswith(".ci/")})
    return f"{len(inside)} files in the wheel"


def expect_equal(label, found, wanted):
    if found != wanted:
        sys.exit(f"{label} lacks {sorted(wanted - found)}, and has {sorted(found - wanted)}")


def metadata(wheel):
    """The description has no link that leads nowhere on a package index."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    head, _, description = archive.read(name).decode().partition("\n\n")
    lost = [link for link in re.findall(r"\]\(([^)]+)", description) if "://" not in link]
    lost += re.findall(r"<(?:img|a) [^>]*>", description)
    if lost or "## Guarantees" not in description:
        sys.exit(f"the description has links that an index cannot follow: {lost}")
    missing = [f for f in ("Keywords", "Classifier", "License-Expression") if f"{f}: " not in head]
    expect_equal("the metadata", set(), set(missing))
    return f"{len(description.splitlines())} lines of description"


def extras(wheel):
    """Every extra resolves on every platform, and CUDA's are as light as they can be."""
    offline = set()
    for extra, platform in product(EXTRAS, PLATFORMS):
        resolved(wheel, extra, platform, offline)
    for extra, wanted in LIBRARIES.items():
        names = resolved(wheel, extra, PLATFORMS[0], offline)
        found = {re.sub(r"nvidia-(cuda-)?|-cu12", "", n) for n in names if n.startswith("nvidia-")}
        expect_equal(f"[{extra}]", found, wanted)
    return f"{len(EXTRAS)} sets on {len(PLATFORMS)} platforms"


def resolved(wheel, extra, platform, offline):
    """The packages that an extra installs. What one platform has fetched, the others find."""
    command = [TOOLS / "uv", "--quiet", "--no-config", "pip", "compile", "-"]
    command += ["--no-header", "--no-annotate", "--python-platform", platform]
    command += ["--python-version", ".".join(map(str, OLDEST))]
    asked = f"gradkit[{extra}] @ {wheel.as_uri()}\n"
    if offline:
        done = subprocess.run([*command, "--offline"], input=asked, capture_output=True, text=True)
        if done.returncode == 0:
            return [line.partition("=")[0] for line in done.stdout.splitlines()]
    offline.add(extra)
    return [line.partition("=")[0] for line in run(*command, input=asked).splitlines()]


def interpreters():
    """Every CPython that gradkit supports on this machine, by version, from the oldest on."""
    folders = [*os.get_exec_path(), *Path.home().glob(".pyenv/versions/*/bin")]
    asked = "import json, sys; print(json.dumps([*sys.version_info[:2], sys.prefix, sys.abiflags]))"
    found = {}
    for path in (p for folder in folders for p in sorted(Path(folder).glob("python3*"))):
        named = re.fullmatch(r"python3\.(\d+)t?", path.name)
        if not named or int(named[1]) < OLDEST[1] or "shims" in path.parts:
            continue  # pyenv's shims run what a folder chooses
        done = subprocess.run([path, "-c", asked], capture_output=True, text=True)
        major, minor, _, flags = json.loads(done.stdout) if done.returncode == 0 else (0, 0, "", "")
        if (major, minor) >= OLDEST:
            found.setdefault((minor, flags), path)
    return {f"3.{minor}{flags}": found[minor, flags] for minor, flags in sorted(found)}


def bare(place, python, resolution, wheel):
    """An environment with gradkit and nothing else; the examples of all public functions."""
    uv("venv", "--python", python, place)
    into = ["--python", place / "bin/python", "--only-binary", ":all:", "--resolution", resolution]
    uv("pip", "install", *into, wheel)
    return run(place / "bin/python", "-I", "-W", "error", "-c", EXAMPLES, cwd=place).strip()


def with_compiled_code(place, wheel, python=sys.executable):
    return expect_compiled(wheel, bare(place, python, "highest", wheel))


def expect_compiled(wheel, said):
    """Check that the examples say that compiled code ran, and return what they printed."""
    if not said.strip().endswith(", compiled"):
        sys.exit(f"{wheel.name} computes with NumPy: {said}")
    return said.strip()


def configured(place, python):
    """For the stable ABI, from Python 3.12 on, nanobind has another library. Compiles nothing."""
    nanobind = run(sys.executable, "-m", "nanobind", "--cmake_dir").strip()
    where = (f"-Dnanobind_DIR={nanobind}", f"-DPython_EXECUTABLE={python}")
    tool("cmake", "-S", ROOT, "-B", place, "-DSKBUILD_SABI_VERSION=3.12", *where)
    return "configured"


def tests_of(sdist, place, folder):
    """Tests of the files that the sdist has, run in it."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    uv("pip", "install", "--python", place / "bin/python", *TEST_NEEDS)
    root = folder / sdist.name.removesuffix(".tar.gz")
    command = [place / "bin/python", "-m", "pytest", "-q", "-m", "not slow and not ptx", *OF_FILES]
    return run(*command, cwd=root).strip().splitlines()[-1]


def testbed(place):
    """Its wheel runs kernels where neither gradkit nor its own source is."""
    uv("venv", "--python", sys.executable, place)
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    source = shutil.copytree(ROOT / "testbed", place / "source", ignore=ignored)
    uv("pip", "install", "--python", place / "bin/python", source, "pytest")
    tests = (source / "tests").rename(place / "tests")
    command = [place / "bin/python", "-m", "pytest", "-qx", "-c", source / "pyproject.toml"]
    return run(*command, tests / "emulator/test_kernels.py", cwd=place).strip().splitlines()[-1]


def workflows():
    files = sorted((ROOT / ".github/workflows").glob("*.yml"))
    tool("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *files)
    tool(
        "check-jsonschema", "--builtin-schema", "vendor.dependabot", ROOT / ".github/dependabot.yml"
    )
    return f"{len(files)} and Dependabot's file"


def pyright():
    return tool("pyright", "--pythonpath", ROOT / ".venv/bin/python", cwd=ROOT).strip()


def repo_review():
    tool("sp-repo-review", ".", cwd=ROOT)
    return "passed, but for what pyproject.toml lists with a reason"


if __name__ == "__main__":
    main()
