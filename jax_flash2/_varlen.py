"""varlen_attention: sequences of any lengths, one behind the other in arrays without padding.

To a kernel the pack is one long sequence whose mask is given row by row. Knows the public keywords; must not know how
that mask is made (that is _packing) nor how a call runs (that is _api).
"""

from typing import Any

import jax
import numpy as np
from jax import export
from jax.typing import ArrayLike

from jax_flash2 import _checks
from jax_flash2._api import attend
from jax_flash2._spec import MAX_LENGTH


def varlen_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    causal_alignment: str | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    deterministic: bool = False,
    return_residual: bool = False,
    implementation: str | None = None,
) -> Any:
    """`attention` for each of B sequences that are packed one behind the other, without padding between them.

    The interface is FlashAttention's (flash_attn_varlen_func, https://github.com/Dao-AILab/flash-attention). Sequence b
    has the queries [cu_seqlens_q[b], cu_seqlens_q[b + 1]) and the keys [cu_seqlens_k[b], cu_seqlens_k[b + 1]), of which
    the first seqused_q[b] and seqused_k[b] are used. Each query reads keys of its own sequence only, with the mask that
    `attention` would have for that sequence alone. A sequence may have no queries, no keys or neither.

    A row in no sequence, or behind the used part of one, takes no part: it may hold NaN, out is 0, lse is -inf (also
    with sinks), and so is every gradient 0. Such rows are those before the first start, behind the last end, and what
    seqused leaves out.

    Args:
      query: [total_q, N, D]; bfloat16, float16, float32 or float64. 1 <= D, Dv <= 256.
      key: [total_k, K, D], of query's dtype; N must be a multiple of K.
      value: [total_k, K, Dv], of query's dtype.
      cu_seqlens_q: integers [B + 1], the start of each sequence and the end of the last; may be traced, and one program
        serves all contents. Wrong numbers give wrong results and nothing worse: they are clamped to [0, total_q], and
        one below those before it counts as the largest of those. No gradient.
      cu_seqlens_k: integers [B + 1], likewise for keys. Where it is cu_seqlens_q, the same object, sequences have as
        many keys as queries, and both totals clamp.
      max_seqlen_q: FlashAttention's bound on the lengths of sequences, a positive number, traced or not. Not used.
      max_seqlen_k: likewise for keys. An int, rounded up to a multiple of 256, schedules the kernels; a wrong
        one changes no result.
      seqused_q: integers [B], how many queries of each sequence are used, clamped to its length; None: all. No
        gradient.
      seqused_k: integers [B], likewise for keys.
      causal_alignment: as in `attention`, for each sequence by its used lengths. May be None only where it cannot
        matter: no causal mask, window or ALiBi, or no seqused and cu_seqlens_k is cu_seqlens_q, the same object.
      alibi_slopes: floating [N]. Has a gradient. Distances are those within a sequence.
      sinks: floating [N]. Has a gradient.
      scale, is_causal, local_window_size, logits_soft_cap, deterministic, implementation: as in `attention`, with a
        scalar for an array of scale. "reference" needs O(total_q total_k) memory.
      dropout_rate, dropout_rng: as in `attention`. What is dropped depends on where a query and a key lie in the pack,
        not in their sequence: `attention` of the same pack as one long sequence would drop the same elements.
      return_residual: also return lse.

    Returns:
      out [total_q, N, Dv] in query's dtype; with return_residual the pair (out, lse), lse being [total_q, N], float32
      (float64 for float64), in natural units. Both have the derivatives of `attention`, but for forward mode. jax.vmap
      takes several packs at once, with cu_seqlens of their own or shared ones.

    Raises:
      ValueError, TypeError: wrong input, while tracing; the message names the argument, its value, the rule and the
        remedy. The numbers in cu_seqlens and seqused are not looked at.
      NotImplementedError: right, but not served by the implementation that was asked for, or on this device.
    """
    q, k, v = (_checks.array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    for name, x, axes in (("query", q, "total_q, N, D"), ("key", k, "total_k, K, D"), ("value", v, "total_k, K, Dv")):
        if x.ndim != 3:
            raise ValueError(
                f"{name} has shape {x.shape}; it must be [{axes}]: sequences are packed along the first axis. "
                "Reshape a batch of them, or use jax.vmap for several packs."
            )
    for name, bound in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        _check_bound(name, bound)
    call = _checks.check(
        q,
        k,
        v,
        bias=None,
        mask=None,
        scale=scale,
        is_causal=is_causal,
        causal_alignment="top_left" if causal_alignment is None else causal_alignment,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        query_seq_lengths=None,
        key_value_seq_lengths=None,
        query_segment_ids=None,
        key_value_segment_ids=None,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
    )
    matters = call.is_causal or call.window != (None, None) or call.alibi_slopes is not None
    matters = matters and not (cu_seqlens_q is cu_seqlens_k and seqused_q is None and seqused_k is None)
    if causal_alignment is None and matters:
        raise ValueError(
            "causal_alignment is None, but cu_seqlens_q and cu_seqlens_k are two arrays, or seqused is given: then a "
            "causal mask, window or ALiBi can start at either corner of a sequence. Choose 'top_left', query i stands "
            "at key i (as jax.nn has it), or 'bottom_right', the last query stands at the last key (as FlashAttention "
            "2.1 has it); or pass one array twice."
        )
    packing = _checks.packing(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    call = call._replace(
        packing=packing, longest=_longest(max_seqlen_k), bottom_right=matters and causal_alignment == "bottom_right"
    )
    return attend(call, deterministic, return_residual, implementation)


def _longest(bound: Any) -> int | None:
    """What is known of it when a program is compiled, in steps, so that one serves many bounds."""
    if not isinstance(bound, (int, np.integer)):
        return None
    return min(-(-int(bound) // 256) * 256, MAX_LENGTH)


def _check_bound(name: str, x: Any) -> None:
    if isinstance(x, (jax.Array, np.ndarray)) and x.ndim == 0 and np.issubdtype(x.dtype, np.integer):
        return
    if export.is_symbolic_dim(x):
        return
    if isinstance(x, (bool, np.bool_)) or not isinstance(x, (int, np.integer)):
        raise TypeError(f"{name} is {x!r}; it must be an int, no less than the length of any sequence.")
    if x <= 0:
        raise ValueError(f"{name} is {x}; it must be positive, no less than the length of any sequence.")
