"""Small steps for the tests of capture, the SPMD check and the passes."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan.graph.capture.trace import StepFunction, Tensors, capture
from titan.graph.ir.region import region
from titan.graph.ir.step_graph import StepGraph
from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec
from titan.parallel.simple_fsdp import ShardingPolicy, fsdp_placements, simple_fsdp

ONE = MeshSpec((), ())
HSDP = MeshSpec(("dp_replicate", "dp_shard"), (2, 4))


class _SquaredError(nn.Module):
    def forward(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (y - target).square().sum()


class TinyModel(nn.Module):
    """Its layer `first` is used twice; `loss` is the loss module."""

    def __init__(self, dim: int):
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList([nn.Linear(dim, dim, bias=False), nn.LayerNorm(dim)])
        self.loss = _SquaredError()

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).tanh()
        return self.loss(self.first(x), target)


def training_layouts(mesh: MeshSpec, dim: int) -> tuple[dict[str, TensorLayout], dict[str, TensorLayout]]:
    """State and batch of the training step."""
    with torch.device("meta"):
        weights = dict(TinyModel(dim).named_parameters())
    state = {
        name: TensorLayout(tuple(w.shape), w.dtype, fsdp_placements(tuple(w.shape), mesh, ShardingPolicy()))
        for name, w in weights.items()
    }
    rows = TensorLayout((16, dim), torch.float32, tuple(Shard(0) for _ in mesh.axis_names))
    return state, {"x": rows, "target": rows}


def training_step(device_mesh: DeviceMesh | None, layouts: dict[str, TensorLayout], dim: int) -> StepFunction:
    """Gradient descent of TinyModel under SimpleFSDP; the loss is summed over the ranks."""
    with torch.device("meta"):
        model = TinyModel(dim)
    if device_mesh:
        simple_fsdp(model, device_mesh)

    def weight(local: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
        if device_mesh:
            stride = torch.empty(layout.shape, device="meta").stride()
            shape = torch.Size(layout.shape)
            return DTensor.from_local(
                local.detach(), device_mesh, layout.placements, run_check=False, shape=shape, stride=stride
            ).requires_grad_()
        return local.detach().requires_grad_()

    def call(state: Tensors, batch: Tensors) -> tuple[Tensors, Tensors]:
        weights = {name: weight(state[name], layout) for name, layout in layouts.items()}
        loss = torch.func.functional_call(model, weights, (batch["x"], batch["target"]))
        grads = torch.autograd.grad(loss, list(weights.values()))
        with region("optimizer"):
            local = [grad.to_local() if device_mesh else grad for grad in grads]
            new = {name: state[name] - 0.1 * grad for name, grad in zip(state, local, strict=True)}
        loss = loss.detach()
        for axis in device_mesh.mesh_dim_names if device_mesh else ():
            loss = all_reduce(loss, device_mesh, axis)
        return new, {"loss": loss}

    return StepFunction(call, model, loss_module="loss")


def capture_training(mesh: MeshSpec, *, rank: int = 0, dim: int = 8) -> StepGraph:
    """The captured training step."""
    state, batch = training_layouts(mesh, dim)
    return capture(lambda device_mesh: training_step(device_mesh, state, dim), state, batch, mesh, rank=rank)


def capture_metric(
    function: Callable[[torch.Tensor, DeviceMesh | None], torch.Tensor], mesh: MeshSpec = ONE, *, rank: int = 0
) -> StepGraph:
    """An evaluation step of a replicated input [8, 8] float32; `function` makes its metric in the module `inner`."""
    model = nn.Module()
    model.inner = nn.Module()

    def make_step(device_mesh: DeviceMesh | None) -> StepFunction:
        model.inner.forward = lambda x: function(x, device_mesh)
        return StepFunction(lambda state, batch: ({}, {"metric": model.inner(state["x"])}), model)

    layout = TensorLayout((8, 8), torch.float32, tuple(Replicate() for _ in mesh.axis_names))
    return capture(make_step, {"x": layout}, {}, mesh, rank=rank)


def all_reduce(tensor: torch.Tensor, device_mesh: DeviceMesh, axis: str) -> torch.Tensor:
    """The sum over a mesh axis, as an op of the graph."""
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(tensor, "sum", device_mesh.get_group(axis).group_name))


def ops(graph: StepGraph) -> list[torch.fx.Node]:
    """The nodes that compute something."""
    return [node for node in graph.module.graph.nodes if node.op == "call_function"]
