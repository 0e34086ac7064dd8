import json
import pathlib

import pytest

from titan.kernels import tile_table
from titan.kernels.generations import MIB
from titan.kernels.grouped_matmul.tiles import (
    Blocks,
    GroupedMatmulTiles,
    Problem,
    default_blocks,
    hbm_bytes,
    resolve,
    vmem_bytes,
)
from titan.kernels.target import Target, lowering_for
from titan.kernels.vmem import VmemError, vmem_budget_bytes

PROBLEM = Problem(num_rows=65536, num_k=4096, num_n=1536, num_groups=128, num_weights=2, itemsize=2)
V6E = Target("tpu", "TPU v6 lite")


@pytest.mark.parametrize("generation", ["v5e", "v6e", "tpu7x"])
@pytest.mark.parametrize("kernel", ["forward", "dlhs", "drhs"])
def test_default_blocks_fit_and_move_less_than_small_ones(kernel: str, generation: str) -> None:
    blocks = default_blocks(kernel, PROBLEM, generation)
    assert vmem_bytes(kernel, blocks, PROBLEM) <= vmem_budget_bytes(generation)
    smallest = hbm_bytes(kernel, Blocks(128, 128, 128), PROBLEM)
    assert hbm_bytes(kernel, blocks, PROBLEM) < smallest / 2


def test_vmem_of_the_paired_forward() -> None:
    lhs, weights, results, sums = 2 * 256 * 4096 * 2, 2 * 2 * 4096 * 768 * 2, 2 * 2 * 256 * 768 * 2, 2 * 256 * 768 * 4
    copies = 256 * 4096 * 2 + 3 * MIB // 4
    assert vmem_bytes("forward", Blocks(256, 4096, 768), PROBLEM) == lhs + weights + results + sums + copies


def test_sizes_given_are_kept_and_the_others_chosen() -> None:
    with lowering_for(V6E):
        assert resolve("forward", (64, 0, 256), PROBLEM) == (64, 4096, 256)


def test_blocks_beyond_the_budget_are_refused() -> None:
    message = (
        r"paired_grouped_matmul forward: Blocks\(tile_m=512, tile_k=4096, tile_n=1536\) needs 72\.8 MiB of VMEM, "
        r"and v6e gives a kernel 32 MiB: the largest that fit are Blocks\(.*\) \(.* MiB\)"
    )
    with lowering_for(V6E), pytest.raises(VmemError, match=message):
        resolve("forward", (512, 4096, 1536), PROBLEM)


def test_tuned_blocks_are_taken_from_the_table(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = {PROBLEM.key: {"forward_tile_m": 128, "forward_tile_k": 2048, "forward_tile_n": 384}}
    (tmp_path / tile_table.file_name("paired_grouped_matmul", "v6e")).write_text(json.dumps(tuned))
    monkeypatch.setenv(tile_table.FOLDER_VARIABLE, str(tmp_path))
    with lowering_for(V6E):
        assert resolve("forward", (0, 0, 0), PROBLEM) == (128, 2048, 384)
        assert resolve("forward", (0, 0, 128), PROBLEM) == (128, 2048, 128)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((128, 128), r"forward tiles are \(128, 128\): give \(tile_m, tile_k, tile_n\)"),
        ((8, 128, 128), "forward tiles have tile_m=8: it must be a multiple of 16"),
        ((128, 64, 128), "forward tiles have tile_k=64: it must be a multiple of 128"),
        ((128, 128, -128), "forward tiles have tile_n=-128"),
    ],
)
def test_sizes_that_no_kernel_takes_are_refused(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupedMatmulTiles(forward=sizes)
