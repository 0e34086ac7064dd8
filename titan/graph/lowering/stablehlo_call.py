"""A StableHLO module, written by another compiler, as an op of a graph: it is its own lowering."""

import jax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func, stablehlo
from jax.interpreters import mlir

from titan.graph.lowering.table import LoweringContext, LoweringError


class StableHloCall:
    """The target of a graph's node that calls a function given as StableHLO.

    Attributes:
      text: a module of which the function `main` is called. It takes the node's arguments and returns its results,
        always as a tuple; integers of 64 bits, which are 32 in the program around it, are converted.
    """

    def __init__(self, name: str, text: str):
        """Initializes the instance.

        Args:
        name: what the function is called in the graph and in the program.
        text: the module.
        """
        self.__name__ = name
        self.text = text

    def __call__(self, ctx: LoweringContext, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """The results; to be called while JAX traces.

        Raises:
          LoweringError: when the program is lowered: the text is no StableHLO that this jaxlib reads, or `main` has
            other arguments or results.
        """
        results = tuple(jax.ShapeDtypeStruct(meta.shape, meta.array_dtype) for meta in ctx.out)
        return tuple(_CALL.bind(*arrays, call=self, results=results))


_CALL = Primitive("stablehlo_call")
_CALL.multiple_results = True


@_CALL.def_abstract_eval
def _abstract(*_, call: StableHloCall, results: tuple[jax.ShapeDtypeStruct, ...]):
    return tuple(jax.core.ShapedArray(result.shape, result.dtype) for result in results)


def _lower(ctx: mlir.LoweringRuleContext, *arguments: ir.Value, call: StableHloCall, results):
    program = ctx.module_context
    try:
        module = ir.Module.parse(call.text)
    except ir.MLIRError as error:
        reason = " ".join(str(error).splitlines()[:2])  # what it was doing, and the first mistake
        raise LoweringError(f"{call.__name__}: jaxlib cannot read its StableHLO: {reason}") from error
    callee = ir.SymbolTable(module.operation)["main"].type
    result_types = [mlir.aval_to_ir_type(program, aval) for aval in ctx.avals_out]
    for what, given, wanted in (
        ("arguments", [value.type for value in arguments], callee.inputs),
        ("results", result_types, callee.results),
    ):
        if list(map(_shape, given)) != list(map(_shape, wanted)):
            raise LoweringError(
                f"{call.__name__}: the graph's {what} are {', '.join(map(str, given))}, "
                f"those of its StableHLO {', '.join(map(str, wanted))}"
            )
    name = mlir.merge_mlir_modules(program.module, call.__name__, module, dst_symtab=program.symbol_table)
    operands = [_convert(value, kind) for value, kind in zip(arguments, callee.inputs, strict=True)]
    made = func.CallOp(callee.results, ir.FlatSymbolRefAttr.get(name), operands).results
    return [_convert(value, kind) for value, kind in zip(made, result_types, strict=True)]


mlir.register_lowering(_CALL, _lower)


def _shape(kind: ir.Type) -> tuple[int, ...]:
    return tuple(ir.RankedTensorType(kind).shape)


def _convert(value: ir.Value, kind: ir.Type) -> ir.Value:
    return value if value.type == kind else stablehlo.convert(kind, value)
