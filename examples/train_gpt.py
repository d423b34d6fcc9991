"""Trains a byte-level GPT on text that every machine has, the Python standard library's own sources.

    python examples/train_gpt.py                    train, report the held-out loss, write a sample
    python examples/train_gpt.py --attention xla    the same with jax.nn's attention instead of jax_flash2's
    python examples/train_gpt.py --compare          a few steps of both from one seed: do the losses agree?

The defaults suit the device: on a CPU a small float32 model that trains in about three minutes on two cores, on a GPU
GPT-2's small shape in bfloat16.
"""

import dataclasses
import functools
import pathlib
import sysconfig
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging
from flax import nnx
from tqdm import tqdm

import jax_flash2

_ATTENTION = flags.DEFINE_enum(
    "attention", "flash", ["flash", "cudnn", "xla"], "jax_flash2.attention, or jax.nn's by cuDNN (on a GPU) or by XLA"
)
_COMPARE = flags.DEFINE_bool("compare", False, "train with both attentions, do the losses agree? 20 steps by default")
_DATA = flags.DEFINE_string("data", None, "a folder of .py files; default: the standard library")
_STEPS = flags.DEFINE_integer("steps", None, "optimizer steps; default: by device", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "of weights, batches and the sample")
_LAYERS = flags.DEFINE_integer("layers", None, "default: by device", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", None, "default: by device", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", None, "default: by device", lower_bound=1)
_SEQUENCE = flags.DEFINE_integer("sequence", None, "bytes a row; default: by device", lower_bound=2)
_BATCH = flags.DEFINE_integer("batch", None, "rows a step; default: by device", lower_bound=1)
_RATE = flags.DEFINE_float("learning_rate", None, "peak; default: by device", lower_bound=0)
_SAMPLE = flags.DEFINE_integer("sample_bytes", 400, "length of the sample", lower_bound=0)
_PROMPT = flags.DEFINE_string("prompt", "def ", "the sample's beginning")


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a run. Everything but `attention` and `dtype` can be set by a flag."""

    layers: int
    width: int
    heads: int
    sequence: int
    batch: int
    steps: int
    learning_rate: float
    dtype: str
    attention: str = "flash"

    @classmethod
    def from_flags(cls) -> "Config":
        if jax.default_backend() == "gpu":
            preset = cls(12, 768, 12, sequence=1024, batch=32, steps=600, learning_rate=6e-4, dtype="bfloat16")
        else:
            preset = cls(4, 128, 2, sequence=256, batch=8, steps=600, learning_rate=3e-3, dtype="float32")
        names = ("layers", "width", "heads", "sequence", "batch", "learning_rate", "attention", "steps")
        given = {name: flags.FLAGS[name].value for name in names if flags.FLAGS[name].value is not None}
        config = dataclasses.replace(preset, **given)
        if config.width % config.heads or config.width // config.heads % 2:
            raise app.UsageError(f"--width={config.width} must be an even multiple of --heads={config.heads}")
        return config


# Data: bytes are the tokens.


def read_text(folder: str | None) -> tuple[np.ndarray, np.ndarray]:
    """(training, held-out) bytes: every .py file but tests in a fixed order, every twentieth file held out."""
    root = pathlib.Path(folder or sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    paths = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    texts = [(root / p).read_bytes() for p in paths if not skipped & set(pathlib.PurePosixPath(p).parts)]
    if len(texts) < 20:
        raise app.UsageError(f"{root} holds {len(texts)} .py files, too few to train on: name a folder with --data")
    held = texts[10::20]
    del texts[10::20]
    return tuple(np.frombuffer(b"\n".join(part), np.uint8) for part in (texts, held))


def rows(text: np.ndarray, count: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """`count` random windows of `length` bytes."""
    starts = rng.integers(0, len(text) - length, count)
    return text[starts[:, None] + np.arange(length)]


# Model: pre-norm, rotary positions, tied embedding.


def attend(query: jax.Array, key: jax.Array, value: jax.Array, which: str) -> jax.Array:
    """Causal attention over [batch, sequence, heads, head dim]."""
    if which == "flash":
        return jax_flash2.attention(query, key, value, is_causal=True)
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=which)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding (Su et al. 2021, section 3.2.2) of [batch, sequence, heads, head dim]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angle)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Block(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        width, deep = config.width, 0.02 / (2 * config.layers) ** 0.5
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=config.dtype, rngs=rngs)
        self.config = config
        self.norm_attention = nnx.RMSNorm(width, dtype=config.dtype, rngs=rngs)
        self.qkv = linear(width, 3 * width, kernel_init=nnx.initializers.normal(0.02))
        self.mix = linear(width, width, kernel_init=nnx.initializers.normal(deep))
        self.norm_mlp = nnx.RMSNorm(width, dtype=config.dtype, rngs=rngs)
        self.up = linear(width, 4 * width, kernel_init=nnx.initializers.normal(0.02))
        self.down = linear(4 * width, width, kernel_init=nnx.initializers.normal(deep))

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = (*x.shape[:2], 3, self.config.heads, self.config.width // self.config.heads)
        query, key, value = jnp.moveaxis(self.qkv(self.norm_attention(x)).reshape(heads), 2, 0)
        x = x + self.mix(attend(rotate(query), rotate(key), value, self.config.attention).reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norm_mlp(x))))


class GPT(nnx.Module):
    """Bytes [batch, sequence] to float32 logits [batch, sequence, 256]."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(256, config.width, embedding_init=init, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.Sequential(*(Block(config, rngs) for _ in range(config.layers)))
        self.norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed.attend(self.norm(self.blocks(self.embed(tokens)))).astype(jnp.float32)


# Training.


