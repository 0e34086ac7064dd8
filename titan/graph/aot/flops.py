"""FLOPs of an optimized program: those of its matrix products and kernels, as often as its loops run them.

XLA's own cost analysis counts a loop's body once. Element-wise work is left out, as it is in the model's FLOPs.
"""

import math
import re
from collections.abc import Mapping

from titan.graph.aot.hlo import Array, HloModule, Instruction
from titan.graph.aot.kernels import declared_cost, flops_of_call, is_kernel
from titan.graph.aot.loops import runs

_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_GROUPS = re.compile(r"batch_group_count=(\d+)")


def program_flops(module: HloModule, kernel_flops: Mapping[str, float]) -> float:
    """FLOPs of one device in one run of the program, two for a multiply-add.

    Args:
      module: optimized.
      kernel_flops: of one call of each kernel that declares none, see `kernels.flops_of_call`.
    """
    total = 0.0
    for name, instructions in module.computations.items():
        shapes = {one.name: one for one in instructions}
        flops = 0.0
        for one in instructions:
            if one.opcode in ("convolution", "dot"):
                lhs, rhs = (shapes[operand].arrays[0] for operand in one.operands[:2])
                flops += (_convolution if one.opcode == "convolution" else _dot)(one, lhs, rhs)
            elif is_kernel(one):
                declared = declared_cost(one)
                flops += declared.flops if declared else flops_of_call(one, kernel_flops)
        if flops:
            total += runs(module, name) * flops
    return total


def _dot(instruction: Instruction, lhs: Array, rhs: Array) -> float:
    contracted = _CONTRACTED.search(instruction.attributes)
    dims = [int(dim) for dim in contracted[1].split(",") if dim] if contracted else []
    return 2.0 * math.prod(instruction.arrays[0].dims) * math.prod(lhs.dims[dim] for dim in dims)


def _convolution(instruction: Instruction, lhs: Array, rhs: Array) -> float:
    """Taps that fall on padding or between dilated elements do not count: XLA:TPU writes batched products with them."""
    lhs_labels, rhs_labels, out_labels = _LABELS.search(instruction.attributes).groups()
    out = dict(zip(out_labels, instruction.arrays[0].dims, strict=True))
    left, right = dict(zip(lhs_labels, lhs.dims, strict=True)), dict(zip(rhs_labels, rhs.dims, strict=True))
    groups = _GROUPS.search(instruction.attributes)
    flops = 2.0 * out["b"] * out["f"] * right["i"] / (int(groups[1]) if groups else 1)
    for index, dim in enumerate(sorted(label for label in out if label.isdigit())):
        flops *= _taps(left[dim], right[dim], out[dim], instruction.attributes, index)
    return flops


def _taps(size: int, kernel: int, out: int, attributes: str, index: int) -> int:
    """Pairs of an output position and a kernel position that meet an element of the input, along one spatial dim."""

    def field(name: str, default: str) -> str:
        window = re.search(rf"window=\{{[^}}]*\b{name}=([\w\-]+)", attributes)
        return window[1].split("x")[index] if window else default

    stride, input_step, kernel_step = (int(field(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    padding = int(field("pad", "0_0").split("_")[0])
    taps = 0
    for position in range(kernel):
        # Elements of the input lie at multiples of input_step; the output meets start + n stride.
        start = position * kernel_step - padding
        taps += len(_meeting(start, stride, input_step, (size - 1) * input_step, out))
    return taps


def _meeting(start: int, stride: int, step: int, last: int, out: int) -> range:
    """The n in [0, out) for which start + n * stride is a multiple of `step` in [0, last]."""
    first = max(0, -(start // stride))
    end = min(out, (last - start) // stride + 1)
    period = step // math.gcd(stride, step)
    first = next((n for n in range(first, min(first + period, end)) if (start + n * stride) % step == 0), end)
    return range(first, end, period)
