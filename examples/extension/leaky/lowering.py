"""The lowering of `leaky::leaky_sum` to JAX; imported when a graph is lowered."""

import jax
import jax.numpy as jnp

from titan.graph.lowering.table import LoweringContext, lowering


@lowering("leaky.leaky_sum.default")
def _leaky_sum(
    ctx: LoweringContext, x_BTE: jax.Array, decay_E: jax.Array, is_start_BT: jax.Array, backward: bool = False
) -> jax.Array:
    """An associative scan over pairs (factor, sum), in float32."""
    factors_BTE = jnp.where(is_start_BT[..., None], 0.0, decay_E.astype(jnp.float32))
    if backward:  # token t takes from t + 1 what the forward sum gave there from t
        factors_BTE = jnp.roll(factors_BTE, -1, axis=1).at[:, -1].set(0.0)

    def combine(earlier, later):
        return earlier[0] * later[0], earlier[1] * later[0] + later[1]

    pairs = factors_BTE, x_BTE.astype(jnp.float32)
    return jax.lax.associative_scan(combine, pairs, reverse=backward, axis=1)[1].astype(ctx.dtype)
