from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan.kernels.grouped_matmul.api import grouped_matmul, paired_grouped_matmul
from titan.kernels.grouped_matmul.arg_specs import SMALL, SmallShape
from titan.kernels.grouped_matmul.op import grouped_matmul_op, paired_grouped_matmul_op
from titan.kernels.grouped_matmul.reference import grouped_matmul_reference, paired_grouped_matmul_reference
from titan.kernels.grouped_matmul.tiles import GroupedMatmulTiles

SMALLEST_TILES = GroupedMatmulTiles((16, 128, 128), (16, 128, 128), (16, 128, 128))


@st.composite
def shapes(draw: st.DrawFn) -> SmallShape:
    """Up to 5 groups, whose rows reach beyond XLA's row tile of 128, then rows without a group."""
    group_sizes = draw(st.lists(st.sampled_from((0, 1, 5, 64, 128, 150)), min_size=1, max_size=5))
    unowned = draw(st.sampled_from((0, 1, 40)))
    num_rows = max(sum(group_sizes) + unowned, 1)
    num_k, num_n = draw(st.sampled_from(((1, 1), (33, 20), (128, 7))))
    return SmallShape("drawn", num_rows, num_k, num_n, tuple(group_sizes))


def run(function: Callable, arguments: list[torch.Tensor], sizes: torch.Tensor, grads: list[torch.Tensor]):
    """Results, then gradients."""
    inputs = [argument.clone().requires_grad_() for argument in arguments]
    results = function(*inputs, sizes)
    results = list(results) if isinstance(results, tuple) else [results]
    return [result.detach() for result in results] + list(torch.autograd.grad(results, inputs, grads))


def check(function: Callable, shape: SmallShape, dtype: torch.dtype, *, paired: bool) -> None:
    """Forward and gradients against the float64 reference, with NaN in every row that no group owns."""
    generator = torch.Generator().manual_seed(0)
    num_weights, num_groups = 2 if paired else 1, len(shape.group_sizes)
    reference = paired_grouped_matmul_reference if paired else grouped_matmul_reference

    def random(*dims: int) -> torch.Tensor:
        return torch.randn(*dims, generator=generator).to(dtype)

    weights = [random(num_groups, shape.num_k, shape.num_n) for _ in range(num_weights)]
    arguments = [random(shape.num_rows, shape.num_k), *weights]
    grads = [random(shape.num_rows, shape.num_n) for _ in range(num_weights)]
    sizes = torch.tensor(shape.group_sizes)
    exact = run(reference, [x.double() for x in arguments], sizes, [x.double() for x in grads])
    rounded = run(reference, arguments, sizes, grads)
    for rows in (arguments[0], *grads):
        rows[sum(shape.group_sizes) :] = torch.nan
    actual = run(function, arguments, sizes, grads)
    for right, plain, result in zip(exact, rounded, actual, strict=True):
        assert result.dtype == dtype
        assert torch.isfinite(result).all()
        allowed = 1e-5 * right.abs().max() if dtype == torch.float32 else 2 * (plain - right).abs().max()
        assert (result - right).abs().max() <= allowed


@pytest.mark.parametrize("paired", [False, True], ids=["single", "paired"])
@settings(deadline=None, max_examples=8, derandomize=True)
@given(shape=shapes(), dtype=st.sampled_from((torch.float32, torch.bfloat16)))
def test_xla_equals_the_reference(paired: bool, shape: SmallShape, dtype: torch.dtype) -> None:
    check(paired_grouped_matmul if paired else grouped_matmul, shape, dtype, paired=paired)


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_ragged_dot_equals_the_reference(shape: SmallShape) -> None:
    check(lambda *args: grouped_matmul(*args, implementation="ragged_dot"), shape, torch.float32, paired=False)


@pytest.mark.parametrize(
    ("implementation", "shape"),
    [("mosaic", shape) for shape in SMALL] + [("megablox", SMALL[0])],
    ids=lambda value: getattr(value, "name", value),
)
def test_interpreted_kernels_equal_the_reference(implementation: str, shape: SmallShape) -> None:
    def function(*args: torch.Tensor) -> torch.Tensor:
        return grouped_matmul(*args, tiles=SMALLEST_TILES, implementation=implementation)

    check(function, shape, torch.float32, paired=False)


@pytest.mark.parametrize("shape", SMALL[:3], ids=lambda shape: shape.name)
def test_interpreted_paired_kernels_equal_the_reference(shape: SmallShape) -> None:
    def function(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return paired_grouped_matmul(*args, tiles=SMALLEST_TILES, implementation="mosaic")

    check(function, shape, torch.bfloat16, paired=True)


@settings(deadline=None, max_examples=4, derandomize=True)
@given(group_sizes=st.lists(st.integers(0, 24), min_size=3, max_size=3))
def test_interpreted_kernels_for_any_group_sizes(group_sizes: list[int]) -> None:
    def function(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return paired_grouped_matmul(*args, tiles=SMALLEST_TILES, implementation="mosaic")

    check(function, SmallShape("drawn", 72, 130, 20, tuple(group_sizes)), torch.float32, paired=True)


def test_one_result_of_a_pair_may_go_unused() -> None:
    rows, weight, sizes = torch.randn(6, 4), torch.randn(2, 4, 3), torch.tensor([2, 3])
    gate, up = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    paired_grouped_matmul(rows, gate, up, sizes).gate.sum().backward()
    assert gate.grad.abs().sum() > 0
    assert torch.equal(up.grad, torch.zeros_like(up))


@pytest.mark.parametrize(
    ("op", "implementation"), [(grouped_matmul_op, "megablox"), (paired_grouped_matmul_op, "mosaic")], ids=str
)
def test_automatic_implementations(op, implementation: str) -> None:
    for each in (op, op.backward):
        assert each.choose("auto", "tpu").name == implementation
        assert each.choose("auto", "cpu").name == each.choose("auto", "gpu").name == "xla"


ROWS, WEIGHT, SIZES = torch.zeros(6, 4), torch.zeros(2, 4, 3), torch.tensor([2, 3])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((ROWS[0], WEIGHT, SIZES), ValueError, r"lhs_MK has shape \(4,\)"),
        ((ROWS.half(), WEIGHT.half(), SIZES), NotImplementedError, "torch.float16: grouped matmuls take"),
        ((ROWS, WEIGHT, SIZES.float()), ValueError, "group_sizes_G is torch.float32"),
        ((ROWS, WEIGHT.mT, SIZES), ValueError, r"rhs_GKN has shape \(2, 3, 4\): .* ask for \[2, 4, N\]"),
        ((ROWS, WEIGHT.bfloat16(), SIZES), ValueError, "rhs_GKN is torch.bfloat16 and lhs_MK torch.float32"),
        ((ROWS[:0], WEIGHT, SIZES), ValueError, "empty"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: tuple, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        grouped_matmul(*arguments)


def test_pairs_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gate_GKN is \(2, 4, 3\) and up_GKN \(2, 4, 2\): give equal shapes"):
        paired_grouped_matmul(ROWS, WEIGHT, WEIGHT[..., :2], SIZES)


def test_tokamax_off_tpu_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="'tokamax' of the grouped matmul runs on TPU only, and this is cpu"):
        grouped_matmul(ROWS, WEIGHT, SIZES, implementation="tokamax")
