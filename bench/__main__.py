"""Starts the bench: in a process of its own where there is a file to go on from (supervise.py), else in this one."""

import sys

from bench import paths, supervise

paths.settle()
status = supervise.main(sys.argv[1:])
if status is not None:
    sys.exit(status)

from bench import run  # noqa: E402

run.start()
