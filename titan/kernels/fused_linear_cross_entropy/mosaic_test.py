"""Fused linear cross-entropy compiled by the real TPU compilers, at shapes of real models."""

import functools
import math

import jax
import pytest

from titan.kernels.fused_linear_cross_entropy.arg_specs import LARGE, LossShape, aot_cases, by_vocabulary_tiles
from titan.kernels.fused_linear_cross_entropy.tiles import candidates, tiles_for, vmem_bytes
from titan.kernels.fused_linear_cross_entropy.tuning import tuning_cases
from titan.kernels.fused_linear_cross_entropy.xla import logits_statistics
from titan.kernels.target import Target, lowering_for
from titan.kernels.tpu_compile import compile_for_tpu, tpu_device
from titan.kernels.vmem import VmemError

MIB = 2**20
GENERATIONS = ["v6e", "tpu7x"]
_ONE_IN_EVERY_RUN = ["v6e", pytest.param("tpu7x", marks=pytest.mark.exhaustive)]


def statistics(shape: LossShape, **attributes):
    return functools.partial(logits_statistics.jax, scale=shape.scale, soft_cap=shape.soft_cap, **attributes)


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("shape", LARGE[1:3], ids=str)
def test_the_forward_kernel_needs_no_hbm_besides_its_results(shape: LossShape, generation: str) -> None:
    program = compile_for_tpu(statistics(shape), *shape.args(), generation=generation)
    assert "tpu_custom_call" in program.compiled.as_text()
    assert program.temp_bytes < MIB


@pytest.mark.parametrize("generation", [*_ONE_IN_EVERY_RUN, pytest.param("v5e", marks=pytest.mark.exhaustive)])
def test_the_largest_blocks_that_the_estimate_allows_compile_within_it(generation: str) -> None:
    shape = LARGE[2]
    blocks = max(candidates(shape.embed_dim, 2, generation), key=lambda tiles: vmem_bytes(tiles, 2))
    sizes = {name: getattr(blocks, name) for name in ("block_tokens", "block_vocab", "block_embed")}
    program = compile_for_tpu(statistics(shape, **sizes), *shape.args(), generation=generation)
    assert 0 < program.vmem_bytes <= vmem_bytes(blocks, 2)


@pytest.mark.parametrize("generation", _ONE_IN_EVERY_RUN)
def test_forward_and_backward_hold_little_more_than_one_float32_gradient_of_hidden(generation: str) -> None:
    shape = LARGE[2]
    program = compile_for_tpu(functools.partial(by_vocabulary_tiles, shape), *shape.args(), generation=generation)
    assert program.temp_bytes < 1.5 * 4 * shape.num_tokens * shape.embed_dim < shape.logits_bytes / 8


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("shape", [LossShape(300, 256, 1001), LossShape(7, 100, 37)], ids=str)
def test_odd_shapes_compile(shape: LossShape, generation: str) -> None:
    program = compile_for_tpu(functools.partial(by_vocabulary_tiles, shape), *shape.args(), generation=generation)
    assert "tpu_custom_call" in program.compiled.as_text()


def test_blocks_beyond_the_vmem_are_refused_with_the_largest_that_fit() -> None:
    shape = LARGE[0]
    with pytest.raises(VmemError, match=r"fused_linear_cross_entropy: .*the largest that fit are"):
        compile_for_tpu(statistics(shape, block_tokens=4096, block_vocab=4096), *shape.args(), generation="v6e")


def test_an_embedding_block_must_divide_the_dim() -> None:
    shape = LARGE[2]
    with pytest.raises(ValueError, match="block_embed is 1024, and the embedding dim 6656: choose 128, 256, 512, "):
        compile_for_tpu(statistics(shape, block_embed=1024), *shape.args(), generation="v6e")


@pytest.mark.parametrize("generation", ["v5e", *GENERATIONS])
def test_the_tuner_tries_the_default_blocks_and_counts_the_steps_of_each(generation: str) -> None:
    for shape, case in zip(LARGE, tuning_cases(generation), strict=True):
        default = tiles_for(*shape.args()[:2], generation=generation)
        sizes = {name: getattr(default, name) for name in ("block_tokens", "block_vocab", "block_embed")}
        assert sizes in case.candidates
        with lowering_for(Target("tpu", tpu_device(generation).device_kind)):
            programs = [jax.make_jaxpr(case.build(sizes))(*case.args) for sizes in case.candidates]
        for program, sizes in zip(programs, case.candidates, strict=True):
            (call,) = (equation for equation in program.eqns if equation.primitive.name == "pallas_call")
            assert call.params["name"] == case.hlo_name
            assert math.prod(call.params["grid_mapping"].grid) == case.num_steps(sizes)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_cases_for_the_benchmark_can_be_traced(generation: str) -> None:
    cases = aot_cases(generation)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        results = [jax.eval_shape(function, *case.args) for function in (case.fused, case.unfused) if function]
        assert all(result == results[0] for result in results)
        assert case.vmem_bytes <= 32 * MIB
