"""`lower`: an FX graph of functional ATen ops becomes a function of JAX arrays, to be traced by jit or shard_map."""

import collections
import contextlib
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.fx.node import map_arg

from titan.graph._compat import FakeTensor
from titan.graph.ir.dialect import describe
from titan.graph.ir.region import PARAMETER_SCOPE
from titan.graph.ir.reversed_scans import find_reversed_scans
from titan.graph.lowering.dialect.control_flow import reversed_scan
from titan.graph.lowering.dialect.kernels import find_lowering
from titan.graph.lowering.dtypes import array_dtype, cast, kind, to_array
from titan.graph.lowering.stablehlo_call import StableHloCall
from titan.graph.lowering.table import Lowering, LoweringContext, LoweringError, TensorMeta, overload_name
from titan.kernels.target import Target, lowering_for


def lower(
    graph_module: torch.fx.GraphModule,
    *,
    matmul_precision: jax.lax.Precision = jax.lax.Precision.DEFAULT,
    target: Target | None = None,
) -> Callable[..., tuple[Any, ...]]:
    """The JAX form of a captured graph.

    The graph consists of placeholders, constants (`get_attr`), functional ops with a lowering, calls of StableHLO
    (`StableHloCall`), `operator.getitem`, and one output; every op carries its result's metadata in `node.meta["val"]`.
    Process group names are the names of mesh axes.

    Args:
      graph_module: the graph; it is read now and not kept.
      matmul_precision: of every dot and convolution. DEFAULT means one bfloat16 pass on TPU and exact float32 on CPU.
      target: what the program is for, where the best form of an op, or the implementation of a kernel, depends on it.
        None: not known; kernels take it from JAX's default device.

    Returns:
      A function of one array per placeholder (int64 as int32, float64 as float32) that returns the tuple of the graph's
      outputs. It is pure and meant to be called under `jax.jit`, inside `jax.shard_map` if the graph has collectives.

    Raises:
      LoweringError: now, for ops without a lowering (all are listed), missing or symbolic metadata, and constants that
        do not fit; when called, for arguments or results that disagree with the metadata, and a lowering that fails.
    """
    graph = graph_module.graph
    _check_all_supported(graph)
    constants, bodies = {}, {}
    for node in graph.find_nodes(op="get_attr"):
        value = operator.attrgetter(node.target)(graph_module)
        if isinstance(value, torch.fx.GraphModule):
            bodies[node] = lower(value, matmul_precision=matmul_precision, target=target)
        else:
            constants[node] = _constant(node, value)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    placeholder_metas = [_metas(node) for node in placeholders]
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    steps = _plan(graph, matmul_precision, target.platform if target else "")

    def run(*arrays: jax.Array) -> tuple[Any, ...]:
        if len(arrays) != len(placeholders):
            raise LoweringError(f"the graph takes {len(placeholders)} arrays and was called with {len(arrays)}")
        values: dict[torch.fx.Node, Any] = dict(bodies)
        for node, metas, array in zip(placeholders, placeholder_metas, arrays, strict=True):
            _check_argument(node, metas, array)
            values[node] = array
        values.update({node: jnp.asarray(constant) for node, constant in constants.items()})
        with lowering_for(target) if target else contextlib.nullcontext():
            for step in steps:
                values[step.node] = step.run(values)
                for dead in step.dead_after:
                    del values[dead]
        results = map_arg(output.args[0], values.__getitem__)
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)

    return run


@dataclasses.dataclass(frozen=True)
class _Step:
    """One op of the graph: all that does not depend on the arrays is found once, when the graph is lowered."""

    node: torch.fx.Node
    lowering: Lowering | None  # None for getitem, as is the context
    context: LoweringContext | None
    dead_after: tuple[torch.fx.Node, ...]

    def run(self, values: dict[torch.fx.Node, Any]) -> Any:
        args = map_arg(self.node.args, values.__getitem__)
        if self.lowering is None:
            return args[0][args[1]]
        kwargs = map_arg(self.node.kwargs, values.__getitem__)
        gather = PARAMETER_SCOPE if self.node.meta.get("parameter_gather") else None
        scope = "/".join(filter(None, (self.node.meta.get("region"), self.node.meta.get("module_fqn"), gather)))
        try:
            with jax.named_scope(scope) if scope else contextlib.nullcontext():
                result = self.lowering(self.context, *args, **kwargs)
                return self._checked(result)
        except LoweringError:
            raise
        except Exception as error:
            raise LoweringError(
                f"{describe(self.node)}: the lowering failed: {type(error).__name__}: {error}"
            ) from error

    def _checked(self, result: Any) -> Any:
        if not isinstance(result, (tuple, list)):
            return self._checked_array(result, self.context.out[0])
        if len(result) != len(self.context.out):
            raise LoweringError(
                f"{describe(self.node)}: {len(result)} results, but the metadata has {len(self.context.out)}"
            )
        return tuple(self._checked_array(array, meta) for array, meta in zip(result, self.context.out, strict=True))

    def _checked_array(self, array: jax.Array | None, meta: TensorMeta | None) -> jax.Array | None:
        if array is None or meta is None:
            if array is not None or meta is not None:
                raise LoweringError(f"{describe(self.node)}: result {array}, but the metadata says {meta}")
            return None
        dtype = meta.array_dtype
        if tuple(array.shape) != meta.shape or kind(array.dtype) != kind(dtype):
            raise LoweringError(
                f"{describe(self.node)}: the lowering gave {array.dtype}{list(array.shape)}, "
                f"but the graph's metadata says {dtype}{list(meta.shape)}"
            )
        return cast(array, dtype)


