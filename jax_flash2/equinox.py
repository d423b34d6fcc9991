"""`MultiheadAttention`, a drop-in for equinox.nn.MultiheadAttention on the kernels of `attention`. Needs equinox."""

import warnings
from collections.abc import Callable
from typing import Any

import jax

from jax_flash2._api import attention

try:
    import equinox as eqx
except ImportError as error:
    raise ImportError("jax_flash2.equinox needs equinox, which is not installed here: pip install equinox") from error

_Heads = tuple[jax.Array, jax.Array, jax.Array]


class MultiheadAttention(eqx.nn.MultiheadAttention):
    """equinox.nn.MultiheadAttention without its T x S matrix: same arguments, fields and weights, same result.

    One example a call, as there: `jax.vmap(layer)` maps it over a batch, and the kernels still run once. Differs in one
    point: a query that reads no key gives the output of 0 (there: of the mean of value). Say causal masks, windows and
    lengths by the keywords that `__call__` has for them: they cost less than a mask.
    """

    def __call__(
        self,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[[jax.Array, jax.Array, jax.Array], _Heads] | None = None,
        is_causal: bool = False,
        causal_alignment: str | None = "top_left",
        local_window_size: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        query_seq_length: Any = None,
        key_value_seq_length: Any = None,
        implementation: str | None = None,
    ) -> jax.Array:
        """Attends.

        Args:
          query: [T, query_size].
          key_: [S, key_size].
          value: [S, value_size].
          mask: bool [T, S] or [num_heads, T, S], True where the key takes part.
          key: a jax.random key, needed where dropout is applied.
          inference: True: no dropout; None: as the field `dropout` says. `deterministic` is its old name.
          process_heads: takes and returns the query, key and value heads, [length, heads, size] each; for rotary
            embeddings, say.
          is_causal, causal_alignment, local_window_size, logits_soft_cap, implementation: as in `jax_flash2.attention`.
          query_seq_length, key_value_seq_length: integers; later positions read nothing, and are read by nobody.

        Returns:
          [T, output_size], differentiable in everything that has a float dtype, in reverse mode and beyond as
          `jax_flash2.attention` is.

        Raises:
          ValueError, TypeError, NotImplementedError: as `jax_flash2.attention`.
        """
        if key_.shape[0] != value.shape[0]:
            raise ValueError(
                f"key_ has shape {key_.shape} and value {value.shape}; their first axes, the lengths, must be equal."
            )
        q, k, v = (
            jax.vmap(project)(x).reshape(x.shape[0], self.num_heads, -1)
            for project, x in ((self.query_proj, query), (self.key_proj, key_), (self.value_proj, value))
        )
        if process_heads is not None:
            given = (q.shape, k.shape, v.shape)
            q, k, v = process_heads(q, k, v)
            got = (q.shape, k.shape, v.shape)
            if got != given:
                raise ValueError(f"process_heads returned heads of shapes {got}; it must keep theirs, {given}.")
        if deterministic is not None:
            warnings.warn("MultiheadAttention()(deterministic=...) is deprecated: use inference=...", stacklevel=2)
            inference = deterministic
        inference = self.dropout.inference if inference is None else inference
        rate = 0.0 if inference else float(self.dropout.p)
        if rate > 0 and key is None:
            raise RuntimeError(
                "Dropout requires a key when running in non-deterministic mode: pass key=, or inference."
            )
        out = attention(
            q,
            k,
            v,
            mask=None if mask is None else mask.reshape((1,) * (3 - mask.ndim) + mask.shape),
            is_causal=is_causal,
            causal_alignment=causal_alignment,
            local_window_size=local_window_size,
            logits_soft_cap=logits_soft_cap,
            query_seq_lengths=query_seq_length,
            key_value_seq_lengths=key_value_seq_length,
            dropout_rate=rate,
            dropout_rng=key if rate > 0 else None,
            implementation=implementation,
        )
        return jax.vmap(self.output_proj)(out.reshape(query.shape[0], -1))


def from_equinox(model: Any) -> Any:
    """`model` (any pytree) with each equinox.nn.MultiheadAttention in it replaced by ours, of the same weights."""

    def is_theirs(x: Any) -> bool:
        return type(x) is eqx.nn.MultiheadAttention

    def convert(x: Any) -> Any:
        if not is_theirs(x):
            return x
        ours = object.__new__(MultiheadAttention)
        for name in eqx.nn.MultiheadAttention.__dataclass_fields__:
            object.__setattr__(ours, name, getattr(x, name))
        return ours

    return jax.tree.map(convert, model, is_leaf=is_theirs)
