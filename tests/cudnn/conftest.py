"""A compiler for stand-in libraries, and the cuDNN engine over host memory."""

import shutil
import subprocess

import pytest

from gradkit._cuda.cudnn import engines, library
from tests.cudnn import header
from tests.cudnn.fake import FakeCudnn


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """Compile a stand-in for a cuDNN library; the path of the file."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")

    def run(folder, *, file="libcudnn.so.9", **options):
        folder.mkdir(parents=True, exist_ok=True)
        text = tmp_path_factory.mktemp("source") / "fake.c"
        text.write_text(header.source(**options))
        command = [compiler, "-shared", "-fPIC", "-w", f"-Wl,-soname,{file}"]
        subprocess.run([*command, "-o", folder / file, text], check=True)
        return folder / file

    return run


@pytest.fixture
def install(monkeypatch):
    """Make a binding the process' cuDNN for one test."""
    monkeypatch.setattr(engines, "_warned", False)

    def put(bindings=None, **options):
        cudnn = library.Cudnn(bindings or FakeCudnn(**options))
        monkeypatch.setattr(library, "_library", cudnn)
        return cudnn

    return put
