"""The README's example runs, and shows what it says that it shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def test_readme(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names, shown = {}, ""
    for kind, text in BLOCKS:
        if kind == "cpp":
            Path("centre.cu").write_text(text)
        elif kind == "python":
            exec(text, names)
            shown = capsys.readouterr().out
        elif kind == "console":
            command, _, expected = text.partition("\n")
            words = command.removeprefix("$ python ").split()
            environment = {**os.environ, "PYTHONPATH": str(README.parents[1])}
            printed = subprocess.check_output([sys.executable, *words], env=environment, text=True)
            assert printed.startswith(expected)
        else:
            assert text == shown
    assert [kind for kind, _ in BLOCKS].count("text") == 4


@pytest.mark.parametrize(("part", "count"), [("emulator", 200), ("ptx", 128)])
def test_the_code_of_a_part(part, count):
    """That of the driver, which needs CuPy, is run by gradkit's tests of GPUs."""
    text = (README.parent / part / "README.md").read_text()
    (code,) = re.findall(r"(?sm)^```python\n(.*?)^```", text)
    names = {}
    exec(code, names)
    assert names["out"].tolist() == [2] * count


def test_readme_has_every_variable():
    sources = [path for path in README.parent.rglob("*.py") if "tests" not in path.parts]
    read = {name for path in sources for name in re.findall(r"\bGRADKIT_\w+", path.read_text())}
    assert read == set(re.findall(r"^\| `(GRADKIT_\w+)` \|", README.read_text(), re.MULTILINE))
