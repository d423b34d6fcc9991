"""The implementations, each behind the same three questions: is it here, does it serve a case, and run it.

Found at run time: an absent one says why. Ours is one of them and gets no special treatment. Knows no clock.
"""

import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.cases import GROWTH, SCORED, SOFT_CAP, TOLD, Case
from bench.timing import Timer

Attention = Callable[..., jax.Array]  # of query, key, value and what else the case needs
Inputs = dict[str, jax.Array]  # query, key, value, dout, and what array acts on scores, by its name in SCORED


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__


def make_inputs(case: Case, seed: int) -> Inputs:
    """The arrays of a case's `data`, made on the device; drawn flat, so that cases of one size share the program."""

    def draw(key: jax.Array, *shape: int) -> jax.Array:
        count = int(np.prod(shape))
        flat = jnp.zeros(count, jnp.float32) if case.data == "zero" else _normal_f32(key, count)
        return flat.reshape(shape)

    keys = jax.random.split(jax.random.key(seed), 4)
    arrays = {
        "query": draw(keys[0], case.b, case.sq, case.h, case.d),
        "key": draw(keys[1], case.b, case.sk, case.hk, case.d),
        "value": draw(keys[2], case.b, case.sk, case.hk, case.dv),
        "dout": draw(keys[3], case.b, case.sq, case.h, case.dv),
    }
    if case.data in GROWTH:
        ends = (1.0, GROWTH[case.data]) if case.data.startswith("rising") else (GROWTH[case.data], 1.0)
        arrays["key"] *= jnp.linspace(*ends, case.sk, dtype=jnp.float32)[:, None, None]
    if case.data == "wide":
        arrays["query"] *= 4
    inputs = {name: x.astype(case.dtype) for name, x in arrays.items()}
    own = jax.random.fold_in(jax.random.key(seed), len(arrays))
    if case.scored == "alibi":
        inputs["alibi"] = jnp.asarray(case.slopes())
    if case.scored == "sinks":
        inputs["sinks"] = draw(own, case.h)
    if case.scored == "bias":
        inputs["bias"] = draw(own, 1, case.h, case.sq, case.sk).astype(jnp.bfloat16)
    return inputs


_normal_f32 = jax.jit(lambda key, count: jax.random.normal(key, (count,), jnp.float32), static_argnums=1)


class Implementation:
    """One way to compute attention. `missing` and `refuses` answer with a reason, or None."""

    name = ""
    about = ""

    def missing(self) -> str | None:
        """Why it cannot run on this machine at all."""
        raise NotImplementedError

    def refuses(self, case: Case) -> str | None:
        """Why it does not serve the case. What only trying can tell is left to the try."""
        return None

    def load(self, case: Case, inputs: Inputs) -> "Loaded":
        raise NotImplementedError


class Loaded:
    """An implementation bound to a case's inputs."""

    def timer(self, mode: str) -> Timer:
        """What to time: forward alone, the gradient alone with residuals kept, or both in one program."""
        raise NotImplementedError

    def answer(self, mode: str) -> dict[str, np.ndarray]:
        """{"out": ...} forward, {"dq", "dk", "dv"} otherwise; [b, t, heads, d] each."""
        raise NotImplementedError


