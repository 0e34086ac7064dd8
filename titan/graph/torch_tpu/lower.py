"""The ATen ops of a step lowered by TorchTPU, as a graph whose segments are StableHLO."""

import dataclasses
import operator
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

import torch
import torch.fx
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from titan.graph._compat import LazyGraphModule
from titan.graph.ir.step_graph import StepGraph
from titan.graph.lowering.stablehlo_call import StableHloCall
from titan.graph.lowering.table import LoweringError
from titan.graph.torch_tpu.scopes import name_scopes
from titan.graph.torch_tpu.segment import Segment
from titan.graph.torch_tpu.split import Level, segment_of, split

_WORKER = "titan.graph.torch_tpu.worker"


def lower_by_torch_tpu(graph: StepGraph) -> StepGraph:
    """The step with every segment of ATen ops, in loops too, as one call of the StableHLO that TorchTPU makes of it.

    Collectives, kernels and loops stay as they are, for titan's own lowering: TorchTPU's process groups ask the TPU
    for its place in the slice when they are made, and its kernels are the same JAX functions as titan's.

    Raises:
      LoweringError: TorchTPU does not lower an op, or its process ended.
    """
    levels = {module: split(module.graph) for module in _modules(graph.module)}
    constants = {module: _constants(module) for module in levels}
    segments = [
        segment_of(level, constants[module]) for module, stages in levels.items() for level in stages if level.outputs
    ]
    calls = iter([StableHloCall(f"torch_tpu_{number}", _text(made)) for number, made in enumerate(_lower(segments))])
    rebuilt: dict[torch.fx.GraphModule, torch.fx.GraphModule] = {}
    for module, stages in levels.items():
        rebuilt[module] = _rebuild(module, stages, constants[module], calls)
    for module, copy in rebuilt.items():
        for node in copy.graph.find_nodes(op="get_attr"):
            body = operator.attrgetter(node.target)(module)
            if isinstance(body, torch.fx.GraphModule):
                copy.set_submodule(node.target, rebuilt[body])
    return dataclasses.replace(graph, module=rebuilt[graph.module])


def _modules(module: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """The module and the bodies of its loops."""
    return [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]


def _constants(module: torch.fx.GraphModule) -> dict[torch.fx.Node, torch.Tensor]:
    values = {node: operator.attrgetter(node.target)(module) for node in module.graph.find_nodes(op="get_attr")}
    return {node: value for node, value in values.items() if isinstance(value, torch.Tensor)}


def _rebuild(
    module: torch.fx.GraphModule,
    levels: Sequence[Level],
    constants: dict[torch.fx.Node, torch.Tensor],
    calls: Iterator[StableHloCall],
) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            copied[node] = graph.node_copy(node)
    for level in levels:
        for node in level.others:
            copied[node] = graph.node_copy(node, copied.__getitem__)
        if not level.outputs:
            continue
        call = graph.call_function(next(calls), tuple(copied[node] for node in level.inputs if node not in constants))
        call.meta["val"] = tuple(node.meta["val"] for node in level.outputs)
        for index, node in enumerate(level.outputs):
            copied[node] = graph.call_function(operator.getitem, (call, index))
            copied[node].meta = dict(node.meta)
    graph.node_copy(module.graph.output_node(), copied.__getitem__)
    return LazyGraphModule(module, graph)


def _text(artifact: bytes) -> str:
    with mlir.make_ir_context() as context:
        try:
            module = stablehlo.deserialize_portable_artifact(context, artifact)
        except ValueError as error:
            raise LoweringError("jaxlib cannot read the StableHLO of this TorchTPU, which may be newer") from error
        return name_scopes(module.operation.get_asm(enable_debug_info=True))


def _lower(segments: Sequence[Segment]) -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        source, target = pathlib.Path(folder, "segments"), pathlib.Path(folder, "stablehlo")
        source.write_bytes(pickle.dumps(list(segments)))
        # Not loaded by `import torch`, but by the worker when it needs it.
        environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-P", "-m", _WORKER, str(source), str(target)],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if done.returncode:
            last = (done.stderr.strip() or "it said nothing").splitlines()[-1]
            raise LoweringError(f"TorchTPU's process ended with code {done.returncode}: {last}")
        answer = pickle.loads(target.read_bytes())
    if isinstance(answer, str):
        raise LoweringError(answer)
    return answer
