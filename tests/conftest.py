"""How every test runs: which backends there are, eight host devices, strict promotion, and the record of a GPU run."""

import os
import pathlib
import sys

if "XLA_FLAGS" not in os.environ:  # before JAX is imported
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPU may be shared

import evaluate
import jax
import jax.experimental
import numpy as np
import pytest
import record

if not hasattr(jax, "enable_x64"):  # jax < 0.8
    jax.enable_x64 = jax.experimental.enable_x64


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-gpu-run",
        metavar="PATH",
        type=pathlib.Path,
        help="append device, counts, failures and native source digest to this JSON list; needs a GPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "large: needs a GPU, and up to 40 GiB of its memory")
    if config.getoption("--record-gpu-run") and "cuda" not in evaluate.BACKENDS:
        raise pytest.UsageError("--record-gpu-run: JAX finds no GPU here")
    if config.getoption("--record-gpu-run") and (lacking := record.lacking()):
        raise pytest.UsageError(f"--record-gpu-run: this build lacks the kernels of {', '.join(lacking)}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`backend` alone, or `backend` and `dtype` together: every pair."""
    if "dtype" in metafunc.fixturenames and "backend" in metafunc.fixturenames:
        pairs = [(backend, dtype) for backend in evaluate.BACKENDS for dtype in evaluate.DTYPES]
        metafunc.parametrize(("backend", "dtype"), pairs, ids=["-".join(pair) for pair in pairs])
    elif "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", evaluate.BACKENDS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The record of a GPU run is of what needs it: tests of the CPU backend pass or fail on any machine."""
    if config.getoption("--record-gpu-run") is None:
        return
    of_cpu = [item for item in items if _backend(item) == "cpu"]
    config.hook.pytest_deselected(items=of_cpu)
    items[:] = [item for item in items if _backend(item) != "cpu"]
    items.sort(key=lambda item: _backend(item) != "cuda")  # should it be cut short, the kernels were tried


def _backend(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("backend") if callspec else None


@pytest.fixture
def device(backend: str) -> jax.Device:
    return jax.devices(backend)[0]


@pytest.fixture
def on_cpu():
    """What a test does not place itself is on the CPU, where there is a GPU too."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on the test's name only."""
    return np.random.default_rng(list(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def _strict_promotion(request: pytest.FixtureRequest):
    with jax.numpy_dtype_promotion("strict"):
        yield


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    path = session.config.getoption("--record-gpu-run")
    if path is None or hasattr(session.config, "workerinput"):  # one process of several does not know all counts
        return
    if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print(f"\n{path} is left as it is: the run did not reach its end", file=sys.stderr)
        return
    stats = session.config.pluginmanager.get_plugin("terminalreporter").stats
    ended = {name: [x.nodeid for x in stats.get(name, [])] for name in ("passed", "failed", "error", "skipped")}
    record.append(path, ended, whole=_asked_for_everything(session.config))


def _asked_for_everything(config: pytest.Config) -> bool:
    chosen = config.args_source is pytest.Config.ArgsSource.ARGS
    return not (chosen or any(getattr(config.option, x, None) for x in ("keyword", "markexpr", "lf", "deselect")))
