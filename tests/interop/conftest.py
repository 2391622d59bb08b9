"""Every framework in turn, and processes of their own for what may abort."""

import os
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.pairs import rare

from .libraries import DTYPES, LIBRARIES, REQUIRED, Library, framework

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ |= {
    # What inductor compiled for an older operator of the same name would be run again.
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    # Takes longer than it saves. Not by `monkeypatch`: what it restores, PyTorch takes for deleted.
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
}
# On a GPU XLA would take three quarters of its memory, for each of many processes.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

HERE = Path(__file__).parent

# Third-party warnings that say nothing of gradkit.
_QUIET = (
    "ignore::DeprecationWarning:(tensorflow|keras|google|jax|optax|thinc|torch|spacy|astunparse)",
    "ignore::FutureWarning:(tensorflow|keras|jax|torch|thinc)",
    "ignore:.*__array__ implementation doesn't accept a copy keyword:DeprecationWarning",
    "ignore:.*TypedStorage is deprecated:UserWarning",
    "ignore:.*np.object.*:FutureWarning",
)

# Without any of the big frameworks, these would be hundreds of skipped tests.
NEEDY = ["test_immutable.py", "test_torch.py"]
collect_ignore = [] if REQUIRED or any(map(find_spec, ("torch", "jax", "tensorflow"))) else NEEDY
# These import theirs at the top.
_OWN = (
    *(
        ("torch", "test_dynamo.py"),
        ("torch", "test_gated_norm.py"),
        ("torch", "test_gradkit_torch*.py"),
        ("torch", "test_lists_of_tensors.py"),
        ("torch", "test_shards.py"),
        ("torch", "test_torch_storage.py"),
        ("torch", "torch_norms.py"),
    ),
    ("jax", "test_gradkit_jax*.py"),
    ("jax", "test_updates.py"),  # beside optax's and PyTorch's
)
collect_ignore_glob = [pattern for name, pattern in _OWN if not (REQUIRED or find_spec(name))]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of a file that run in one way come after each other: JAX keeps what it compiled."""
    files = {path: k for k, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (files[item.path], WAYS.index(_way_of(item))))
    own = {path for path in files if HERE in path.parents}
    for item in items:
        if item.path in own:
            item.add_marker(pytest.mark.interop)
            for rule in _QUIET:
                item.add_marker(pytest.mark.filterwarnings(rule))
    every = [item for item in items if item.path in own]
    others = {*_other_ways(every)}
    for item in (*others, *rare([item for item in every if item not in others], "interop")):
        item.add_marker("rare")


def _other_ways(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield all but one of the ways in Python of each set of a test's other parameters."""
    sets: dict[str, dict[object, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if hasattr(item, "callspec") and item.callspec.params.get("way") in WAYS[1:]:
            others = tuple(id(v) for name, v in item.callspec.params.items() if name != "way")
            sets[item.nodeid.partition("[")[0]][others].append(item)
    for own in sets.values():
        for number, found in enumerate(own.values()):
            if len(own) > 1:
                yield from (each for k, each in enumerate(found) if k != number % len(found))


@pytest.fixture(params=list(LIBRARIES))
def lib(request: pytest.FixtureRequest) -> Library:
    """Each framework in turn."""
    return LIBRARIES[request.param]()


@pytest.fixture(params=[(name, dtype) for name in LIBRARIES for dtype in DTYPES[name]])
def typed(request: pytest.FixtureRequest) -> tuple[Library, str]:
    """Each framework with each of the dtypes that it holds."""
    name, dtype = request.param
    return LIBRARIES[name](), dtype


@pytest.fixture(params=["torch", "array-api-strict"])
def mutable(request: pytest.FixtureRequest) -> Library:
    """Each framework whose arrays may be written in place."""
    return LIBRARIES[request.param]()


@pytest.fixture(params=["jax", "tensorflow"])
def immutable(request: pytest.FixtureRequest) -> Library:
    """Each framework whose arrays may not."""
    return LIBRARIES[request.param]()


@pytest.fixture
def torch() -> Any:
    return framework("torch")


@pytest.fixture
def jax() -> Any:
    return framework("jax")


@pytest.fixture
def tf() -> Any:
    return framework("tensorflow")


WAYS = "compiled", "buffers", "copies"
_kept = [WAYS[0]]  # the way of the programs that JAX has compiled and keeps


def _way_of(item: pytest.Item) -> str:
    """Way that the test's calls in ``jax.jit`` run."""
    own = item.callspec.params.get("way") if hasattr(item, "callspec") else None
    python = "in_python" in getattr(item, "fixturenames", ())
    return own if own in WAYS else WAYS[1] if python else WAYS[0]


@pytest.fixture(autouse=True)
def _keeps_no_programs_of_another_way(request: pytest.FixtureRequest) -> None:
    if _kept[0] != _way_of(request.node):
        import jax

        jax.clear_caches()
        _kept[0] = _way_of(request.node)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Calls in ``jax.jit``: XLA's own, those in Python on its buffers, and those of JAX 0.6.0."""
    from gradkit.jax import _callbacks, _compiled

    assert _compiled._is_registered
    assert _callbacks.buffer_callback is not None
    monkeypatch.setattr(_compiled, "_is_registered", request.param == "compiled")
    if request.param == "copies":
        monkeypatch.setattr(_callbacks, "buffer_callback", None)
    return request.param


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls in ``jax.jit`` all run Python."""
    from gradkit.jax import _compiled

    monkeypatch.setattr(_compiled, "_is_registered", False)


@pytest.fixture(params=["Auto", "Explicit"])
def mesh(request: pytest.FixtureRequest) -> Any:
    """The two devices that XLA is asked for above; types say how arrays are spread, or do not."""
    import jax

    kind = jax.sharding.AxisType[request.param]
    return jax.make_mesh((2,), ("d",), axis_types=(kind,))


@pytest.fixture(params=[True, False], ids=["checked", "unchecked"])
def over(request: pytest.FixtureRequest, mesh: Any) -> Any:
    """``shard_map`` with and without the types that say what differs between devices."""
    import jax

    def spread(spec: Any, own: Any) -> Any:
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.tree.map(lambda array: jax.sharding.reshard(array, sharding), own)

    def mapped(function: Any, in_specs: Any, out_specs: Any) -> Any:
        specs = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": request.param}
        over_devices = jax.shard_map(function, mesh=mesh, **specs)

        @jax.jit
        def on_mesh(*given: Any) -> Any:
            # Arguments whose types differ from `in_specs` are refused.
            if jax.sharding.AxisType.Explicit in mesh.axis_types:
                given = jax.tree.map(spread, in_specs, given)
            return over_devices(*given)

        return on_mesh

    mapped.checked, mapped.mesh = request.param, mesh  # type: ignore[attr-defined]
    return mapped


@pytest.fixture
def x64() -> Iterator[None]:
    """JAX with arrays of 64 bits."""
    with framework("jax").enable_x64(True):
        yield


@pytest.fixture
def run_alone() -> Callable[[str], str]:
    """Run a program in a process of its own: what it prints; a failed assertion for an abort."""

    def run(program: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | environment,
            check=False,
        )
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr[-3000:]}"
        return done.stdout

    return run


@pytest.fixture
def compilations():
    """Return a list to which each compilation of XLA adds an item."""
    import jax

    seen = []

    def listener(event, *_, **__):
        if event.endswith("backend_compile_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listener)
