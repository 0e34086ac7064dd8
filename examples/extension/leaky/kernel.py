"""The squared ReLU (So et al., 2021, arXiv:2109.08668) as a kernel of its own, with its gradient."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from titan.kernels.jax_op import jax_op


class Gradients(NamedTuple):
    """Of `squared_relu`."""

    x: jax.Array


@jax_op("leaky::squared_relu_backward", backward=None)
def squared_relu_backward(x: jax.Array, grad_out: jax.Array, *, block_rows: int = 256) -> Gradients:
    """[R, F] -> [R, F]: twice the positive part, times the gradient."""
    return Gradients((2 * jax.nn.relu(x) * grad_out).astype(x.dtype))


@squared_relu_backward.implementation("mosaic", pallas=True)
def _backward_mosaic(x: jax.Array, grad_out: jax.Array, *, block_rows: int) -> Gradients:
    return Gradients((2 * jax.nn.relu(x) * grad_out).astype(x.dtype))


@jax_op("leaky::squared_relu", backward=squared_relu_backward)
def squared_relu(x: jax.Array, *, block_rows: int = 256) -> jax.Array:
    """[R, F] -> [R, F]: the square of the positive part."""
    return jnp.square(jax.nn.relu(x))


@squared_relu.implementation("mosaic", pallas=True)
def _mosaic(x: jax.Array, *, block_rows: int) -> jax.Array:
    rows, columns = x.shape
    block = pl.BlockSpec((block_rows, columns), lambda row: (row, 0))
    return pl.pallas_call(
        functools.partial(_kernel),
        grid=(pl.cdiv(rows, block_rows),),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        name="squared_relu",
    )(x)


def _kernel(x_ref, out_ref) -> None:
    positive = jnp.maximum(x_ref[...].astype(jnp.float32), 0)
    out_ref[...] = (positive * positive).astype(out_ref.dtype)