class JaxLoaded(Loaded):
    def __init__(self, attention: Attention, inputs: Inputs, operands: Sequence[jax.Array] = ()):
        self._qkv, self._dout = (inputs["query"], inputs["key"], inputs["value"]), inputs["dout"]
        self._operands = operands  # arguments of the program, so that nothing of them is computed while compiling
        self._attention = attention
        self._calls: dict[str, Callable[[], Any]] = {}

    def _call(self, mode: str) -> Callable[[], Any]:
        if mode not in self._calls:
            self._calls[mode] = self._make(mode)
        return self._calls[mode]

    def _make(self, mode: str) -> Callable[[], Any]:
        qkv, dout, operands = self._qkv, self._dout, self._operands

        def pulled(qkv: Any, *operands: Any) -> Any:
            return jax.vjp(lambda *x: self._attention(*x, *operands), *qkv)

        if mode == "fwd":
            forward = jax.jit(self._attention)
            return lambda: forward(*qkv, *operands)
        if mode == "bwd":
            # The vjp is a pytree of its residuals: made once, they enter the backward program as arguments. Taken
            # apart here, because doing so at every call would cost a short backward more than its dispatch.
            _, pullback = jax.jit(pulled)(qkv, *operands)
            residuals, tree = jax.tree.flatten(pullback)
            backward = jax.jit(lambda dout, *residuals: jax.tree.unflatten(tree, residuals)(dout))
            return lambda: backward(dout, *residuals)

        def loss(query, key, value, dout, *operands):
            return jnp.sum(self._attention(query, key, value, *operands).astype(jnp.float32) * dout.astype(jnp.float32))

        step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        return lambda: step(*qkv, dout, *operands)

    def timer(self, mode: str) -> Timer:
        return Timer(self._call(mode), jax.block_until_ready, queued=on_gpu())

    def answer(self, mode: str) -> dict[str, np.ndarray]:
        result = self._call(mode)()
        named = {"out": result} if mode == "fwd" else dict(zip(("dq", "dk", "dv"), result, strict=True))
        return {name: np.asarray(x) for name, x in named.items()}


class JaxImplementation(Implementation):
    """A JAX function. `module` is what must import; `gpu_only` and `half_only` are what it says of itself."""

    module = "jax"
    gpu_only = True
    half_only = True
    bottom_right = False  # where a causal mask of unequal lengths is aligned
    told = ("",)  # which of cases.TOLD it can be told,
    scored = ("",)  # and which of cases.SCORED it lets act on scores

    def missing(self) -> str | None:
        if self.gpu_only and not on_gpu():
            return "needs a CUDA GPU"
        try:
            importlib.import_module(self.module)
        except Exception as error:  # a library that fails to load is reported like one that is not there
            return first_line(error)
        return None

    def refuses(self, case: Case) -> str | None:
        if self.half_only and case.dtype not in ("bfloat16", "float16"):
            return f"serves 16-bit inputs only, not {case.dtype}"
        if case.causal and case.sq != case.sk and not self.bottom_right:
            return "aligns a causal mask of unequal lengths top-left"
        if case.told not in self.told:
            return f"is not asked for {case.told}"
        if case.scored not in self.scored:
            return f"is not asked for {case.scored}"
        return None

    def attention(self, case: Case) -> Attention:
        raise NotImplementedError

    def operands(self, case: Case, inputs: Inputs) -> list[np.ndarray | jax.Array]:
        """What `attention` takes behind query, key and value."""
        return [inputs[case.scored]] if case.scored in inputs else []

    def load(self, case: Case, inputs: Inputs) -> Loaded:
        return JaxLoaded(self.attention(case), inputs, [jnp.asarray(x) for x in self.operands(case, inputs)])


class Ours(JaxImplementation):
    name, about = "jax_flash2", "this package"
    module, gpu_only, half_only, bottom_right = "jax_flash2", False, False, True
    told, scored = TOLD, SCORED

    def attention(self, case: Case) -> Attention:
        from jax_flash2 import attention

        window = None if case.window is None else (case.window, None)
        alignment = "bottom_right" if case.causal else None
        bounds = {"is_causal": case.causal, "causal_alignment": alignment, "local_window_size": window}
        if case.told == "mask":
            return lambda q, k, v, mask: attention(q, k, v, mask=mask)
        if case.told == "ids":
            return lambda q, k, v, ids: attention(q, k, v, query_segment_ids=ids, key_value_segment_ids=ids, **bounds)
        if case.told == "varlen":
            from jax_flash2 import varlen_attention

            longest = max(case.parts)
            return lambda q, k, v, starts: varlen_attention(
                q[0], k[0], v[0], starts, starts, max_seqlen_q=longest, max_seqlen_k=longest, **bounds
            )[None]
        if case.scored == "softcap":
            return lambda q, k, v: attention(q, k, v, logits_soft_cap=SOFT_CAP, **bounds)
        if case.scored:
            name = "alibi_slopes" if case.scored == "alibi" else case.scored
            return lambda q, k, v, x: attention(q, k, v, **{name: x}, **bounds)
        return lambda q, k, v: attention(q, k, v, **bounds)

    def operands(self, case: Case, inputs: Inputs) -> list[np.ndarray | jax.Array]:
        if not case.told:
            return super().operands(case, inputs)
        ids = np.broadcast_to(case.ids().astype(np.int32), (case.b, case.sq))
        given = {"ids": ids, "varlen": case.starts().astype(np.int32)}
        return [case.mask()[None, None]] if case.told == "mask" else [given[case.told]]


