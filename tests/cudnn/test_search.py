"""The search for the library: absent, damaged, old and foreign ones."""

import json
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

from gradkit._cuda.cudnn import library, search

ROOT = Path(__file__).resolve().parents[2]
# Before anything else, so that no cuDNN of this machine is found: only the folder in the place
# of Python's own package folders, as a fresh installation would have it.
ONLY = """
    import json, sys, time, types
    from gradkit._cuda.cudnn import library, search
    from gradkit.errors import BackendUnavailableError
    folder = {folder!r}
    search.sysconfig.get_path = lambda name: folder
    search.site.ENABLE_USER_SITE = False
    search._pathfinder = lambda soname: None
    search._system = lambda soname: None
    try:
        bindings = library.cudnn().bindings
        found = [bindings.getVersion(), bindings.path, bindings.name]
    except BackendUnavailableError as error:
        found = str(error)
    print(json.dumps(found))
"""


def _run(script, cwd, **env):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _found(folder, cwd=None):
    return _run(ONLY.format(folder=str(folder)), cwd or folder)


def _lib(folder):
    return folder / "nvidia" / "cudnn" / "lib"


def test_a_packaged_library(build, tmp_path):
    path = build(_lib(tmp_path), version=92800)
    assert _found(tmp_path) == [92800, str(path), "ctypes"]


@pytest.mark.guarantee("cuDNN absent")
def test_none(tmp_path):
    answer = _found(tmp_path)
    assert "libcudnn.so.9 is not installed" in answer
    assert "pip install 'nvidia-cudnn-cu12>=9,<10'" in answer


@pytest.mark.guarantee("cuDNN truncated, or not a library")
@pytest.mark.sampled(9)
@pytest.mark.parametrize("length", [0, 20, 100, 1000, 5000])
@pytest.mark.parametrize("part", ["libcudnn.so.9", "libcudnn_ops.so.9"])
def test_truncated(build, tmp_path, length, part):
    build(_lib(tmp_path), version=92800)
    path = build(_lib(tmp_path), version=92800, file=part)
    path.write_bytes(path.read_bytes()[:length])
    answer = _found(tmp_path)
    assert f"{path} is damaged" in answer
    assert "pip install" in answer


@pytest.mark.guarantee("cuDNN truncated, or not a library")
def test_no_library_at_all_inside(tmp_path):
    _lib(tmp_path).mkdir(parents=True)
    (_lib(tmp_path) / "libcudnn.so.9").write_text("not a library")
    assert "does not load" in _found(tmp_path)


@pytest.mark.guarantee("cuDNN of another version")
def test_old(build, tmp_path):
    path = build(_lib(tmp_path), version=8907)
    assert f"{path} is cuDNN 8907; gradkit needs cuDNN 9" in _found(tmp_path)


@pytest.mark.guarantee("cuDNN of another version")
def test_newer_than_what_we_know(build, tmp_path):
    path = build(_lib(tmp_path), version=100000)
    assert f"{path} is cuDNN 100000; gradkit needs cuDNN 9" in _found(tmp_path)


def test_a_version_8_alone_is_no_use_without_cupys_binding(build, tmp_path):
    build(_lib(tmp_path), version=8907, file="libcudnn.so.8")
    assert "libcudnn.so.9 is not installed" in _found(tmp_path)


def test_a_function_is_missing(build, tmp_path):
    build(_lib(tmp_path), version=92800, without=("cudnnBatchNormalizationBackward",))
    answer = _found(tmp_path)
    assert "lacks a function of cuDNN 9" in answer
    assert "cudnnBatchNormalizationBackward" in answer


def test_the_working_directory_is_no_place(build, tmp_path):
    """Not as it is, and not as an entry of sys.path or of LD_LIBRARY_PATH."""
    build(tmp_path, version=92800)
    build(_lib(tmp_path), version=92800)
    (tmp_path / "elsewhere").mkdir()
    script = ONLY.format(folder=str(tmp_path / "elsewhere")).replace(
        "    search._system = lambda soname: None\n", ""
    )
    for named in ("", ":/nowhere", "/nowhere:", "."):
        assert "is not installed" in _run(script, tmp_path, LD_LIBRARY_PATH=named)


def test_an_absolute_entry_of_ld_library_path_is_the_users_word(build, tmp_path):
    path = build(tmp_path / "libs", version=92800)
    (tmp_path / "elsewhere").mkdir()
    script = ONLY.format(folder=str(tmp_path / "elsewhere")).replace(
        "    search._system = lambda soname: None\n", ""
    )
    assert _run(script, tmp_path, LD_LIBRARY_PATH=str(path.parent)) == [92800, str(path), "ctypes"]


