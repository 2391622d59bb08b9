"""The public face: names, signatures, documentation, and one backend function for each."""

import importlib
import inspect
import pydoc
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import gradkit
from gradkit import _config
from gradkit._arrays import cuda
from gradkit._calls.backend import operations_of
from tests.operations import OPERATIONS

# What every release keeps: further parameters may follow, keyword-only and with a default.
SIGNATURES = [
    *(operation.signature for operation in OPERATIONS.values()),
    "spike_guard_init(like=None)",
    'SpikeGuard(*, decay=0.97, threshold=2.5, warmup=25, on_spike="clip")',
    "GradStat(norm, max, mean, zeros, nonfinite)",
    "GradStats(names, table)",
    'grads_of(parameters, *, attr="grad")',
    'named_grads_of(named_parameters, *, attr="grad")',
    "names_of(grads)",
    "warmup(arrays, *operations)",
    "get_num_threads()",
    "set_num_threads(count)",
    "last_engine()",
    'show_config(mode="stdout")',
    "use_cpu_backend(name)",
]
NAMES = [line.partition("(")[0] for line in SIGNATURES]
FUNCTIONS = [name for name in gradkit.__all__ if inspect.isfunction(getattr(gradkit, name))]
RESULTS = ["GradStat", "GradStats"]
CLASSES = ["SpikeGuard", *RESULTS]
MODULES = (
    "_config",
    "_warmup",
    "accumulation",
    "batch_normalization",
    "clipping",
    "distributed",
    "errors",
    "gradients",
    "group_normalization",
    "layer_normalization",
    "rms_normalization",
    "spikes",
    "statistics",
    "steps",
)
SECTIONS = {  # and who needs none
    "Parameters": {"get_num_threads", "last_engine", *RESULTS},
    "Returns": {"set_num_threads", *CLASSES},
    "Raises": {"clip_by_global_norm", "get_num_threads", "last_engine", *RESULTS},
    "Examples": set(),
}


def plain(parameters):
    """(name, kind, default) of each parameter, without annotations."""
    return [(p.name, p.kind, p.default) for p in parameters]


@pytest.mark.parametrize("line", SIGNATURES, ids=NAMES)
def test_signature(line):
    namespace = {}
    exec(f"def {line}: pass", namespace)
    name = line.partition("(")[0]
    promised = plain(inspect.signature(namespace[name]).parameters.values())
    found = plain(inspect.signature(getattr(gradkit, name)).parameters.values())
    extra = found[len(promised) :]
    known = {name for name, *_ in promised}
    assert [p for p in found if p[0] in known] == promised
    for _, kind, default in [p for p in found if p[0] not in known]:
        assert kind is inspect.Parameter.KEYWORD_ONLY
        assert default is not inspect.Parameter.empty
    assert len(extra) == len(found) - len(promised)


def test_every_function_has_a_signature_and_a_row_if_it_computes():
    assert sorted(NAMES) == sorted([*FUNCTIONS, *CLASSES])
    assert {name for name in FUNCTIONS if operations_of(name)} == OPERATIONS.keys()


RECORDED = [name for name, operation in OPERATIONS.items() if operation.record]


@pytest.mark.parametrize("name", RECORDED)
def test_rows_are_as_records_say(name):
    operation, record = OPERATIONS[name], OPERATIONS[name].record
    positional = record.array_names[: len(operation.arrays)]
    assert operation.arrays == positional
    assert operation.optional == tuple(name for name in positional if name in record.optional)
    further = {name for variant in operation.variants.values() for name in variant}
    assert {one.name for one in record.arguments} - {*operation.arrays} <= further


def test_all():
    assert len(set(gradkit.__all__)) == len(gradkit.__all__)
    public = {
        n for n, v in vars(gradkit).items() if not n.startswith("_") and not inspect.ismodule(v)
    }
    assert public == set(gradkit.__all__)
    for module in MODULES:
        found = importlib.import_module(f"gradkit.{module}")
        for name in found.__all__:
            inside = isinstance(getattr(found, name), type) or module == "distributed"
            where = f"gradkit.{module}" if inside else "gradkit"
            assert getattr(found, name).__module__ == where


@pytest.mark.parametrize("name", FUNCTIONS + CLASSES)
def test_documentation(name):
    """Everything public says what it takes, gives and raises, and shows it at work."""
    function = getattr(gradkit, name)
    text = inspect.getdoc(function)
    for section, spared in SECTIONS.items():
        if name not in spared:
            assert f"\n{section}\n{'-' * len(section)}\n" in text, section
    assert ">>> " in text
    documented = text.split("Returns\n---")[0]
    for parameter in inspect.signature(getattr(gradkit, name)).parameters:
        assert parameter in documented, parameter
    if name not in ("grads_of", "last_engine") and name not in gradkit._config.__all__:
        assert any(word in text for word in ("shape", "array")), "no shapes"


