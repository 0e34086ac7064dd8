"""FLOPs of compiled programs: those of the real compiler, against arithmetic; and windows, against XLA's own count."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

from titan.graph.aot.flops import program_flops
from titan.graph.aot.hlo import parse_hlo
from titan.kernels.tpu_compile import compile_for_tpu

_F32 = jnp.float32


def compiled(function, *shapes):
    return compile_for_tpu(function, *(jax.ShapeDtypeStruct(shape, _F32) for shape in shapes), generation="v6e")


def flops(function, *shapes):
    return program_flops(parse_hlo(compiled(function, *shapes).compiled.as_text()), {})


def test_a_product_in_a_loop_counts_as_often_as_it_runs():
    def layers(x, weights):
        return lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x @ weights[0], weights)[0]

    assert flops(layers, (256, 384), (11, 384, 384)) == 12 * 2 * 256 * 384 * 384


@pytest.mark.parametrize(
    ("equation", "shapes", "multiply_adds"),
    [
        ("bnd,bmd->bnm", ((8, 256, 128), (8, 512, 128)), 8 * 256 * 512 * 128),
        ("btnd,nde->bte", ((2, 256, 4, 128), (4, 128, 384)), 2 * 256 * 4 * 128 * 384),
        ("te,end->tnd", ((256, 384), (384, 4, 128)), 256 * 384 * 4 * 128),
    ],
)
def test_batched_products_count_as_their_maths(equation, shapes, multiply_adds):
    assert flops(lambda a, b: jnp.einsum(equation, a, b), *shapes) == 2 * multiply_adds


@pytest.mark.parametrize(
    "options",
    [
        {"window_strides": (1, 1), "padding": ((1, 2), (0, 3))},
        {"window_strides": (2, 3), "padding": ((2, 2), (1, 1)), "rhs_dilation": (2, 1)},
        {"window_strides": (2, 1), "padding": ((3, 1), (2, 2)), "lhs_dilation": (3, 2)},
    ],
)
def test_a_window_counts_where_it_meets_the_input(options):
    # XLA:CPU leaves the convolution as it is written, and its analysis counts multiply-adds alone of it.
    convolve = jax.jit(lambda x, kernel: lax.conv_general_dilated(x, kernel, **options))
    x, kernel = jax.ShapeDtypeStruct((2, 3, 12, 10), _F32), jax.ShapeDtypeStruct((5, 3, 4, 3), _F32)
    program = convolve.lower(x, kernel).compile()
    assert "window={" in program.as_text()
    assert program_flops(parse_hlo(program.as_text()), {}) == program.cost_analysis()["flops"]


def test_kernels_count_what_they_declare_or_what_is_given_for_their_name():
    def kernel(name, cost):
        def double(x_ref, out_ref):
            out_ref[...] = 2 * x_ref[...]

        out = jax.ShapeDtypeStruct((8, 128), _F32)
        return pl.pallas_call(double, out_shape=out, name=name, cost_estimate=cost)

    cost = pl.CostEstimate(flops=1000, transcendentals=0, bytes_accessed=0)
    program = compiled(lambda x: kernel("silent_b", None)(kernel("silent_a", None)(kernel("said", cost)(x))), (8, 128))
    module = parse_hlo(program.compiled.as_text())
    assert program_flops(module, {"silent_a": 70, "said": 5}) == 1070
