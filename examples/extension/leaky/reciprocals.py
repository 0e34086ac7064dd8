"""A graph pass: a division of a tensor by a number becomes a product with its reciprocal, where that is exact."""

import math

import torch

from titan.graph.ir.step_graph import StepGraph

aten = torch.ops.aten


def reciprocals(graph: StepGraph) -> StepGraph:
    """Divisions by powers of two as products, which TPUs have a unit for."""
    graph = graph.copy()  # a pass may not change what it is given
    for node in graph.module.graph.nodes:
        if node.target is aten.div.Tensor and isinstance(node.args[1], (int, float)):
            fraction, _ = math.frexp(node.args[1])
            if abs(fraction) == 0.5:
                node.target = aten.mul.Tensor
                node.args = (node.args[0], 1 / node.args[1])
    return graph
