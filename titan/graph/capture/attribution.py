"""Attribution: every op of a capture is labelled with where it comes from."""

import contextlib
import contextvars
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx
from torch import nn
from torch.fx import traceback as fx_traceback
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan.graph._compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    current_autograd_node,
    is_in_backward,
    next_sequence_number,
)
from titan.graph.ir.dialect import DialectError, location, op_name
from titan.graph.ir.region import current_region

_current: contextvars.ContextVar["Attribution | None"] = contextvars.ContextVar("attribution", default=None)


def current_attribution() -> "Attribution | None":
    """That of the capture that is going on; None outside of one."""
    return _current.get()


class Attribution(TorchDispatchMode):
    """Labels each op with its region, module, source line and autograd sequence number as it is traced.

    The innermost mode sees an op first, so that a trace within the trace must enter the mode once more.
    """

    supports_higher_order_operators = True

    def __init__(self, module: nn.Module, loss_module: str):
        """Initializes the instance.

        Args:
        module: the model, whose submodules' names are the labels. A submodule with the attribute `is_anonymous` is left
          out of the names of those within it.
        loss_module: name of the submodule whose ops are of the region `loss`; empty where there is none.
        """
        super().__init__()
        self._module, self._loss_module = module, loss_module
        self._stack: list[str] = []

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Follows which module's forward is running."""

        def leave(*_) -> None:
            self._stack.pop()

        handles = []
        token = _current.set(self)
        for name, submodule in _labelled_modules(self._module):
            handles.append(submodule.register_forward_pre_hook(lambda *_, name=name: self._stack.append(name)))
            handles.append(submodule.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            _current.reset(token)
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        label = self.label()
        with fx_traceback.annotate(label):
            try:
                return func(*args, **(kwargs or {}))
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise DialectError(
                    f"{_where(func, label)}: its shape, or its result as a Python number, depends on values; a step "
                    "has static shapes and chooses between values by torch.where"
                ) from error
            except AssertionError as error:  # FakeTensorMode's refusal of a real tensor
                foreign = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) in (torch.Tensor, nn.Parameter)]
                if not foreign:
                    raise
                raise DialectError(
                    f"{_where(func, label)}: uses a tensor of shape {list(foreign[0].shape)} that the step neither "
                    "takes nor computes; pass it in the state or the batch"
                ) from error

    def label(self) -> dict[str, Any]:
        """The label of an op that is traced now."""
        node, in_backward = current_autograd_node(), is_in_backward()
        in_loss = bool(self._loss_module) and self._loss_module in self._stack
        return {
            "region": "backward" if in_backward else "loss" if in_loss else current_region(),
            "module_fqn": self._stack[-1] if self._stack else "",
            "source": "" if in_backward else _source_line(),
            # The number of the autograd node that this op differentiates, or that differentiates this op.
            "sequence": next_sequence_number() - 1 if node is None else node._sequence_nr(),
            "is_backward": in_backward,
        }


def _labelled_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    anonymous = {name for name, submodule in module.named_modules() if getattr(submodule, "is_anonymous", False)}
    for name, submodule in module.named_modules():
        segments = name.split(".")
        yield ".".join(s for i, s in enumerate(segments) if ".".join(segments[: i + 1]) not in anonymous), submodule


def _where(func: Any, label: dict[str, Any]) -> str:
    return op_name(func) + location(label["module_fqn"], label["source"])


_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN_FILES = (__file__, os.path.join(os.path.dirname(__file__), "scan_layers.py"))


def _source_line() -> str:
    """The innermost line of code outside PyTorch and the tracing itself, as "file:line"."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename not in _OWN_FILES and not filename.startswith((_TORCH, "<")):
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def attribute_backward(graph: torch.fx.Graph) -> None:
    """Spreads the labels into `meta`; a backward op takes module and source of the op that it differentiates.

    What has been attributed before stays as it is. Annotations that are not by `Attribution` become `meta` too.
    """
    forward: dict[int, dict] = {}
    for node in graph.nodes:
        label = dict(node.meta.pop("custom", {}))
        if not label and "region" in node.meta:
            continue
        node.meta.update({key: value for key, value in label.items() if key not in _LABELS})
        if label and not label["is_backward"]:
            # The first op under a sequence number created the autograd node; later ones were not differentiable.
            forward.setdefault(label["sequence"], label)
        origin = label
        if label.get("is_backward"):
            # Numbers without an op of their own are autograd functions around the next op.
            origin = next((forward[n] for n in range(label["sequence"], label["sequence"] + 8) if n in forward), label)
        node.meta["region"] = label.get("region", "")
        node.meta["module_fqn"] = origin.get("module_fqn", "")
        node.meta["source"] = origin.get("source", "")


_LABELS = ("region", "module_fqn", "source", "sequence", "is_backward")
