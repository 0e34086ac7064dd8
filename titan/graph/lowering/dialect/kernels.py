"""Kernels in a graph: a titan custom op made by `jax_op` is its own lowering, the JAX function it was made of."""

from typing import Any

from titan.graph.lowering.ops import TABLE
from titan.graph.lowering.table import Lowering, LoweringContext
from titan.kernels.jax_op import OPS


def find_lowering(name: str) -> Lowering | None:
    """The lowering of an overload (`namespace.op.overload`): that of the table, else that of the kernel of this name.

    Kernels are looked up when a graph is lowered: a graph that names one was captured by code that had imported it.
    """
    if name in TABLE:
        return TABLE[name]
    namespace, op, _ = name.split(".") if name.count(".") == 2 else ("", "", "")
    kernel = OPS.get(f"{namespace}::{op}")
    if kernel is None:
        return None

    def call(ctx: LoweringContext, *arrays: Any, **attributes: Any) -> Any:
        attributes = {key: tuple(value) if isinstance(value, list) else value for key, value in attributes.items()}
        results = kernel.signature.unpack(kernel.jax(*arrays, **attributes))
        return results if len(results) > 1 else results[0]

    return call
