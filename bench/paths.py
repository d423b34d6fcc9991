"""What every program of this folder settles before jax is imported.

The tree's own jax_flash2 folder holds no compiled modules, so an installed package goes before it; and torch needs a
share of the GPU's memory.
"""

import importlib.machinery
import os
import pathlib
import sys

TREE = pathlib.Path(__file__).resolve().parent.parent


def settle() -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    elsewhere = [p for p in sys.path if pathlib.Path(p).resolve() != TREE]
    if importlib.machinery.PathFinder.find_spec("jax_flash2", elsewhere) is not None:
        sys.path[:] = elsewhere
