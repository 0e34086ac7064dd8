"""The process in which TorchTPU lowers segments to StableHLO: it patches PyTorch, and so has a process of its own.

No TPU is needed, nor a client of one: TorchTPU records the ops of tensors that have no storage, and writes what it
recorded as StableHLO. The interface is that of torch_tpu 0.2.0; it is not a public one.
"""

import pickle
import sys
import types
from typing import Any

import torch
from torch.utils._pytree import tree_map

from titan.graph.torch_tpu.scopes import MARK
from titan.graph.torch_tpu.segment import Op, Ref, Segment


class SegmentError(Exception):
    """TorchTPU refused a segment; the text is one line."""


def main(source: str, target: str) -> int:
    """Reads pickled segments, and writes the StableHLO of each, pickled, or the message of a SegmentError."""
    from torch_tpu import _loader

    # It would note the version of the libtpu to run on, and refuses one of four parts, as jax pins it. Nothing runs.
    _loader._set_libtpu_version = lambda: None
    _loader._init_device("tpu")
    with open(source, "rb") as file:
        segments = pickle.load(file)
    try:
        answer = [lower_segment(segment) for segment in segments]
    except SegmentError as error:
        answer = str(error)
    with open(target, "wb") as file:
        pickle.dump(answer, file)
    return 0


def lower_segment(segment: Segment) -> bytes:
    """The StableHLO of a segment as a portable artifact, its function called `main`.

    Raises:
      SegmentError: TorchTPU does not lower one of its ops, or all of them together.
    """
    from torch_tpu._internal import execution_mode
    from torch_tpu._internal.compile import tpu_torch_compile as compiler

    arguments = [compiler.placeholder(list(entry.shape), entry.dtype, False) for entry in segment.inputs]
    compiler.push_enable_tracebacks(True)
    try:
        with execution_mode.set_eager_mode(execution_mode.EagerMode._INTERNAL_COMPILE_FX_GRAPH), torch.no_grad():
            values: dict[str, Any] = {entry.name: value for entry, value in zip(segment.inputs, arguments, strict=True)}
            values |= {name: compiler.make_constant_tensor(value) for name, value in segment.constants.items()}
            for op in segment.ops:
                values[op.name] = _run(op, values)
            # A result is written as its storage lies; and no result may be an argument itself.
            results = [values[name].clone(memory_format=torch.contiguous_format) for name in segment.outputs]
            try:
                module = compiler.build_mlir(result_tensors=results, argument_tensors=arguments)
            except Exception as error:
                ops = f"{segment.ops[0].description} to {segment.ops[-1].description}"
                raise SegmentError(f"TorchTPU does not lower {ops}: {_one_line(error)}") from error
            return compiler.serialize_mlir_portable_artifact(module)
    finally:
        compiler.pop_enable_tracebacks()


def _run(op: Op, values: dict[str, Any]) -> Any:
    args, kwargs = tree_map(lambda entry: _value(entry, values), (op.args, op.kwargs))
    if op.target == "getitem":
        return args[0][args[1]]
    namespace, name, overload = op.target.split(".")
    try:
        function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        makes_tensor = not any(isinstance(entry, torch.Tensor) for entry in torch.utils._pytree.tree_leaves(args))
        if makes_tensor and any(argument.name == "device" for argument in function._schema.arguments):
            kwargs["device"] = torch.device("tpu")
        return _call_in(op.scope)(function, args, kwargs)
    except Exception as error:
        raise SegmentError(f"TorchTPU does not lower {op.description}: {_one_line(error)}") from error


def _value(entry: Any, values: dict[str, Any]) -> Any:
    if isinstance(entry, Ref):
        return values[entry.name]
    return torch.device("tpu") if isinstance(entry, torch.device) else entry


def _call(function: Any, args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _call_in(scope: str) -> Any:
    """`_call`, in a file that is named after the scope: TorchTPU notes in what code it was called."""
    return types.FunctionType(_call.__code__.replace(co_filename=MARK + scope), globals())


def _one_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
