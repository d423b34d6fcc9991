"""What to keep of attention when the rest of a layer is recomputed: its output and lse, by one name."""

from typing import Any

import jax

# TransformerEngine and MaxText use the same name, so their remat policies keep these too.
CHECKPOINT_NAME = "context"


def checkpoint_policy() -> Any:
    """A policy for `jax.checkpoint` that keeps attention's output and lse, so that the forward kernel runs once.

    `jax.checkpoint(layer, policy=checkpoint_policy())` keeps nothing else; combine it with others by
    `jax.checkpoint_policies.save_from_both_policies`.
    """
    return jax.checkpoint_policies.save_only_these_names(CHECKPOINT_NAME)
