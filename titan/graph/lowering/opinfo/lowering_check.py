"""Holds recorded torch calls against their lowerings: graphs of many nodes, each run as one jitted program."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from titan.graph.lowering.dtypes import array_dtype, kind, to_array
from titan.graph.lowering.lower import lower
from titan.graph.lowering.opinfo.opinfo_samples import RecordedCall
from titan.graph.testing.xla_cpu import FAST_COMPILE

# Calls per program. One program per call would spend most of its time starting XLA; one for all would hide which call
# failed.
_CALLS_PER_PROGRAM = 64

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """|ours - expected| <= absolute + relative * |expected|."""

    relative: float
    absolute: float


# float32: both sides round every operation once, in an order of their own; that moves the last 4 bits. Narrow floats:
# one unit in the last place (2^-8 of the value for bfloat16), since a value near the middle of two is rounded either
# way, and as much again for torch.
_TOLERANCES = {
    np.dtype(np.float32): Tolerance(relative=2e-5, absolute=1e-5),
    np.dtype(np.float16): Tolerance(relative=2**-10, absolute=2**-12),
    array_dtype(torch.bfloat16): Tolerance(relative=2**-7, absolute=2**-9),
}

_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"

# OpInfo draws from -9 to 9, so that these sum products of some hundred: an absolute error of 1e-4 is the last bit of
# the largest term.
_LARGE_TERMS = Tolerance(relative=2e-5, absolute=1e-4)
# Attention rounds the probabilities to bfloat16 between its two products, torch before dividing by their sum and we
# after it.
_ROUNDED_PROBABILITIES = Tolerance(relative=2**-6, absolute=2**-6)
_SPECIAL_TOLERANCES = {
    ("aten.convolution.default", np.dtype(np.float32)): _LARGE_TERMS,
    ("aten.convolution_backward.default", np.dtype(np.float32)): _LARGE_TERMS,
    (f"{_FLASH}_backward.default", np.dtype(np.float32)): _LARGE_TERMS,
    (f"{_FLASH}_backward.default", array_dtype(torch.bfloat16)): _ROUNDED_PROBABILITIES,
    (f"{_FLASH}.default", array_dtype(torch.bfloat16)): _ROUNDED_PROBABILITIES,
}

# Memory that torch leaves uninitialised has no values to compare.
_UNDEFINED_VALUES = frozenset(
    f"aten.{name}"
    for name in (
        "empty.memory_format",
        "empty_strided.default",
        "empty_permuted.default",
        "empty_like.default",
        "new_empty.default",
        "new_empty_strided.default",
    )  # fmt: skip
)

# These give (values, indices) and may order equal values as they like: the indices are right if they lead to the
# values.
_FREE_ORDER_OF_EQUALS = frozenset({"aten.sort.default", "aten.topk.default"})


def exclusion(call: RecordedCall) -> str | None:
    """Why a call cannot be compared, or None. All are limits of compiled programs without 64-bit types."""
    tensors = [t for t in tree_leaves((call.args, call.kwargs, call.result)) if isinstance(t, torch.Tensor)]
    inputs = [t for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, torch.Tensor)]
    if any(t.dtype is torch.float64 for t in inputs):
        return "float64 inputs are float32 in the program; the float32 samples of the op hold the lowering"
    numbers = [n for n in tree_leaves((call.args, call.kwargs)) if isinstance(n, int)]
    if call.name not in _UNDEFINED_VALUES and any(_beyond_int32(t) for t in tensors):
        return "int64 values beyond int32"
    if call.name == "aten.full.default" and any(abs(n) >= 2**31 for n in numbers):
        return "int64 values beyond int32"
    if call.name == "aten.index.Tensor" or (call.name.startswith("aten.index_put") and call.args[2].numel() != 1):
        if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in call.args[1]):
            return "a bool mask as an index has a shape that depends on data"
    return None


def _beyond_int32(tensor: torch.Tensor) -> bool:
    if tensor.dtype is not torch.int64 or not tensor.numel():
        return False
    return int(tensor.max()) >= 2**31 or int(tensor.min()) < -(2**31)


def failures(calls: Sequence[RecordedCall]) -> list[str]:
    """One line per result for which a lowering does not give torch's values, dtype, shape and NaN placement."""
    found = []
    for first in range(0, len(calls), _CALLS_PER_PROGRAM):
        batch = calls[first : first + _CALLS_PER_PROGRAM]
        graph_module, inputs = graph_of(batch)
        program = jax.jit(lower(graph_module), compiler_options=FAST_COMPILE)
        results = program(*(to_array(tensor) for tensor in inputs))
        for call, result in zip(batch, results, strict=True):
            found += [f"{call.signature}: {problem}" for problem in _problems(call, result)]
    return found


