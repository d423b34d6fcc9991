"""The compiled modules, with their handlers registered. Importing it touches no device and needs no GPU or driver."""

from importlib import import_module
from typing import Any

from jax import ffi

# What its kernels serve, and as what its instances() say it.
CUDA_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}

cpu: Any = import_module("jax_flash2._cpu")
cuda: Any = None  # where this install has no CUDA code
cuda_missing: str | None = None  # and why
try:
    cuda = import_module("jax_flash2._cuda")
except ModuleNotFoundError:
    cuda_missing = "was built without CUDA code"
except ImportError as error:
    cuda_missing = f"cannot load its CUDA code ({error})"

for _platform, _module in (("cpu", cpu), ("CUDA", cuda)):
    for _name, _handler in _module.registrations().items() if _module else ():
        ffi.register_ffi_target(_name, _handler, platform=_platform)
