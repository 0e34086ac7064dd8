"""The VMEM budget: what exceeds it is refused before any compile, with the largest blocks that fit."""

import pytest

from titan.kernels.generations import MIB
from titan.kernels.vmem import VmemError, check_vmem, vmem_budget_bytes


def _check(rows: int, generation: str = "v6e", alternatives=(256, 512, 1024)) -> None:
    check_vmem(
        "row_sum", rows, estimate=lambda rows: rows * 32 * 1024, alternatives=alternatives, generation=generation
    )


def test_budgets():
    assert [vmem_budget_bytes(name) // MIB for name in ("v5e", "v5p", "v6e", "tpu7x")] == [16, 16, 32, 32]
    with pytest.raises(ValueError, match="no TPU generation 'v9' is known: name one of v5e"):
        vmem_budget_bytes("v9")


def test_blocks_at_the_budget_pass_and_one_more_is_refused():
    _check(1024)
    _check(1025, generation="")  # no TPU, no VMEM
    with pytest.raises(
        VmemError,
        match=r"row_sum: 2048 needs 64.0 MiB of VMEM, and v6e gives a kernel 32 MiB: the largest that fit are 1024",
    ):
        _check(2048)
    with pytest.raises(VmemError, match="v5p gives a kernel 16 MiB: the largest that fit are 512"):
        _check(1024, generation="v5p")
    with pytest.raises(VmemError, match="no blocks fit"):
        _check(2048, alternatives=())
