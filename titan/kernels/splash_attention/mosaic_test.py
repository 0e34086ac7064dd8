"""The kernels through the real Mosaic compiler, with no TPU."""

import pytest

from titan.kernels.splash_attention.arg_specs import AttentionSpec, kernel_case
from titan.kernels.splash_attention.tiles import SplashTiles
from titan.kernels.tpu_compile import compile_for_tpu
from titan.kernels.vmem import VmemError

SPEC = AttentionSpec(32, 8, 4096)
MASKED = AttentionSpec(8, 2, 4000, batch_size=2, window=1000, soft_cap=50.0, segments="packed")
SCORES_BYTES = 32 * 4096**2 * 4


def compile_case(spec: AttentionSpec, generation: str, **options):
    case = kernel_case(spec, generation, **options)
    return compile_for_tpu(case.fused, *case.args, generation=generation)


@pytest.mark.parametrize("generation", ("v6e", "tpu7x"))
def test_jax_kernel_needs_a_fraction_of_the_memory_of_the_scores(generation):
    assert 0 < compile_case(SPEC, generation).temp_bytes < SCORES_BYTES / 10


def test_tokamax_kernel_compiles():
    tiles = SplashTiles(sa_dq_reduction_steps=3)
    assert 0 < compile_case(SPEC, "v6e", implementation="tokamax", tiles=tiles).temp_bytes < SCORES_BYTES / 10


def test_batch_of_padded_windowed_documents_with_a_soft_cap_compiles():
    assert compile_case(MASKED, "v6e").temp_bytes < SCORES_BYTES / 10


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
