"""Capture: runs a step function on fake tensors as one rank of a fake world, and keeps what it did as a StepGraph."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan.graph.dialect import DialectError, check_dialect, describe, graphs_of, group_argument, location, op_name
from titan.graph.region import current_region
from titan.graph.step_graph import StepGraph
from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec, fake_world

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class StepFunction:
    """A step as a plain function of tensors.

    Attributes:
      call: `(state, batch) -> (new_state, metrics)`, dicts of this rank's local tensors. It must be functional: it
        returns new tensors and writes to none. An evaluation step returns an empty new state. Metrics are equal on all
        ranks.
      module: the model that it runs, whose module names label the ops.
      loss_module: the name of the submodule whose ops are of the region `loss`; empty where there is none.
    """

    call: Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]
    module: nn.Module
    loss_module: str = ""


def capture(
    make_step: Callable[[DeviceMesh | None], StepFunction],
    state: dict[str, TensorLayout],
    batch: dict[str, TensorLayout],
    mesh: MeshSpec,
    *,
    rank: int = 0,
) -> StepGraph:
    """Traces one rank's step into a graph. Nothing of the model's size is allocated.

    Args:
      make_step: builds the step for a DeviceMesh, or for None when the mesh is one device.
      state: layouts of the persistent tensors.
      batch: layouts of the per-call tensors.
      mesh: the target mesh; axes of size 1 must have been removed.
      rank: the rank to capture as.

    Raises:
      DialectError: the step does what a step graph cannot hold.
      ValueError: the new state differs from the old in names, shapes or dtypes, an output is no plain tensor, or the
        model has no such loss module.
    """
    with fake_world(mesh, rank) as device_mesh:
        step = make_step(device_mesh)
        if step.loss_module and step.loss_module not in dict(step.module.named_modules()):
            raise ValueError(f"the model has no submodule {step.loss_module}, which is to be the loss")
        with FakeTensorMode(allow_non_fake_inputs=False):
            # Each input is its own tensor object: make_fx would merge two placeholders that share one.
            inputs = [_fake(layout, mesh) for layout in (*state.values(), *batch.values())]
            metric_names: list[str] = []
            updates: list[bool] = []

            def flat_step(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
                old = dict(zip(state, leaves[: len(state)]))
                with _Attribution(step) as attribution, attribution.hooks():
                    new, metrics = step.call(old, dict(zip(batch, leaves[len(state) :])))
                _check_outputs(old, new, metrics)
                metric_names[:] = list(metrics)
                updates[:] = [bool(new)]
                return (*(new[name] for name in (state if new else ())), *metrics.values())

            with fx_traceback.preserve_node_meta():
                module = make_fx(flat_step)(*inputs)
        axis_of_group = _axis_of_group(device_mesh)
    for graph in graphs_of(module):
        _attribute_backward(graph)
        _name_axes(graph, axis_of_group)
    for node, name in zip(module.graph.find_nodes(op="placeholder"), (*state, *batch), strict=True):
        node.meta["leaf"] = name
    check_dialect(module)
    module.recompile()
    outputs = module.graph.output_node().args[0]
    replicated = tuple(torch.distributed.tensor.Replicate() for _ in mesh.axis_names)
    metrics = {
        name: TensorLayout(tuple(node.meta["val"].shape), node.meta["val"].dtype, replicated)
        for name, node in zip(metric_names, outputs[len(outputs) - len(metric_names) :])
    }
    return StepGraph(module, mesh, dict(state), dict(batch), metrics, updates[0])


def _fake(layout: TensorLayout, mesh: MeshSpec) -> torch.Tensor:
    return torch.empty(layout.local_shape(mesh), dtype=layout.dtype)


def _check_outputs(old: Tensors, new: Tensors, metrics: Tensors) -> None:
    for name, value in (*new.items(), *metrics.items()):
        if not isinstance(value, FakeTensor):
            raise ValueError(
                f"the step returns {name} as a {type(value).__name__}; it must be a plain tensor that the step computes"
            )
    if not new:
        return
    if set(old) != set(new):
        raise ValueError(f"the step changed the state's names: {sorted(set(old) ^ set(new))}")
    for name, tensor in old.items():
        if tensor.shape != new[name].shape or tensor.dtype != new[name].dtype:
            raise ValueError(
                f"the step changed {name} from {tensor.dtype}{list(tensor.shape)} "
                f"to {new[name].dtype}{list(new[name].shape)}"
            )


class _Attribution(TorchDispatchMode):
    """Labels each op with its region, module, source line and autograd sequence number as it is traced."""

    supports_higher_order_operators = True

    def __init__(self, step: StepFunction):
        super().__init__()
        self._step = step
        self._stack: list[str] = []

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        def leave(*_) -> None:
            self._stack.pop()

        handles = []
        for name, submodule in self._step.module.named_modules():
            handles.append(submodule.register_forward_pre_hook(lambda *_, name=name: self._stack.append(name)))
            handles.append(submodule.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        label = self._label()
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

    def _label(self) -> dict[str, Any]:
        node = torch._C._current_autograd_node()
        in_backward = node is not None or torch._C._current_graph_task_id() != -1
        in_loss = bool(self._step.loss_module) and self._step.loss_module in self._stack
        return {
            "region": "backward" if in_backward else "loss" if in_loss else current_region(),
            "module_fqn": self._stack[-1] if self._stack else "",
            "source": "" if in_backward else _source_line(),
            # The number of the autograd node that this op differentiates, or that differentiates this op.
            "sequence": torch.autograd._get_sequence_nr() - 1 if node is None else node._sequence_nr(),
            "is_backward": in_backward,
        }


def _where(func: Any, label: dict[str, Any]) -> str:
    return op_name(func) + location(label["module_fqn"], label["source"])


_TORCH = os.path.dirname(torch.__file__) + os.sep


def _source_line() -> str:
    """The innermost line of code outside PyTorch and this file, as "file:line"."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename != __file__ and not filename.startswith((_TORCH, "<")):
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _attribute_backward(graph: torch.fx.Graph) -> None:
    """Spreads the labels into `meta`; a backward op takes module and source of the op that it differentiates."""
    forward: dict[int, dict] = {}
    for node in graph.nodes:
        label = node.meta.pop("custom", {})
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


def _axis_of_group(mesh: DeviceMesh | None) -> dict[str, str]:
    if mesh is None:
        return {}
    return {mesh.get_group(name).group_name: name for name in mesh.mesh_dim_names}


def _name_axes(graph: torch.fx.Graph, axis_of_group: dict[str, str]) -> None:
    """Replaces process group names, which mean nothing outside this process, by mesh axis names."""
    for node in graph.nodes:
        position = group_argument(node)
        if position is None:
            continue
        if node.args[position] not in axis_of_group:
            raise DialectError(
                f"{describe(node)}: communicates over process group {node.args[position]}, which is no axis of the mesh"
            )
        node.update_arg(position, axis_of_group[node.args[position]])
