"""What this install serves, as plain data: what was compiled, and what each device here would use. Runs no kernel."""

from importlib.metadata import version
from typing import Any

import jax

from jax_flash2 import _native


def capabilities() -> dict[str, Any]:
    """What was compiled into this install and what the devices of this machine would use; JSON-ready.

    Returns:
      A dict with `jax_flash2`, `jax` (versions), `platforms` (of which kernels exist here), `cpu` and `cuda`, each
        `source_digest`: sha256 of the C++ and CUDA sources it was built from;
        `dtypes`: those it serves;
      and for `cuda`, which is None where `platforms` lacks it, also
        `head_dims`: of the kernels' queries and keys; other head dims up to the largest run on the next wider one;
        `instances`: (architecture, pass, dtype, head dim of queries and keys, of values) of every kernel;
        `devices`: name, compute capability and the architecture whose kernels would run in 16 bits ("fma" is that of
          float32 and float64 on every device); [] without a GPU or driver;
      `cuda_missing` says why it is None, and is None otherwise.
    """
    cuda, missing = None, None
    if _native.cuda is None:
        missing = f"this install of jax_flash2 {_native.cuda_missing}"
    else:
        names = {short: name for name, short in _native.CUDA_DTYPES.items()}
        instances = [tuple(row) for row in _native.cuda.instances()]
        cuda = {
            "source_digest": _native.cuda.source_digest(),
            "dtypes": sorted({names[dtype] for _, _, dtype, *_ in instances}),
            "head_dims": sorted({head_dim for *_, head_dim, _ in instances}),
            "instances": instances,
            "devices": list(_native.cuda.devices()),
        }
    return {
        "jax_flash2": version("jax_flash2"),
        "jax": jax.__version__,
        "platforms": ["cpu"] if cuda is None else ["cpu", "cuda"],
        "cpu": {"source_digest": _native.cpu.source_digest(), "dtypes": ["bfloat16", "float16", "float32", "float64"]},
        "cuda": cuda,
        "cuda_missing": missing,
    }
