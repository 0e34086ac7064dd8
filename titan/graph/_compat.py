"""The private names of PyTorch that this package uses. Checked with torch 2.13.0, which its wheel requires."""

import torch
import torch._functorch._activation_offloading.offload_ops  # noqa: F401  (registers torch.ops.ao)
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "LazyGraphModule",
    "current_autograd_node",
    "next_sequence_number",
    "is_in_backward",
]


def current_autograd_node() -> torch.autograd.graph.Node | None:
    """The node of autograd's graph that is being differentiated; None outside a backward pass."""
    return torch._C._current_autograd_node()


def is_in_backward() -> bool:
    """Whether a backward pass is under way, between its nodes too."""
    return current_autograd_node() is not None or torch._C._current_graph_task_id() != -1


def next_sequence_number() -> int:
    """The number that autograd will give its next node."""
    return torch.autograd._get_sequence_nr()
