"""Registration of an op with TorchTPU, whose `torch.tpu.pallas.jax_op` compiles the JAX function for the chip."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from titan.kernels._compat import CustomOpDef
from titan.kernels.signature import Signature
from titan.kernels.target import Target, lowering_for

_TYPES = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "int[]": Sequence[int],
    "float[]": Sequence[float],
}


def torch_tpu_op(name: str, function: Callable[..., Any], signature: Signature) -> CustomOpDef:
    """The custom op of `function`, traced for the TPU that TorchTPU runs on.

    TorchTPU is in the process when importing torch has loaded it: `hasattr(torch, "tpu")`.

    Args:
      name: `namespace::name`.
      function: from arrays and attributes to an array or a NamedTuple of arrays.
      signature: of the op.
    """

    def for_tpu(*arrays: jax.Array | None, **attributes: Any) -> Any:
        with lowering_for(Target("tpu", torch.tpu.get_device_name())):
            results = signature.unpack(function(*arrays, **attributes))
        return results if len(results) > 1 else results[0]

    keyword, positional = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    num_results = len(signature.results)
    for_tpu.__signature__ = inspect.Signature(
        [
            inspect.Parameter(
                entry,
                positional,
                annotation=jax.Array | None if entry in signature.optional else jax.Array,
                default=None if entry in signature.omissible else inspect.Parameter.empty,
            )
            for entry in signature.inputs
        ]
        + [
            inspect.Parameter(
                entry, keyword, annotation=_TYPES[kind], default=signature.defaults.get(entry, inspect.Parameter.empty)
            )
            for entry, kind in signature.attributes.items()
        ],
        return_annotation=jax.Array if num_results == 1 else tuple[(jax.Array,) * num_results],
    )
    return torch.tpu.pallas.jax_op(name, for_tpu)