class JaxNN(JaxImplementation):
    """jax.nn.dot_product_attention; `xla` materialises the scores."""

    told, scored = TOLD, ("", "bias")

    def __init__(self, implementation: str):
        self._implementation = implementation
        self.name, self.about = f"jax_{implementation}", f"jax.nn.dot_product_attention, {implementation}"
        self.gpu_only = self.half_only = implementation == "cudnn"

    def refuses(self, case: Case) -> str | None:
        # At least two float32 arrays of T x S live at once, and what jax has had, torch gets no more.
        scores = 8 * case.b * case.h * case.sq * case.sk
        if self._implementation == "xla" and scores > 20e9:
            return f"materialises its scores: {scores / 1e9:.0f} GB"
        return super().refuses(case)

    def operands(self, case: Case, inputs: Inputs) -> list[np.ndarray | jax.Array]:
        return [case.mask()[None, None]] if case.told else super().operands(case, inputs)

    def attention(self, case: Case) -> Attention:
        if case.told:  # all of it as one mask
            return lambda q, k, v, mask: jax.nn.dot_product_attention(
                q, k, v, mask=mask, implementation=self._implementation
            )
        window = None if case.window is None else (case.window, 0)
        return lambda q, k, v, bias=None: jax.nn.dot_product_attention(
            q, k, v, bias, is_causal=case.causal, local_window_size=window, implementation=self._implementation
        )


class Tokamax(JaxImplementation):
    name, about, module = "tokamax", "tokamax, Pallas Mosaic GPU kernels", "tokamax"

    def missing(self) -> str | None:
        # It warns of every shape that its table of tuned tiles lacks, by a line of a thousand letters.
        logging.getLogger("absl").addFilter(lambda record: not str(record.msg).startswith("Autotuning cache miss"))
        return super().missing()

    def attention(self, case: Case) -> Attention:
        import tokamax

        window = None if case.window is None else (case.window, 0)
        return lambda q, k, v: tokamax.dot_product_attention(
            q, k, v, is_causal=case.causal, local_window_size=window, implementation="mosaic"
        )


class FlashAttention3(JaxImplementation):
    name, about, module = "dew_fa3", "FlashAttention-3 through dew_flash_attn", "dew_flash_attn"
    bottom_right = True

    def attention(self, case: Case) -> Attention:
        import dew_flash_attn

        window = (-1, -1) if case.window is None else (case.window, 0)
        return lambda q, k, v: dew_flash_attn.flash_mha(q, k, v, is_causal=case.causal, window_size=window)


class FlashAttention4(JaxImplementation):
    name, about, module = "fa4", "FlashAttention-4 (CuTe DSL) through fa4_jax", "fa4_jax.kernels"
    bottom_right = True

    def attention(self, case: Case) -> Attention:
        import fa4_jax

        window = None if case.window is None else (case.window, 0)
        return lambda q, k, v: fa4_jax.flash_attn(q, k, v, causal=case.causal, window_size=window, backend="cute")


def all_implementations() -> list[Implementation]:
    from bench import rivals_torch

    jax_ones = [Ours(), JaxNN("xla"), JaxNN("cudnn"), Tokamax(), FlashAttention3(), FlashAttention4()]
    return [*jax_ones, rivals_torch.Torch("torch_fa2"), rivals_torch.Torch("torch_cudnn")]


def find(names: Iterable[str] = ()) -> tuple[list[Implementation], dict[str, str]]:
    """The implementations that can run here, and {name: reason} for those that cannot. No names: all."""
    known = {x.name: x for x in all_implementations()}
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"unknown implementations {unknown}; known: {sorted(known)}")
    wanted = [known[name] for name in dict.fromkeys(names)] or list(known.values())
    reasons = {x.name: x.missing() for x in wanted}
    return [x for x in wanted if reasons[x.name] is None], {n: r for n, r in reasons.items() if r is not None}