@pytest.mark.parametrize(
    ("named", "safe"),
    [("", True), ("/a", True), ("/a:/b", True), ("/a:", False), (":", False), ("a:/b", False)],
)
def test_loader_path(monkeypatch, named, safe):
    monkeypatch.setenv("LD_LIBRARY_PATH", named)
    assert search._loader_is_safe() == safe
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert search._loader_is_safe()


@pytest.mark.parametrize("root", search._ROOTS)
def test_no_root_in_the_working_directory(monkeypatch, root):
    """cuda-pathfinder takes roots from the environment, and loads what it finds there."""
    found = types.SimpleNamespace(abs_path="/opt/libcudnn.so.9")
    pathfinder = types.SimpleNamespace(load_nvidia_dynamic_lib=lambda _: found)
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder)
    for name in (*search._ROOTS, "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    for value, answer in (("", found.abs_path), ("/opt", found.abs_path), ("opt", None)):
        monkeypatch.setenv(root, value)
        assert search._pathfinder("libcudnn.so.9") == answer


def test_a_relative_folder_of_packages_is_no_place(build, tmp_path, monkeypatch):
    build(_lib(tmp_path), version=92800)
    monkeypatch.chdir(tmp_path)
    for folder, found in ((tmp_path, True), (Path(), False)):
        monkeypatch.setattr(search, "_package_folders", lambda folder=folder: [folder])
        assert (search._packaged("libcudnn.so.9") is not None) == found


def test_what_is_loaded_already_is_used(build, tmp_path):
    loaded = build(tmp_path / "a", version=92700)
    packaged = build(_lib(tmp_path / "b"), version=92800)
    script = ONLY.format(folder=str(tmp_path / "b"))
    assert _run(script, tmp_path) == [92800, str(packaged), "ctypes"]
    script = f"import ctypes; ctypes.CDLL({str(loaded)!r})\n" + textwrap.dedent(script)
    assert _run(script, tmp_path) == [92700, str(loaded), "ctypes"]


def test_the_next_place_is_tried_after_a_damaged_file(build, tmp_path):
    name = "librecorder.so"  # not cuDNN's: this process must not have that one
    good = build(tmp_path / "good", version=92800, file=name)
    bad = tmp_path / name
    bad.write_text("not a library")
    places = [("a", lambda soname: None), ("b", lambda soname: str(bad))]
    with pytest.raises(search.UnusableError, match=r"\(b\) does not load"):
        search.open_first(name, places)
    places.append(("c", lambda soname: str(good)))
    assert search.open_first(name, places)[1] == str(good)


def test_threads_that_ask_at_once_load_once(build, tmp_path):
    build(_lib(tmp_path), version=92800)
    script = ONLY.format(folder=str(tmp_path)).replace(
        "print(json.dumps(found))",
        """library._library, real, calls = None, library._find, []
    library._find = lambda: calls.append(1) or time.sleep(0.1) or real()
    import concurrent.futures as futures
    with futures.ThreadPoolExecutor(8) as pool:
        all_ = list(pool.map(lambda _: id(library.cudnn()), range(64)))
    print(json.dumps([len(calls), len(set(all_))]))""",
    )
    assert _run(script, tmp_path) == [1, 1]


def test_show_config_names_the_library(build, tmp_path):
    path = build(_lib(tmp_path), version=92800)
    script = ONLY.format(folder=str(tmp_path)).replace(
        "print(json.dumps(found))",
        """import gradkit
    sys.modules["cupy"] = None  # as where it is not installed
    before = gradkit.show_config("dicts")["backends"]["cudnn"]
    cupy = types.ModuleType("cupy")
    cupy.__version__, cupy.__spec__ = "14.2.0", sys.__spec__
    cupy.__file__ = None
    sys.modules["cupy"] = cupy
    after = gradkit.show_config("dicts")["backends"]["cudnn"]
    print(json.dumps([before["loaded"], after]))""",
    )
    loaded = {"loaded": True, "version": "9.28.0", "binding": "ctypes", "path": str(path)}
    assert _run(script, tmp_path) == [False, loaded]


def test_import_gradkit_loads_none_of_this(tmp_path):
    script = """
        import json, sys, gradkit
        print(json.dumps([name for name in sys.modules if "cudnn" in name or "_cuda" in name]))
    """
    assert _run(script, tmp_path) == []


def test_what_is_loaded_is_described(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    bindings = types.SimpleNamespace(getVersion=lambda: 92800, name="ctypes", path="libcudnn.so.9")
    monkeypatch.setattr(library, "cudnn", lambda: types.SimpleNamespace(bindings=bindings))
    known = {"version": "9.28.0", "binding": "ctypes", "path": "libcudnn.so.9"}
    assert library.describe() == {"loaded": True} | known
