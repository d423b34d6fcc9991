"""Starts the bench: settles what must be settled before jax is imported, then hands over to run.py.

The tree's own jax_flash2 folder holds no compiled modules, so an installed package goes before it.
"""

import importlib.machinery
import os
import pathlib
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs a share of the memory

TREE = pathlib.Path(__file__).resolve().parent.parent
elsewhere = [p for p in sys.path if pathlib.Path(p).resolve() != TREE]
if importlib.machinery.PathFinder.find_spec("jax_flash2", elsewhere) is not None:
    sys.path[:] = elsewhere

from bench import supervise  # noqa: E402

status = supervise.main(sys.argv[1:])
if status is not None:
    sys.exit(status)

from bench import run  # noqa: E402

run.start()
