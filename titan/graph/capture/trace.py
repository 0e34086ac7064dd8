"""Capture: runs a step function on fake tensors as one rank of a fake world, and keeps what it did as a StepGraph."""

import dataclasses
from collections.abc import Callable

import torch
import torch.fx
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

from titan.graph._compat import FakeTensor, FakeTensorMode
from titan.graph.capture.attribution import Attribution, attribute_backward
from titan.graph.ir.dialect import DialectError, check_dialect, describe, graphs_of, group_argument
from titan.graph.ir.step_graph import StepGraph
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
                old = dict(zip(state, leaves[: len(state)], strict=True))
                with Attribution(step.module, step.loss_module) as attribution, attribution.hooks():
                    new, metrics = step.call(old, dict(zip(batch, leaves[len(state) :], strict=True)))
                _check_outputs(old, new, metrics)
                metric_names[:] = list(metrics)
                updates[:] = [bool(new)]
                return (*(new[name] for name in (state if new else ())), *metrics.values())

            with fx_traceback.preserve_node_meta():
                module = make_fx(flat_step)(*inputs)
        axis_of_group = _axis_of_group(device_mesh)
    for graph in graphs_of(module):
        attribute_backward(graph)
        _name_axes(graph, axis_of_group)
    for node, name in zip(module.graph.find_nodes(op="placeholder"), (*state, *batch), strict=True):
        node.meta["leaf"] = name
    check_dialect(module)
    module.recompile()
    outputs = module.graph.output_node().args[0]
    replicated = tuple(torch.distributed.tensor.Replicate() for _ in mesh.axis_names)
    metrics = {
        name: TensorLayout(tuple(node.meta["val"].shape), node.meta["val"].dtype, replicated)
        for name, node in zip(metric_names, outputs[len(outputs) - len(metric_names) :], strict=True)
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