def _plan(graph: torch.fx.Graph, matmul_precision: jax.lax.Precision, platform: str) -> list[_Step]:
    last_use: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            last_use[used] = node
    dead_after = collections.defaultdict(list)
    for used, user in last_use.items():
        dead_after[user].append(used)
    reversed_scans, flips = find_reversed_scans(graph)
    steps = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        function, context = None, None
        if node.target is not operator.getitem:
            function = _lowering(node.target)
            if node in reversed_scans:
                function = reversed_scan
            elif node in flips:
                function = _as_it_is
            context = LoweringContext(
                out=_metas(node),
                matmul_precision=matmul_precision,
                platform=platform,
                is_first_transposed=bool(node.args)
                and isinstance(node.args[0], torch.fx.Node)
                and node.args[0].target is torch.ops.aten.t.default,
            )
        unused = () if node in last_use else (node,)
        steps.append(_Step(node, function, context, tuple(dead_after[node]) + unused))
    return steps


def _lowering(target: Any) -> Lowering | None:
    return target if isinstance(target, StableHloCall) else find_lowering(overload_name(target))


def _as_it_is(ctx: LoweringContext, tensor: jax.Array, *_: Any) -> jax.Array:
    return tensor


def _check_all_supported(graph: torch.fx.Graph) -> None:
    missing = collections.defaultdict(list)
    for node in graph.nodes:
        if node.op in ("call_module", "call_method"):
            raise LoweringError(f"{describe(node)}: {node.op} is not in the dialect; capture the graph with make_fx")
        if node.op == "call_function" and node.target is not operator.getitem and _lowering(node.target) is None:
            missing[overload_name(node.target)].append(node)
    if missing:
        lines = [f"{name}: {len(nodes)} times, first: {describe(nodes[0])}" for name, nodes in sorted(missing.items())]
        raise LoweringError("ops without a lowering (docs/extending.md says how to add one):\n  " + "\n  ".join(lines))


def _constant(node: torch.fx.Node, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        raise LoweringError(
            f"node {node.name}: the constant {node.target} is a {type(value).__name__}, not a tensor with values"
        )
    try:
        return to_array(value)
    except (TypeError, OverflowError) as error:
        raise LoweringError(f"node {node.name}: the constant {node.target}: {error}") from error


def _metas(node: torch.fx.Node) -> tuple[TensorMeta | None, ...]:
    if "val" not in node.meta:
        raise LoweringError(f"{describe(node)}: no metadata; the pass that made this node must set node.meta['val']")
    value = node.meta["val"]
    return tuple(_meta(node, entry) for entry in (value if isinstance(value, (tuple, list)) else [value]))


def _meta(node: torch.fx.Node, value: Any) -> TensorMeta | None:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        raise LoweringError(f"{describe(node)}: its result is a {type(value).__name__}, not a tensor")
    if not all(isinstance(size, int) for size in value.shape):
        raise LoweringError(f"{describe(node)}: its shape {list(value.shape)} is symbolic; capture with static shapes")
    try:
        array_dtype(value.dtype)
    except TypeError as error:
        raise LoweringError(f"{describe(node)}: {error}") from error
    return TensorMeta(tuple(value.shape), value.dtype)


def _check_argument(node: torch.fx.Node, metas: tuple[TensorMeta | None, ...], array: jax.Array) -> None:
    meta = metas[0]
    if tuple(array.shape) != meta.shape or array.dtype != meta.array_dtype:
        raise LoweringError(
            f"argument {node.name}: got {array.dtype}{list(array.shape)}, but the graph was captured with "
            f"{meta.array_dtype}{list(meta.shape)}"
        )
