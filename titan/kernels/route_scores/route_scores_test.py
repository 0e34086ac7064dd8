import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan.kernels.route_scores.api import apply_route_scores
from titan.kernels.route_scores.arg_specs import SMALL
from titan.kernels.route_scores.reference import apply_route_scores_reference
from titan.kernels.route_scores.tiles import RouteScoreTiles, resolve, vmem_bytes
from titan.kernels.target import Target, lowering_for
from titan.kernels.vmem import VmemError, vmem_budget_bytes

DTYPES = st.sampled_from((torch.float32, torch.bfloat16))


def run(function, expert_out: torch.Tensor, scores: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """The result, then gradients."""
    inputs = [expert_out.clone().requires_grad_(), scores.clone().requires_grad_()]
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def check(function, shape: tuple[int, int], dtype: torch.dtype, scores_dtype: torch.dtype) -> None:
    """Forward and gradients against the float64 reference."""
    generator = torch.Generator().manual_seed(0)
    expert_out, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    scores = torch.rand(shape[0], generator=generator).to(scores_dtype)
    exact = run(apply_route_scores_reference, expert_out.double(), scores.double(), grad.double())
    actual = run(function, expert_out, scores, grad)
    for right, result, expected_dtype in zip(exact, actual, (dtype, dtype, scores_dtype), strict=True):
        assert result.dtype == expected_dtype
        assert torch.isfinite(result).all()
        # The result is rounded once: to half a unit in the last of bfloat16's 8 places.
        rounding = 0.0 if expected_dtype == torch.float32 else 2**-8
        assert ((result - right).abs() <= rounding * right.abs() + 1e-5 * right.abs().max()).all()


@settings(deadline=None, max_examples=10, derandomize=True)
@given(num_rows=st.integers(1, 300), num_columns=st.integers(1, 200), dtype=DTYPES, scores_dtype=DTYPES)
def test_xla_equals_the_reference(
    num_rows: int, num_columns: int, dtype: torch.dtype, scores_dtype: torch.dtype
) -> None:
    check(apply_route_scores, (num_rows, num_columns), dtype, scores_dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_the_interpreted_kernel_equals_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    def function(*args: torch.Tensor) -> torch.Tensor:
        return apply_route_scores(*args, tiles=RouteScoreTiles(128, 128), implementation="mosaic")

    check(function, shape, dtype, torch.float32)


def test_backward_keeps_its_inputs_and_nothing_else() -> None:
    saved = []
    expert_out = torch.randn(6, 8, dtype=torch.bfloat16, requires_grad=True)
    scores = torch.rand(6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        apply_route_scores(expert_out, scores)
    assert {tensor.data_ptr() for tensor in saved} == {expert_out.data_ptr(), scores.data_ptr()}


@pytest.mark.parametrize("num_columns", [100, 4096, 16384])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_default_blocks_fit(num_columns: int, itemsize: int) -> None:
    with lowering_for(Target("tpu", "TPU v6 lite")):
        tiles = resolve(0, 0, num_columns=num_columns, itemsize=itemsize)
    assert vmem_bytes(tiles, itemsize) <= vmem_budget_bytes("v6e")
    assert tiles.block_e >= min(num_columns, 8192)


def test_sizes_given_are_kept_and_those_beyond_the_budget_refused() -> None:
    with lowering_for(Target("tpu", "TPU v6 lite")):
        assert resolve(0, 256, num_columns=4096, itemsize=2) == RouteScoreTiles(512, 256)
        message = (
            "route_scores backward: .* needs 64.2 MiB of VMEM, and v6e gives a kernel 32 MiB: the largest that fit"
        )
        with pytest.raises(VmemError, match=message):
            resolve(1024, 4096, num_columns=4096, itemsize=2)


@pytest.mark.parametrize(
    ("expert_out", "scores", "error", "message"),
    [
        (torch.zeros(4), torch.zeros(4), ValueError, r"expert_out_ME has shape \(4,\)"),
        (torch.zeros(4, 2), torch.zeros(2), ValueError, r"scores_M has shape \(2,\): give a score for each of 4 rows"),
        (torch.zeros(4, 2).half(), torch.zeros(4), NotImplementedError, "expert_out_ME has dtype torch.float16"),
        (torch.zeros(4, 2), torch.zeros(4).int(), NotImplementedError, "scores_M has dtype torch.int32"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    expert_out: torch.Tensor, scores: torch.Tensor, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        apply_route_scores(expert_out, scores)


def test_blocks_that_the_kernel_does_not_take_are_refused() -> None:
    with pytest.raises(ValueError, match="block_m=100: it must be a multiple of 128"):
        RouteScoreTiles(block_m=100)
