"""What is measured: shapes as plain data, and the arithmetic they cost. Knows nothing of implementations or clocks.

A case is one attention call. Suites are lists of cases: `grid` is the FlashAttention-2 paper's (16k tokens, hidden size
2048), `users` what most models call, `shapes` more of it, `features` packed sequences, documents and masks beside the
plain calls that they are measured by, `operands` what acts on scores beside the same (but dropout, which no reference
checks without sharing its law with the package), `adversarial` inputs that are hard for a softmax that goes block by
block, `cpu` what a CPU can finish, `small` a smoke test.
"""

import dataclasses
import itertools

import numpy as np

PASSES = ("fwd", "bwd", "step")

# Inputs are standard normal, and the keys multiplied by a factor that goes from 1 to this over their positions, or down
# from this to 1. With 16, scores differ by tens of powers of two; with 64, by more than a float32 holds (2^127).
GROWTH = {"rising": 16.0, "falling": 16.0, "rising_far": 64.0, "falling_far": 64.0}
# With wide, queries are 4 times as large, so that a soft cap is no rounding error.
DATA = ("normal", "zero", *GROWTH, "wide")
# How a call is told whom it may read, if not by is_causal and a window: segment ids, a bool array, or cu_seqlens.
TOLD = ("", "ids", "mask", "varlen")
# What acts on the scores: logits_soft_cap, alibi_slopes [h], sinks [h], a bfloat16 bias [1, h, sq, sk].
SCORED = ("", "softcap", "alibi", "sinks", "bias")
SOFT_CAP = 30.0


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: query [b, sq, h, d], key [b, sk, hk, d], value [b, sk, hk, dv]. `window` counts keys to the left."""

    b: int
    sq: int
    h: int
    d: int
    causal: bool
    sk: int = 0  # 0: as sq
    hk: int = 0  # 0: as h
    dv: int = 0  # 0: as d
    window: int | None = None
    dtype: str = ""  # "": the device's usual one
    data: str = "normal"  # or another of DATA
    parts: tuple[int, ...] = ()  # the lengths of documents that read nothing of each other; (): one document
    told: str = ""  # or another of TOLD
    scored: str = ""  # or another of SCORED

    def __post_init__(self) -> None:
        for field, like in (("sk", "sq"), ("hk", "h"), ("dv", "d")):
            if not getattr(self, field):
                object.__setattr__(self, field, getattr(self, like))
        if self.window is not None and not self.causal:
            raise ValueError(f"{self}: a window is measured with a causal mask only")
        if self.data not in DATA:
            raise ValueError(f"{self}: data must be one of {DATA}")
        if self.told not in TOLD or (bool(self.parts) and self.told == ""):
            raise ValueError(f"{self}: told must be one of {TOLD}, and not '' of parts")
        if (self.told and self.sq != self.sk) or (self.parts and sum(self.parts) != self.sq):
            raise ValueError(f"{self}: parts must fill the length, and queries and keys be as many")
        if (self.told in ("ids", "varlen") and not self.parts) or (self.told == "varlen" and self.b != 1):
            raise ValueError(f"{self}: {self.told} needs parts, varlen of one batch row")
        if self.scored not in SCORED or (self.scored and self.told):
            raise ValueError(f"{self}: scored must be one of {SCORED}, and '' of a call that is told its mask")
        if self.scored == "alibi" and self.sq != self.sk and not self.causal:
            raise ValueError(f"{self}: alibi of unequal lengths is measured with a causal mask only")

    @property
    def label(self) -> str:
        mask = ("causal" if self.causal else "full") + (f" w{self.window}" if self.window is not None else "")
        length = f"t{self.sq}" + (f"/{self.sk}" if self.sk != self.sq else "")
        width = f"d{self.d}" + (f"/{self.dv}" if self.dv != self.d else "")
        data = "" if self.data == "normal" else f" {self.data}"
        how = told_by(self.told, self.parts, self.scored)
        return f"{self.dtype} {width} {mask} {length} h{self.h}/{self.hk} b{self.b}{data}{how}"

    @property
    def bounds(self) -> tuple[int, int, int]:
        """(left, right, offset): row i keeps the keys i + offset - left .. i + offset + right."""
        open_end = self.sq + self.sk
        left = open_end if self.window is None else self.window
        return left, 0 if self.causal else open_end, self.sk - self.sq if self.causal else 0

    def kept(self) -> int:
        """How many (query, key) pairs the mask keeps in one head."""
        if self.parts:
            return sum(dataclasses.replace(self, sq=n, sk=n, parts=(), told="").kept() for n in self.parts)
        left, right, offset = self.bounds
        middle = np.arange(self.sq, dtype=np.int64) + offset
        first, last = np.maximum(middle - left, 0), np.minimum(middle + right, self.sk - 1)
        return int(np.maximum(last - first + 1, 0).sum())

    def ids(self) -> np.ndarray:
        """[sq]: the number of the document that a row belongs to."""
        return np.repeat(np.arange(len(self.parts)), self.parts) if self.parts else np.zeros(self.sq, np.int64)

    def starts(self) -> np.ndarray:
        """[parts + 1]: where each document begins, and where the last one ends."""
        return np.concatenate([[0], np.cumsum(self.parts)])

    def mask(self) -> np.ndarray:
        """bool [sq, sk]: whom each query reads."""
        left, right, offset = self.bounds
        middle, keys = np.arange(self.sq)[:, None] + offset, np.arange(self.sk)
        keep = (keys >= middle - left) & (keys <= middle + right)
        return keep & (self.ids()[:, None] == self.ids()) if self.parts else keep

    def slopes(self) -> np.ndarray:
        """float32 [h]: the slopes of ALiBi."""
        return (2.0 ** (-8 * np.arange(1, self.h + 1) / self.h)).astype(np.float32)

    def plain(self) -> "Case":
        """The call that this one is measured by: its sequences as a batch, one document, or the mask by its name, and
        nothing that acts on scores."""
        equal = self.told == "varlen" and len(set(self.parts)) == 1
        b, length = (len(self.parts), self.parts[0]) if equal else (self.b, self.sq)
        sk = length if self.told else self.sk
        return dataclasses.replace(self, b=b, sq=length, sk=sk, parts=(), told="", scored="")

    def flops(self, mode: str) -> float:
        """Two products forward (q k, p v), five backward (both again, dp, dq, dk): only kept pairs count."""
        pairs = 2.0 * self.b * self.h * self.kept()
        forward, backward = pairs * (self.d + self.dv), pairs * (3 * self.d + 2 * self.dv)
        return {"fwd": forward, "bwd": backward, "step": forward + backward}[mode]

    def row(self) -> dict:
        """The fields of a result row that name the case."""
        keys = ("dtype", "d", "dv", "causal", "window", "sq", "sk", "h", "hk", "b", "data", "parts", "told", "scored")
        return {key: getattr(self, key) for key in keys}


def told_by(told: str, parts: tuple[int, ...], scored: str) -> str:
    """What a label says of these fields: nothing where they are plain."""
    runs = [f"{len(list(run))}x{length}" for length, run in itertools.groupby(parts)]
    return "".join(f" {word}" for word in (told, "+".join(runs), scored) if word)


def grid() -> list[Case]:
    return [
        Case(b=16384 // t, sq=t, h=2048 // d, d=d, causal=causal)
        for d in (64, 128, 256)
        for causal in (False, True)
        for t in (512, 1024, 2048, 4096, 8192, 16384)
    ]


def users() -> list[Case]:
    return [
        Case(b=8, sq=1024, h=12, d=64, causal=True),  # GPT-2 small
        Case(b=4, sq=1000, h=16, d=128, causal=True),  # a length that is no multiple of a tile,
        Case(b=4, sq=1024, h=16, d=128, causal=True),  # and its neighbour that is
        Case(b=4, sq=1000, h=16, d=128, causal=False),
        Case(b=4, sq=1024, h=16, d=128, causal=False),
        Case(b=1, sq=4096, h=8, d=128, causal=True),  # few blocks: does the grid fill the chip?
        Case(b=2, sq=8192, h=32, hk=8, d=128, causal=True),  # Llama 3 8B
        Case(b=1, sq=16384, h=16, d=128, causal=True, window=1024),
        Case(b=2, sq=4096, h=16, d=192, dv=128, causal=True),  # DeepSeek's latent attention in training
        Case(b=1, sq=32768, h=16, hk=2, d=128, causal=True),  # long context, wide groups
    ]


def shapes() -> list[Case]:
    return [
        *users(),
        Case(b=32, sq=577, h=16, d=64, causal=False),  # ViT-L at 336 pixels: an odd length
        Case(b=16, sq=448, sk=1500, h=20, d=64, causal=False),  # Whisper large, cross attention
        Case(b=1, sq=1024, sk=16384, h=32, hk=8, d=128, causal=True),  # a chunk of a long prompt, bottom-right
        Case(b=1, sq=16384, h=32, hk=8, d=128, causal=True, window=4095),  # Mistral 7B
        Case(b=2, sq=8192, h=8, hk=4, d=256, causal=True),  # Gemma 2
        Case(b=8, sq=2048, h=32, d=96, causal=True),  # Phi-3 mini
        Case(b=8, sq=2048, h=32, d=80, causal=True),  # Phi-2: a head dim between two tile sizes
    ]


def features() -> list[Case]:
    found = []
    for causal in (False, True):
        documents = Case(b=1, sq=16384, h=16, d=128, causal=causal, parts=(1024,) * 16, told="ids")
        equal = [
            dataclasses.replace(documents, parts=(length,) * (16384 // length), told="varlen")
            for length in (1024, 4096)
        ]
        skewed = Case(b=1, sq=32512, h=16, d=128, causal=causal, parts=(16384, *(256,) * 63), told="varlen")
        found += [documents, *equal, skewed]
    found += [Case(b=16384 // t, sq=t, h=16, d=128, causal=True, told="mask") for t in (4096, 8192, 16384)]
    found.append(Case(b=1, sq=16384, h=16, d=128, causal=True, window=1024, told="mask"))
    return list(dict.fromkeys(case for each in found for case in (each.plain(), each)))


def operands() -> list[Case]:
    kinds = [(128, scored) for scored in SCORED if scored] + [(64, "alibi"), (64, "sinks")]
    found = [Case(b=4, sq=4096, h=2048 // d, d=d, causal=True, scored=scored) for d, scored in kinds]
    found = [dataclasses.replace(case, data="wide") if case.scored == "softcap" else case for case in found]
    return list(dict.fromkeys(case for each in found for case in (each.plain(), each)))


def adversarial() -> list[Case]:
    return [
        Case(b=4, sq=4096, h=2048 // d, d=d, causal=causal, data=data)
        for d in (64, 128)
        for causal in (False, True)
        for data in ("normal", "zero", *GROWTH)
    ]


def cpu() -> list[Case]:
    return [
        Case(b=1, sq=4096, h=8, d=64, causal=True),
        Case(b=1, sq=2048, h=8, d=64, causal=False),
        Case(b=8, sq=256, h=6, d=64, causal=True),  # a small model in training
        Case(b=1, sq=2048, h=8, hk=2, d=128, causal=True),
        Case(b=1, sq=4096, h=8, d=64, causal=True, window=256),
        Case(b=1, sq=2048, h=8, d=64, causal=True, dtype="bfloat16"),
    ]


def small() -> list[Case]:
    return [
        Case(b=2, sq=96, h=4, hk=2, d=32, causal=True),
        Case(b=1, sq=40, sk=72, h=2, d=16, causal=False),
        Case(b=1, sq=130, h=2, d=24, causal=True, window=31),
        Case(b=1, sq=130, h=2, d=24, causal=False, data="rising_far"),
        Case(b=2, sq=96, h=4, hk=2, d=32, causal=True, parts=(50, 1, 45), told="ids"),
        Case(b=2, sq=96, h=4, hk=2, d=32, causal=True, window=20, told="mask"),
        Case(b=1, sq=192, h=4, hk=2, d=32, causal=True, parts=(96, 96), told="varlen"),
        Case(b=2, sq=96, h=4, hk=2, d=32, causal=True, data="wide", scored="softcap"),
        *(Case(b=2, sq=96, h=4, hk=2, d=32, causal=True, scored=scored) for scored in ("alibi", "sinks", "bias")),
    ]


SUITES = {
    "grid": grid,
    "users": users,
    "shapes": shapes,
    "features": features,
    "operands": operands,
    "adversarial": adversarial,
    "cpu": cpu,
    "small": small,
}
