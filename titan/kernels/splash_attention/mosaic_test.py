"""The kernels through the real Mosaic compiler, with no TPU."""

import dataclasses

import jax
import pytest

from titan.kernels.splash_attention.api import splash_attention_op
from titan.kernels.splash_attention.arg_specs import AttentionSpec, kernel_case
from titan.kernels.splash_attention.tiles import SplashTiles
from titan.kernels.splash_attention.vjp import splash_attention_backward
from titan.kernels.tpu_compile import compile_for_tpu
from titan.kernels.vmem import VmemError

SPEC = AttentionSpec(32, 8, 4096)
MASKED = AttentionSpec(8, 2, 4000, batch_size=2, window=1000, soft_cap=50.0, segments="packed")
SCORES_BYTES = 32 * 4096**2 * 4


def compile_case(spec: AttentionSpec, generation: str, **options):
    case = kernel_case(spec, generation, **options)
    return compile_for_tpu(case.fused, *case.args, generation=generation)


@pytest.mark.parametrize("generation", ("v6e", pytest.param("tpu7x", marks=pytest.mark.exhaustive)))
def test_jax_kernel_needs_a_fraction_of_the_memory_of_the_scores(generation):
    assert 0 < compile_case(SPEC, generation).temp_bytes < SCORES_BYTES / 10


def test_tokamax_kernel_compiles():
    tiles = SplashTiles(sa_dq_reduction_steps=3)
    assert 0 < compile_case(SPEC, "v6e", implementation="tokamax", tiles=tiles).temp_bytes < SCORES_BYTES / 10


def test_batch_of_padded_windowed_documents_with_a_soft_cap_compiles():
    assert compile_case(MASKED, "v6e").temp_bytes < SCORES_BYTES / 10


@pytest.mark.parametrize(("window", "fused"), ((1024, False), pytest.param(0, True, marks=pytest.mark.exhaustive)))
def test_queries_in_chunks_compile(window, fused):
    """A quarter of 8192 tokens as queries, in two chunks whose place is known at run time alone."""
    attributes = {**AttentionSpec(8, 2, 8192, window=window).attributes, "implementation": "jax"}
    tiles = SplashTiles(sa_use_fused_bwd_kernel=fused)
    q, k = (jax.ShapeDtypeStruct((2, heads, tokens, 128), "bfloat16") for heads, tokens in ((8, 2048), (2, 8192)))
    ids, kv_ids = (jax.ShapeDtypeStruct((2, tokens), "int32") for tokens in (2048, 8192))

    def forward_and_backward(q, k, v, ids, kv_ids, starts, grad):
        out, logsumexp = splash_attention_op.jax(
            q, k, v, ids, kv_ids, starts, **attributes, **dataclasses.asdict(tiles)
        )
        backward = splash_attention_backward.signature.attributes
        given = {name: value for name, value in {**attributes, **dataclasses.asdict(tiles)}.items() if name in backward}
        arrays = (q, k, v, ids, kv_ids, out, logsumexp, grad, starts)
        return out, splash_attention_backward.jax(*arrays, implementation="jax", **given)

    starts = jax.ShapeDtypeStruct((2,), "int32")
    compiled = compile_for_tpu(forward_and_backward, q, k, k, ids, kv_ids, starts, q, generation="v6e")
    assert compiled.temp_bytes < 8 * 2048 * 8192 * 4


@pytest.mark.parametrize(
    ("tiles", "kernel"),
    (
        (SplashTiles(sa_block_q=4096, sa_block_kv=4096, sa_block_kv_compute=512), "forward"),
        (SplashTiles(sa_block_q_dkv=4096, sa_block_kv_dkv=4096, sa_block_kv_dkv_compute=1024), "dkv"),
        (SplashTiles(sa_block_q_dq=4096, sa_block_kv_dq=2048), "dq"),
    ),
)
def test_blocks_beyond_vmem_are_refused_before_the_compiler_starts(tiles, kernel):
    with pytest.raises(VmemError, match=f"splash attention, {kernel}: .* the largest that fit are"):
        compile_case(SPEC, "v6e", tiles=tiles)
