"""Exact attention for JAX as fast as the chip allows: FlashAttention-2 kernels for CUDA and CPU."""

from importlib.metadata import version as _version

from jax_flash2 import reference
from jax_flash2._api import attention, dot_product_attention
from jax_flash2._capabilities import capabilities
from jax_flash2._checkpoint import CHECKPOINT_NAME, checkpoint_policy
from jax_flash2._ffi import export_checks
from jax_flash2._forward_mode import attention_jvp
from jax_flash2._varlen import varlen_attention

__version__ = _version("jax_flash2")

__all__ = [
    "CHECKPOINT_NAME",
    "attention",
    "attention_jvp",
    "capabilities",
    "checkpoint_policy",
    "dot_product_attention",
    "export_checks",
    "reference",
    "varlen_attention",
]