def graph_of(calls: Sequence[RecordedCall]) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """A graph with one node per call, whose outputs are the calls' results, and the tensors it takes."""
    graph = torch.fx.Graph()
    inputs: list[torch.Tensor] = []

    def placeholder(tensor: torch.Tensor) -> torch.fx.Node:
        node = graph.placeholder(f"x{len(inputs)}")
        node.meta["val"] = tensor.to("meta")
        inputs.append(tensor)
        return node

    arguments = [tree_map_only(torch.Tensor, placeholder, (call.args, call.kwargs)) for call in calls]
    nodes = []
    for call, (args, kwargs) in zip(calls, arguments, strict=True):
        node = graph.call_function(call.target, args, kwargs)
        node.meta["val"] = tree_map_only(torch.Tensor, lambda t: t.to("meta"), call.result)
        nodes.append(node)
    graph.output(tuple(nodes))
    return torch.fx.GraphModule(torch.nn.Module(), graph), inputs


def _problems(call: RecordedCall, result: Any) -> Iterator[str]:
    ours, torchs = _leaves(result), _leaves(call.result)
    assert len(ours) == len(torchs), call.signature
    if call.name in _FREE_ORDER_OF_EQUALS:
        yield from _order_problems(call, np.asarray(ours[0]), np.asarray(ours[1]))
        ours, torchs = ours[:1], torchs[:1]
    exact = None
    for i, (array, tensor) in enumerate(zip(ours, torchs, strict=True)):
        if array is None and (tensor is None or not tensor.numel()):
            continue
        array = np.asarray(array)
        if array.shape != tuple(tensor.shape) or array.dtype != array_dtype(tensor.dtype):
            yield f"{array.dtype}{array.shape} instead of {tensor.dtype}{tuple(tensor.shape)}"
            continue
        if call.name in _UNDEFINED_VALUES:
            continue
        wrong = ~_close(call, array, to_array(tensor))
        if wrong.any() and kind(array.dtype) == "float":
            # Some of torch's kernels round intermediates, or cancel: then torch in float64 tells who is right, element
            # by element.
            exact = exact or _leaves(_in_float64(call))
            wrong &= ~_close(call, array, to_array(exact[i].to(tensor.dtype)))
        if wrong.any():
            theirs = to_array(tensor)[wrong][:4]
            yield f"{wrong.sum()} of {wrong.size} values differ: {array[wrong][:4]} instead of {theirs}"


def _leaves(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _in_float64(call: RecordedCall) -> Any:
    def widen(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype in _FLOATS:
            return leaf.double()
        return torch.float64 if isinstance(leaf, torch.dtype) and leaf in _FLOATS else leaf

    args, kwargs = tree_map(widen, (call.args, call.kwargs))
    return call.target(*args, **kwargs)


def _close(call: RecordedCall, ours: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Element by element: equal, both NaN, or within the tolerance of the dtype."""
    if kind(ours.dtype) in ("bool", "int"):
        return np.asarray(ours == expected)
    if kind(ours.dtype) == "complex":
        ours, expected = ours.view(np.float32), expected.view(np.float32)
    tolerance = _SPECIAL_TOLERANCES.get((call.name, ours.dtype), _TOLERANCES[ours.dtype])
    with np.errstate(invalid="ignore"):  # a signalling NaN
        ours, expected = ours.astype(np.float64), expected.astype(np.float64)
    return np.isclose(ours, expected, rtol=tolerance.relative, atol=tolerance.absolute, equal_nan=True)


def _order_problems(call: RecordedCall, values: np.ndarray, indices: np.ndarray) -> Iterator[str]:
    x = to_array(call.args[0])
    dim = (*call.args[2 if call.name == "aten.topk.default" else 1 :], -1)[0]
    if x.ndim == 0:
        return
    if not np.array_equal(np.take_along_axis(x, indices, axis=dim), values, equal_nan=kind(x.dtype) == "float"):
        yield "the indices do not lead to the values"
    if (np.diff(np.sort(indices, axis=dim), axis=dim) == 0).any():
        yield "an index occurs twice"