class Trainer:
    """A model, its optimizer and the compiled functions. The weights live in `params` and are updated in place."""

    def __init__(self, config: Config, seed: int) -> None:
        graph, self.params = nnx.split(GPT(config, nnx.Rngs(seed)))
        self.config = config
        warmup = min(100, max(1, config.steps // 10))
        schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, config.steps)
        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1)
        )
        self.state = jax.jit(optimizer.init)(self.params)

        def loss(params: nnx.State, tokens: jax.Array) -> jax.Array:
            logits = nnx.merge(graph, params)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def update(params: nnx.State, state: optax.OptState, tokens: jax.Array) -> tuple:
            value, grads = jax.value_and_grad(loss)(params, tokens)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        @functools.partial(jax.jit, static_argnames="count")
        def write(params: nnx.State, window: jax.Array, at: jax.Array, key: jax.Array, count: int) -> jax.Array:
            model = nnx.merge(graph, params)

            def one(carry: tuple, key: jax.Array) -> tuple:
                window, at = carry
                byte = jax.random.categorical(key, model(window[None])[0, at - 1] / 0.8).astype(window.dtype)
                full = at == window.shape[0]
                window = jnp.where(full, jnp.roll(window, -1), window)
                at = jnp.where(full, at, at + 1)
                return (window.at[at - 1].set(byte), at), byte

            return jax.lax.scan(one, (window, at), jax.random.split(key, count))[1]

        self._loss, self._update, self._write = jax.jit(loss), update, write

    def steps(self, text: np.ndarray, seed: int) -> Iterator[jax.Array]:
        """Runs the training, yielding each step's loss (nats per byte, not waited for)."""
        rng = np.random.default_rng(seed)
        for _ in range(self.config.steps):
            tokens = jnp.asarray(rows(text, self.config.batch, self.config.sequence + 1, rng), jnp.int32)
            self.params, self.state, value = self._update(self.params, self.state, tokens)
            yield value

    def held_out_loss(self, text: np.ndarray, batches: int = 8) -> float:
        rng = np.random.default_rng(0)
        batch = (rows(text, self.config.batch, self.config.sequence + 1, rng) for _ in range(batches))
        return float(np.mean([self._loss(self.params, jnp.asarray(x, jnp.int32)) for x in batch]))

    def sample(self, prompt: bytes, count: int, seed: int) -> bytes:
        """Continues a prompt at temperature 0.8. Recomputes the whole window for every byte: no cache, quadratic."""
        known = np.frombuffer(prompt, np.uint8)[-self.config.sequence :]
        window = np.zeros(self.config.sequence, np.int32)
        window[: len(known)] = known  # what follows is not seen: the mask is causal
        written = self._write(
            self.params, jnp.asarray(window), jnp.asarray(len(known)), jax.random.key(seed), count=count
        )
        return prompt + np.asarray(written).astype(np.uint8).tobytes()


def train(config: Config, text: np.ndarray, seed: int, shown: bool = True) -> tuple[Trainer, np.ndarray]:
    """Trains with a progress bar in tokens (bytes); the trained model and the loss of every step."""
    trainer, losses = Trainer(config, seed), []
    tokens = config.batch * config.sequence
    with tqdm(total=config.steps * tokens, unit="tok", unit_scale=True, disable=not shown) as bar:
        for value in trainer.steps(text, seed):
            losses.append(value)
            if len(losses) > 1:
                losses[-2] = float(losses[-2])  # waits for the step before this one, so that the device never waits
                bar.update(tokens)
                if len(losses) % 10 == 0:
                    bar.set_postfix(loss=f"{np.mean(losses[-11:-1]):.3f}", refresh=False)
        losses[-1] = float(losses[-1])
        bar.update(tokens)
    return trainer, np.asarray(losses)


def compare(config: Config, text: np.ndarray, seed: int) -> int:
    """Trains with both attentions from one seed; 0 when their losses agree to the dtype's rounding."""
    tolerance = 0.05 if config.dtype == "bfloat16" else 1e-3
    curves = {}
    for attention in ("flash", "xla"):
        logging.info("attention: %s", attention)
        curves[attention] = train(dataclasses.replace(config, attention=attention), text, seed)[1]
    apart = np.abs(curves["flash"] - curves["xla"])
    for step in sorted({0, config.steps // 2, config.steps - 1}):
        print(f"step {step + 1:4d}: flash {curves['flash'][step]:.5f}  xla {curves['xla'][step]:.5f}")
    agree = bool(np.all(apart <= tolerance))
    print(f"losses {'agree' if agree else 'DISAGREE'}: at most {apart.max():.2e} apart, {tolerance:g} allowed")
    return 0 if agree else 1


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    config = Config.from_flags()
    logging.set_verbosity(logging.INFO)
    text, held = read_text(_DATA.value)
    device = jax.devices()[0].device_kind
    logging.info("%s; %.1f MB to train on, %.1f MB held out", device, len(text) / 1e6, len(held) / 1e6)
    if _COMPARE.value:
        return compare(dataclasses.replace(config, steps=_STEPS.value or 20), text, _SEED.value)
    logging.info("%s", config)
    start = time.perf_counter()
    trainer, losses = train(config, text, _SEED.value)
    seconds = time.perf_counter() - start
    tokens = config.steps * config.batch * config.sequence
    print(f"trained on {tokens / 1e6:.1f} M bytes in {seconds:.0f} s, {tokens / seconds:.0f} a second with compiling")
    loss = f"{losses[0]:.3f} at first, {losses[-10:].mean():.3f} at last, held out {trainer.held_out_loss(held):.3f}"
    print(f"loss {loss} nats a byte")
    if _SAMPLE.value:
        print("sample:")
        print(trainer.sample(_PROMPT.value.encode(), _SAMPLE.value, _SEED.value).decode(errors="replace"))
    return 0


if __name__ == "__main__":
    app.run(main)
