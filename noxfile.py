"""The phases of .ci/run, one by one, for development: `nox -l` lists them, `nox -s tests-3.12` runs one.

A session builds the package in an environment of its own, so each Python and jax is tested as a user installs it.
"""

import pathlib
import tomllib

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "laws", "tests"]

EXTRAS = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
STRICT = "JAX_FLASH2_STRICT=ON"
FEW = ["tests/test_forward.py", "tests/test_backward.py", "tests/test_transforms.py", "-k", "cpu and float32"]


def tools(*names: str) -> list[str]:
    """The pinned requirements of pyproject's `dev` extra."""
    return [requirement for requirement in EXTRAS["dev"] if requirement.startswith(names)]


@nox.session
def lint(session: nox.Session) -> None:
    """Linters, formatters and the type checker."""
    session.install("jax>=0.7", "numpy", *tools("ruff", "mypy", "clang-format"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    sources = session.run("git", "ls-files", "*.h", "*.cc", "*.cu", "*.cuh", "*.inl", external=True, silent=True)
    session.run("clang-format", "--dry-run", "--Werror", *sources.split())
    session.run("mypy")


@nox.session
def laws(session: nox.Session) -> None:
    """The C++ proof of src/core, by each compiler that is here."""
    session.install("pytest")
    session.run("pytest", "--noconftest", "tests/test_cpp.py", *session.posargs)


@nox.session(python=["3.11", "3.12", "3.13"])
def tests(session: nox.Session) -> None:
    """The whole suite on the newest jax of this Python."""
    session.install(".[test]", env={"SKBUILD_CMAKE_DEFINE": STRICT})
    session.run("pytest", *session.posargs)


@nox.session(python="3.11")
@nox.parametrize("jax", ["0.7.2", "0.9.2"])
def older_jax(session: nox.Session, jax: str) -> None:
    """A part of the suite on older releases of jax, with the binary that serves all."""
    session.install(".", f"jax=={jax}", f"jaxlib=={jax}", "pytest", "hypothesis")
    session.run("pytest", *FEW, *session.posargs)


@nox.session
def cuda(session: nox.Session) -> None:
    """Compiles all CUDA code with the nvcc of the wheels, and prints registers, spills and compile times."""
    build = session.create_tmp() + "/build"
    defines = f"{STRICT};JAX_FLASH2_CUDA=ON"
    env = {"JAX_FLASH2_FETCH_NVCC": "1", "SKBUILD_BUILD_DIR": build, "SKBUILD_CMAKE_DEFINE": defines}
    session.install("-v", "--no-deps", ".", env=env)
    session.run("python", "cmake/nvcc_checked.py", "--report", build)
