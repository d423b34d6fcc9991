"""torch's scaled_dot_product_attention as a rival: its FlashAttention-2 and its cuDNN backend.

Tensors keep the [b, t, heads, d] memory of the other implementations and are passed as transposed views, which both
backends read in place.
"""

from typing import Any

import numpy as np

from bench.cases import Case
from bench.rivals import Implementation, Inputs, Loaded, first_line, on_gpu
from bench.timing import Timer

BACKENDS = {"torch_fa2": "FLASH_ATTENTION", "torch_cudnn": "CUDNN_ATTENTION"}


class TorchLoaded(Loaded):
    def __init__(self, backend: Any, case: Case, inputs: Inputs):
        import torch

        def tensor(name: str) -> Any:
            x = torch.from_dlpack(inputs[name]).clone().transpose(1, 2)
            return x.detach().requires_grad_(name != "dout")

        self._torch, self._backend, self._case = torch, backend, case
        self._qkv, self._dout = tuple(tensor(name) for name in ("query", "key", "value")), tensor("dout")
        self._out = None

    def _chosen(self) -> Any:
        from torch.nn.attention import sdpa_kernel

        return sdpa_kernel(self._backend)

    def _forward(self) -> Any:
        q, k, v = self._qkv
        return self._torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=self._case.causal, enable_gqa=self._case.h != self._case.hk
        )

    def _call(self, mode: str) -> Any:
        torch = self._torch
        if mode == "fwd":
            with torch.no_grad():
                return self._forward()
        if mode == "step":
            return torch.autograd.grad(self._forward(), self._qkv, self._dout)
        if self._out is None:
            self._out = self._forward()
        return torch.autograd.grad(self._out, self._qkv, self._dout, retain_graph=True)

    def _wait(self, _: Any) -> None:
        if on_gpu():
            self._torch.cuda.synchronize()

    def timer(self, mode: str) -> Timer:
        return Timer(lambda: self._call(mode), self._wait, queued=on_gpu(), within=self._chosen)

    def answer(self, mode: str) -> dict[str, np.ndarray]:
        with self._chosen():
            result = self._call(mode)
        named = {"out": result} if mode == "fwd" else dict(zip(("dq", "dk", "dv"), result, strict=True))
        return {name: x.detach().transpose(1, 2).float().cpu().numpy() for name, x in named.items()}


class Torch(Implementation):
    def __init__(self, name: str):
        self.name, self.about = name, f"torch scaled_dot_product_attention, {BACKENDS[name]}"

    def missing(self) -> str | None:
        try:
            import torch
        except Exception as error:
            return first_line(error)
        if on_gpu() and not torch.cuda.is_available():
            return "this torch sees no CUDA GPU"
        if self.name == "torch_cudnn" and not on_gpu():
            return "needs a CUDA GPU"
        return None

    def refuses(self, case: Case) -> str | None:
        if case.window is not None:
            return "no sliding window without a T x S mask"
        if case.told or case.scored:
            return f"is not asked for {case.told or case.scored}"
        if case.causal and case.sq != case.sk:
            return "aligns a causal mask of unequal lengths top-left"
        return None

    def load(self, case: Case, inputs: Inputs) -> Loaded:
        import torch
        from torch.nn.attention import SDPBackend

        if on_gpu():
            torch.cuda.empty_cache()  # the last case's memory goes back, jax may need it
        return TorchLoaded(getattr(SDPBackend, BACKENDS[self.name]), case, inputs)