MOST_USED = (
    *("clip_grad_norm", "clip_by_global_norm", "grad_norm", "accumulate_grads", "zero_grad"),
    *("layer_norm", "layer_norm_grad", "rms_norm", "rms_norm_grad", "batch_norm"),
)


@pytest.mark.parametrize("name", MOST_USED)
def test_help_begins_with_a_signature_that_can_be_read(name):
    """Its first sentence begins within 400 characters, wherever Python breaks its lines."""
    function = getattr(gradkit, name)
    text = pydoc.render_doc(function, "Help on %s:", renderer=pydoc.plaintext)  # as help() does
    before = " ".join(text.partition(inspect.getdoc(function).split("\n")[0])[0].split())
    assert 20 < len(before) <= 400
    assert before.startswith(f"Help on function {name} in module gradkit:")
    assert not re.search(r"[~<]|[A-Za-z]\.|Any|Union|Literal", before)


def test_what_a_newcomer_sees_first_are_functions():
    """In the module's own help, and by the Tab key."""
    assert {*NAMES} - {"GradStat", "GradStats"} <= {*re.findall(r"\w+", gradkit.__doc__)}
    apart = {name for name in ("jax", "torch") if name in vars(gradkit)}
    assert {*dir(gradkit)} - apart == {*gradkit.__all__, "__version__", "distributed"}


@pytest.mark.parametrize("name", [n for n in gradkit.__all__ if n not in FUNCTIONS + CLASSES])
def test_errors_are_documented_and_caught_together(name):
    error = getattr(gradkit, name)
    assert inspect.getdoc(error)
    assert issubclass(error, gradkit.GradkitError)


def test_nonfinite_norm_error_travels_between_processes():
    import pickle

    error = gradkit.NonFiniteNormError(float("inf"), tuple(f"grads[{k}]" for k in range(10)))
    again = pickle.loads(pickle.dumps(error))
    assert (again.norm, again.names, str(again)) == (error.norm, error.names, str(error))
    assert "and 2 more" in str(error)


def test_show_config_says_which_gpus_there_are(monkeypatch):
    def refused():
        raise RuntimeError("no driver")

    monkeypatch.setitem(sys.modules, "cupy", None)
    assert _config._cuda()["available"] is False
    runtime = SimpleNamespace(
        getDeviceCount=lambda: 2, getDeviceProperties=lambda k: {"name": b"GPU %d" % k}
    )
    fake = SimpleNamespace(__version__="14.0", cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    assert _config._cuda() == {"available": True, "cupy": "14.0", "devices": ["GPU 0", "GPU 1"]}
    runtime.getDeviceCount = refused
    assert _config._cuda() == {"available": False, "cupy": "14.0", "reason": "no driver"}


def test_without_a_folder_for_its_cache_cupy_is_not_imported(monkeypatch, tmp_path):
    (tmp_path / "cupy.py").write_text("raise PermissionError(13, 'Permission denied', '/home')")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    said = "CuPy cannot be imported: [Errno 13] Permission denied: '/home'. Set CUPY_CACHE_DIR"
    assert _config._cuda()["reason"].startswith(said)
    with pytest.raises(gradkit.BackendUnavailableError, match=re.escape(said)):
        cuda.cupy()


def test_show_config(capsys):
    found = gradkit.show_config(mode="dicts")
    assert found["versions"]["gradkit"] == gradkit.__version__
    assert found["versions"]["numpy"] == np.__version__
    assert found["backends"]["numpy"]["available"] is True
    assert capsys.readouterr().out == ""
    assert gradkit.show_config() is None
    printed = capsys.readouterr().out
    for section, entries in found.items():
        assert f"{section}:\n" in printed
        for name, value in entries.items():
            assert f"  {name}: {value}\n" in printed
    with pytest.raises(ValueError, match="mode must be 'stdout' or 'dicts', not 'json'"):
        gradkit.show_config("json")


def test_no_assertion_is_lost_without_debugging():
    """``python -O`` changes nothing: errors are raised, not asserted."""
    code = (
        "import numpy as np, gradkit\n"
        "try: gradkit.clip_grad_norm(np.ones(3), -1.0)\n"
        "except ValueError as error: print(error)\n"
    )
    command = [sys.executable, "-O", "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == "max_norm must be at least 0, not -1.0\n"
