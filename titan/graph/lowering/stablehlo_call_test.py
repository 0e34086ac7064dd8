"""StableHLO in a graph, against the same arithmetic in numpy."""

import jax
import numpy as np
import pytest
import torch

from titan.graph.lowering.lower import lower
from titan.graph.lowering.stablehlo_call import StableHloCall
from titan.graph.lowering.table import LoweringError

# Two results, the second of 64 bits, and a function besides main.
_TEXT = """
module {
  func.func @main(%x: tensor<2x3xf32>, %i: tensor<3xi64>) -> (tensor<3x2xf32>, tensor<3xi64>) {
    %0 = call @twice(%x) : (tensor<2x3xf32>) -> tensor<2x3xf32>
    %1 = stablehlo.transpose %0, dims = [1, 0] : (tensor<2x3xf32>) -> tensor<3x2xf32>
    %2 = stablehlo.multiply %i, %i : tensor<3xi64>
    return %1, %2 : tensor<3x2xf32>, tensor<3xi64>
  }
  func.func private @twice(%x: tensor<2x3xf32>) -> tensor<2x3xf32> {
    %0 = stablehlo.add %x, %x : tensor<2x3xf32>
    return %0 : tensor<2x3xf32>
  }
}
"""


def graph_of(*calls: StableHloCall, columns: int = 3) -> torch.fx.GraphModule:
    """Calls one after the other on the same arguments; the results of all."""
    graph = torch.fx.Graph()
    inputs = []
    for name, value in (("x", torch.empty(2, columns, device="meta")), ("i", torch.empty(3, device="meta").long())):
        inputs.append(graph.placeholder(name))
        inputs[-1].meta["val"] = value
    results = []
    for call in calls:
        node = graph.call_function(call, tuple(inputs))
        node.meta["val"] = (torch.empty(columns, 2, device="meta"), torch.empty(3, device="meta").long())
        results.append(node)
    graph.output(tuple(results))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


X, INDICES = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([3, -4, 5], np.int32)


def test_results_are_those_of_main_with_integers_of_32_bits():
    calls = StableHloCall("segment", _TEXT), StableHloCall("segment", _TEXT.replace("add %x", "multiply %x"))
    (sum_, squares), (product, _) = jax.jit(lower(graph_of(*calls)))(X, INDICES)
    np.testing.assert_array_equal(sum_, 2 * X.T)
    np.testing.assert_array_equal(product, (X * X).T)  # its own @twice, not the first call's
    np.testing.assert_array_equal(squares, INDICES * INDICES)
    assert squares.dtype == np.int32


def test_what_does_not_fit_is_refused_with_both_types():
    with pytest.raises(LoweringError, match=r"arguments are tensor<2x4xf32>, .* StableHLO tensor<2x3xf32>"):
        jax.jit(lower(graph_of(StableHloCall("segment", _TEXT), columns=4))).lower(
            np.zeros((2, 4), np.float32), INDICES
        )
    with pytest.raises(LoweringError, match="segment: jaxlib cannot read its StableHLO: .*no_such_op"):
        text = _TEXT.replace("stablehlo.add", "stablehlo.no_such_op")
        jax.jit(lower(graph_of(StableHloCall("segment", text)))).lower(X, INDICES)
