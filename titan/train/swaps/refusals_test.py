"""Blocks that exceed the vector memory of the TPU that a graph is lowered for are one line that names the section."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from titan.core.config.validate import ConfigError
from titan.graph.lowering.lower import lower
from titan.graph.lowering.table import LoweringError
from titan.kernels.arrays import to_array
from titan.kernels.grouped_matmul.api import grouped_matmul
from titan.kernels.grouped_matmul.tiles import GroupedMatmulTiles
from titan.kernels.splash_attention.api import splash_attention
from titan.kernels.splash_attention.tiles import SplashTiles
from titan.kernels.target import Target
from titan.kernels.vmem import VmemError
from titan.train.swaps.refusals import kernel_refusals

V6E = Target("tpu", "TPU v6 lite")


def _lower(function, *args):
    with kernel_refusals():
        lower(make_fx(function)(*args), target=V6E)(*map(to_array, args))


def test_blocks_that_a_flag_sets_are_a_mistake_in_the_configuration():
    def attention(q):
        tiles = SplashTiles(sa_block_q=4096, sa_block_kv=4096)
        return splash_attention(q, q, q, scale=1.0, tiles=tiles)

    with pytest.raises(
        ConfigError, match=r"--splash_attention_kernel: splash attention, forward: .*MiB of VMEM, and v6e .*; give such"
    ) as error:
        _lower(attention, torch.zeros(1, 1, 4096, 128, dtype=torch.bfloat16))
    assert "\n" not in str(error.value)


def test_every_kernel_with_flags_for_its_blocks_names_them():
    def product(lhs, rhs, sizes):
        return grouped_matmul(lhs, rhs, sizes, tiles=GroupedMatmulTiles(forward=(4096, 4096, 4096)))

    sizes = torch.tensor([4096], dtype=torch.int32)
    arguments = (torch.zeros(4096, 4096), torch.zeros(1, 4096, 4096), sizes)
    with pytest.raises(ConfigError, match="^--grouped_matmul: grouped_matmul forward: .*MiB of VMEM"):
        _lower(product, *arguments)


def test_others_pass_through():
    refusal = VmemError("row_sum", "too large")
    with pytest.raises(LoweringError) as error, kernel_refusals():
        raise LoweringError("sum") from refusal
    assert error.value.__cause__ is refusal
