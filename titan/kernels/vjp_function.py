"""The gradient function of a JAX function, derived by `jax.vjp` and annotated for `jax_op`."""

import inspect
import typing
from collections.abc import Callable
from typing import Any

import jax

from titan.kernels.signature import signature_of


def vjp_function(name: str, function: Callable[..., Any], differentiable: tuple[str, ...] = ()) -> Callable[..., Any]:
    """The function from the inputs of `function` and `grad_<result>` for each result to the gradients of its inputs.

    It computes the forward again. Its attributes are those of `function`, its result is a NamedTuple with a field for
    each differentiable input.

    Args:
      name: of the op, for messages.
      function: annotated as `jax_op` asks for.
      differentiable: the inputs that have a gradient; empty: all that are not optional.

    Raises:
      ValueError: `differentiable` names what is no input or an optional one.
      TypeError: when called with a differentiable input that is no float.
    """
    forward = signature_of(name, function)
    wanted = differentiable or tuple(entry for entry in forward.inputs if entry not in forward.optional)
    for entry in wanted:
        if entry not in forward.inputs:
            raise ValueError(f"{name}: differentiable names {entry!r}, which is no input")
        if entry in forward.optional:
            raise ValueError(f"{name}: differentiable names {entry!r}, which may be None: give a backward of its own")
    grads = tuple(f"grad_{result}" for result in forward.results)
    gradients_type = typing.NamedTuple("Gradients", [(entry, jax.Array) for entry in wanted])

    def gradient(*arrays: jax.Array | None, **attributes: Any) -> Any:
        arguments = dict(zip((*forward.inputs, *grads), arrays, strict=True))
        for entry in wanted:
            if not jax.numpy.issubdtype(arguments[entry].dtype, jax.numpy.floating):
                raise TypeError(
                    f"{name}: {entry} is {arguments[entry].dtype} and has no gradient: name the inputs that have one, "
                    "e.g. differentiable=('x',)"
                )

        def of_wanted(*values: jax.Array) -> tuple[jax.Array, ...]:
            inputs = {**arguments, **dict(zip(wanted, values, strict=True))}
            return forward.unpack(function(*(inputs[entry] for entry in forward.inputs), **attributes))

        _, vjp = jax.vjp(of_wanted, *(arguments[entry] for entry in wanted))
        return gradients_type(*vjp(tuple(arguments[grad] for grad in grads)))

    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    gradient.__signature__ = inspect.Signature(
        [parameters[entry].replace(default=inspect.Parameter.empty) for entry in forward.inputs]
        + [inspect.Parameter(grad, inspect.Parameter.POSITIONAL_OR_KEYWORD) for grad in grads]
        + [parameters[entry] for entry in forward.attributes]
    )
    gradient.__annotations__ = {
        **{entry: hints[entry] for entry in (*forward.inputs, *forward.attributes)},
        **dict.fromkeys(grads, jax.Array),
        "return": gradients_type,
    }
    return gradient
