"""The digest of a graph: equal for what computes the same, whatever it is called; different for all else."""

import copy

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from titan.graph.ir.digest import graph_digest


def traced(function, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*(torch.ones(shape, dtype=dtype) for shape in shapes))


def plain(x, y):
    return (x * 2.0 + y,)


REFERENCE = traced(plain, (2, 3), (2, 3))


def test_names_and_labels_do_not_count():
    other = copy.deepcopy(REFERENCE)
    for number, node in enumerate(other.graph.nodes):
        node.name = f"renamed_{number}"
        node.meta |= {"module_fqn": "layers.7", "region": "backward", "source": "elsewhere.py:1"}
    assert graph_digest(other) == graph_digest(REFERENCE)


@pytest.mark.parametrize(
    "other",
    [
        traced(plain, (2, 4), (2, 4)),
        traced(plain, (2, 3), (2, 3), dtype=torch.float64),
        traced(lambda x, y: (x * 2 + y,), (2, 3), (2, 3)),
        traced(lambda x, y: (x * -2.0 + y,), (2, 3), (2, 3)),
        traced(lambda x, y: (y * 2.0 + x,), (2, 3), (2, 3)),
        traced(lambda x, y: (x * 2.0 - y,), (2, 3), (2, 3)),
        traced(lambda x, y: (x * 2.0 + y, x), (2, 3), (2, 3)),
    ],
    ids=["shape", "dtype", "integer", "sign", "operands", "op", "results"],
)
def test_everything_that_computes_counts(other):
    assert graph_digest(other) != graph_digest(REFERENCE)


def test_values_of_constants_count():
    digests = set()
    for value in (1.0, 2.0, 1.0):
        module = torch.nn.Module()
        module.constant = torch.full((3,), value)
        graph = torch.fx.Graph()
        graph.output((graph.get_attr("constant"),))
        digests.add(graph_digest(torch.fx.GraphModule(module, graph)))
    assert len(digests) == 2
