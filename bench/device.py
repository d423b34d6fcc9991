"""What figures were taken on: the device, the driver, the versions, the native sources. Knows no figure."""

import importlib
import importlib.metadata
import pathlib
import platform
import subprocess
import sys

import jax

from bench.rivals import first_line, on_gpu


def describe() -> dict:
    """What the figures were taken on."""
    found = {"device": jax.devices()[0].device_kind, "host": platform.machine(), "python": platform.python_version()}
    if on_gpu():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            found["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
        except OSError as error:
            found["driver"] = first_line(error)
    else:
        info = pathlib.Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        names = [x.split(":")[1].strip() for x in lines if x.startswith("model name")]
        found["device"] = f"{names[0]}, {len(names)} threads" if names else platform.processor()
    for name, package in (
        ("jax", "jax"),
        ("jaxlib", "jaxlib"),
        ("torch", "torch"),
        ("tokamax", "tokamax"),
        ("dew_flash_attn", "dew_flash_attn_cu13"),
        ("fa4_jax", "fa4_jax"),
        ("jax_flash2", "jax_flash2"),
    ):
        if name in sys.modules:
            found[name] = getattr(sys.modules[name], "__version__", None) or _installed(package)
    native = f"jax_flash2.{'_cuda' if on_gpu() else '_cpu'}"
    try:
        found["source_digest"] = importlib.import_module(native).source_digest()
    except ImportError as error:
        found["source_digest"] = first_line(error)
    return found


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "?"
