"""Transfers of activations between device and host memory, for executors that move them by themselves or not at all."""

import torch.fx

from titan.graph.ir.dialect import graphs_of


def remove_transfers(module: torch.fx.GraphModule) -> None:
    """Takes `ao.offload`, `ao.reload` and their waits out of a graph and its loops, in place: values stay as is."""
    for graph in graphs_of(module):
        for node in list(graph.nodes):
            if getattr(node.target, "namespace", "") == "ao":
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
