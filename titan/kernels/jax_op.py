"""`@jax_op`: a JAX function becomes a PyTorch custom op.

    class Gradients(NamedTuple):
        x: jax.Array

    @jax_op("titan::double_backward", backward=None)
    def double_backward(grad_out: jax.Array, *, factor: float) -> Gradients:
        return Gradients(grad_out * factor)

    @jax_op("titan::double", backward=double_backward)
    def double(x: jax.Array, *, factor: float = 2.0) -> jax.Array:
        return x * factor

`double(tensor)` is a torch op with shapes for fake tensors, autograd, and execution on CPU tensors through JAX; the
`xla` executor takes `double.jax(array)` into its program, where nothing of PyTorch is left. With TorchTPU present the
op is registered by its `torch.tpu.pallas.jax_op`, under the same name.

An op may have further implementations, such as a Pallas kernel for TPUs:

    @double.implementation("mosaic", platforms=("tpu",), pallas=True)
    def double_mosaic(x, *, factor): ...

The target at lowering chooses among them, and the attribute `implementation`, which every op has, overrides it.
"""

import contextlib
import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import torch
from torch.autograd.forward_ad import unpack_dual

from titan.kernels._compat import CustomOpDef
from titan.kernels.arrays import abstract_array, to_array, to_tensor, torch_dtype
from titan.kernels.signature import Signature, signature_of
from titan.kernels.target import Target, current_target, lowering_for
from titan.kernels.torch_tpu_op import torch_tpu_op
from titan.kernels.vjp_function import vjp_function

_log = logging.getLogger(__name__)

AUTO = "auto"
DEFAULT_IMPLEMENTATION = "xla"

AbstractArrays = tuple[jax.ShapeDtypeStruct | None, ...]
Attributes = tuple[tuple[str, Any], ...]

_OPS: dict[str, "JaxOp"] = {}

OPS: Mapping[str, "JaxOp"] = MappingProxyType(_OPS)
"""Every op made here by its name, `titan::double`."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
      name: as the attribute `implementation` names it.
      function: from arrays and attributes to arrays.
      platforms: where it is chosen unasked.
      pallas: whether it calls Pallas TPU kernels, which other platforms interpret.
    """

    name: str
    function: Callable[..., Any]
    platforms: tuple[str, ...] = ()
    pallas: bool = False


class JaxOp:
    """A JAX function as a torch custom op; made by `jax_op`.

    Attributes:
      name: `namespace::name`.
      signature: names of inputs, attributes and results.
      backward: the op of its gradients, or None if it has none.
      memory_kind: of its results for memory policies: "attention", "matmul", or None.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], backward: "JaxOp | None", *, memory_kind: str | None = None
    ):
        self.name = name
        self.memory_kind = memory_kind
        self.signature = signature_of(name, function)
        if "implementation" in self.signature.attributes:
            raise ValueError(f"{name}: every op has an attribute implementation of its own; name this one otherwise")
        self.backward = backward
        self.__doc__ = function.__doc__
        self._implementations = {DEFAULT_IMPLEMENTATION: Implementation(DEFAULT_IMPLEMENTATION, function)}
        self._compiled = functools.cache(self._compile)
        self._result_shapes = functools.cache(self._eval_shape)
        self._op = self._register()

    def implementation(
        self, name: str, *, platforms: tuple[str, ...] = (), pallas: bool = False
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Enters the decorated function, of the same signature, as a further implementation.

        Args:
          name: what the attribute `implementation` calls it.
          platforms: JAX platforms on which "auto" means this one.
          pallas: it calls Pallas TPU kernels; on other platforms it runs in their interpreter.

        Raises:
          ValueError: the name is taken, another implementation is the automatic one of a platform, or the backward op
            has no implementation of this name.
          TypeError: the function is called otherwise than the op.
        """

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            if name in self._implementations or name == AUTO:
                raise ValueError(f"{self.name} has an implementation {name!r} already")
            if self.backward is not None and name not in self.backward.implementations:
                raise ValueError(f"{self.name}: give {self.backward.name} an implementation {name!r} first")
            for other in self._implementations.values():
                for platform in set(platforms) & set(other.platforms):
                    raise ValueError(f"{self.name}: both {other.name!r} and {name!r} claim the platform {platform}")
            if not self.signature.same_call(signature_of(f"{self.name} ({name})", function)):
                raise TypeError(f"{self.name}: implementation {name!r} does not have the op's signature")
            self._implementations[name] = Implementation(name, function, platforms, pallas)
            return function

        return register

    @property
    def implementations(self) -> tuple[str, ...]:
        """The names that the attribute `implementation` may have, besides "auto"."""
        return tuple(self._implementations)

    def choose(self, implementation: str, platform: str) -> Implementation:
        """The implementation that a name stands for on a platform.

        Raises:
          ValueError: the op has none of this name.
        """
        if implementation == AUTO:
            for candidate in self._implementations.values():
                if platform in candidate.platforms:
                    return candidate
            return self._implementations[DEFAULT_IMPLEMENTATION]
        if implementation not in self._implementations:
            names = ", ".join((AUTO, *self._implementations))
            raise ValueError(f"{self.name} has no implementation {implementation!r}: choose among {names}")
        return self._implementations[implementation]

    def __call__(self, *tensors: torch.Tensor | None, **attributes: Any) -> Any:
        """The op on tensors.

        Returns:
          One tensor, or as many as the function returns, in its NamedTuple.

        Raises:
          ValueError: there is no such implementation.
          TypeError: a tensor has a dtype that no kernel takes, or is None where it must not be.
          NotImplementedError: under `torch.func.vmap` and in forward-mode differentiation.
        """
        if any(tensor is not None and unpack_dual(tensor).tangent is not None for tensor in tensors):
            # PyTorch would go on with a derivative of zero.
            raise NotImplementedError(f"{self.name} has no forward-mode derivative: use reverse mode")
        result = self._op(*tensors, **attributes)
        return self.signature.result_type(*_as_tuple(result)) if self.signature.result_type else result

    def jax(self, *arrays: jax.Array | None, implementation: str = AUTO, **attributes: Any) -> Any:
        """The op on arrays, for use while JAX traces; the implementation is that of `current_target()`."""
        target = current_target()
        chosen = self.choose(implementation, target.platform)
        interpreted = chosen.pallas and target.platform != "tpu"
        _log_choice(self.name, chosen.name, target.platform, interpreted)
        # Kernels are written for JAX's 32-bit mode; a program around them may be in the other.
        with jax.enable_x64(False), _interpreter() if interpreted else contextlib.nullcontext():
            return chosen.function(*arrays, **{**self.signature.defaults, **attributes})

    def _register(self) -> CustomOpDef:
        _check_name(self.name)
        signature = dataclasses.replace(
            self.signature,
            attributes={**self.signature.attributes, "implementation": "str"},
            defaults={**self.signature.defaults, "implementation": AUTO},
        )
        if hasattr(torch, "tpu"):
            op = torch_tpu_op(self.name, self.jax, signature)
            op.register_kernel("cpu")(self._run_on_cpu)
        else:
            op = torch.library.custom_op(self.name, self._run_on_cpu, mutates_args=(), schema=signature.schema())
        op.register_fake(self._fake)
        op.register_vmap(self._refuse_vmap)
        if self.backward is not None:
            op.register_autograd(self._backward, setup_context=self._save)
        _OPS[self.name] = self
        return op

    def _run_on_cpu(self, *tensors: torch.Tensor | None, **attributes: Any) -> Any:
        arrays = self._convert(to_array, tensors)
        cpu = jax.devices("cpu")[0]
        with jax.default_device(cpu), lowering_for(Target("cpu", cpu.device_kind)):
            result = self._compiled(_hashable(attributes))(*arrays)
        return self._to_torch(to_tensor(array) for array in jax.block_until_ready(self.signature.unpack(result)))

    def _convert(self, convert: Callable[..., Any], tensors: tuple[torch.Tensor | None, ...]) -> tuple[Any, ...]:
        converted = []
        # Optional tensors at the end may be left out.
        for name, tensor in zip(self.signature.inputs, tensors, strict=False):
            if tensor is None and name not in self.signature.optional:
                raise TypeError(f"{self.name}: {name} is None: give a tensor")
            try:
                converted.append(convert(tensor))
            except TypeError as error:
                raise TypeError(f"{self.name}: {name}: {error}") from error
        return tuple(converted)

    def _compile(self, attributes: Attributes) -> Callable[..., Any]:
        return jax.jit(functools.partial(self.jax, **dict(attributes)))

    def _fake(self, *tensors: torch.Tensor | None, **attributes: Any) -> Any:
        attributes.pop("implementation", None)  # all return the same shapes, and this one needs no TPU to be traced
        device, *others = {tensor.device: None for tensor in tensors if tensor is not None}
        if others:
            raise ValueError(f"{self.name}: its tensors lie on {device} and {others[0]}: move them to one device")
        shapes = self._result_shapes(self._convert(abstract_array, tensors), _hashable(attributes))
        return self._to_torch(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes)

    def _eval_shape(
        self, arrays: AbstractArrays, attributes: Attributes
    ) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        function = functools.partial(
            self._implementations[DEFAULT_IMPLEMENTATION].function, **{**self.signature.defaults, **dict(attributes)}
        )
        with jax.enable_x64(False):
            results = self.signature.unpack(jax.eval_shape(function, *arrays))
        return tuple((result.shape, torch_dtype(result.dtype)) for result in results)

    def _to_torch(self, results: Any) -> Any:
        results = tuple(results)
        return results[0] if len(results) == 1 else results

    def _refuse_vmap(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self.name} has no vmap rule: give it the batch as a dim of its arguments")

    def _save(self, ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
        signature, backward = self.signature, self.backward.signature
        outputs = _as_tuple(output)
        known = dict(zip((*signature.inputs, *signature.results), (*inputs, *outputs), strict=True))
        ctx.save_for_backward(*(known[name] for name in backward.inputs if name in known))
        ctx.attributes = {name: keyword_only_inputs[name] for name in (*backward.attributes, "implementation")}
        ctx.mark_non_differentiable(
            *(
                tensor
                for name, tensor in zip(signature.results, outputs, strict=True)
                if f"grad_{name}" not in backward.inputs
            )
        )
        # Else autograd makes a gradient of zeros for every result, those that have none included.
        ctx.set_materialize_grads(False)
        ctx.zeros = {
            f"grad_{name}": functools.partial(torch.zeros, tensor.shape, dtype=tensor.dtype, device=tensor.device)
            for name, tensor in zip(signature.results, outputs, strict=True)
            if f"grad_{name}" in backward.inputs
        }

    def _backward(self, ctx: Any, *grads: torch.Tensor) -> Any:
        signature, backward = self.signature, self.backward.signature
        saved = iter(ctx.saved_tensors)
        grad_of = {f"grad_{name}": grad for name, grad in zip(signature.results, grads, strict=True)}
        if all(grad_of[name] is None for name in ctx.zeros):
            return (None,) * len(signature.inputs)
        arguments = []
        for name in backward.inputs:
            if name not in grad_of:
                arguments.append(next(saved))
            else:
                arguments.append(ctx.zeros[name]() if grad_of[name] is None else grad_of[name])
        results = _as_tuple(self.backward._op(*arguments, **ctx.attributes))
        gradients = dict(zip(backward.results, results, strict=True))
        return tuple(gradients.get(name) for name in signature.inputs)


def jax_op(
    name: str,
    *,
    backward: JaxOp | str | None = "vjp",
    differentiable: tuple[str, ...] = (),
    memory_kind: str | None = None,
) -> Callable[[Callable[..., Any]], JaxOp]:
    """Makes a torch custom op of the decorated JAX function, which becomes its implementation "xla".

    Positional parameters are tensors (`jax.Array`, `jax.Array | None`), keyword-only ones static attributes (bool, int,
    float, str, tuple[int, ...], tuple[float, ...]). The result is a `jax.Array`, called `out`, or a NamedTuple of them.

    Args:
      name: `namespace::name`.
      backward: the op of the gradients; it finds its arguments by name: inputs of the forward, results of the forward,
        `grad_<result>` for each result that is differentiable, and the forward's attributes. It returns a NamedTuple
        whose fields are the inputs that have a gradient. "vjp": that op is derived by `jax.vjp` as `name_backward`, and
        computes the forward again. None: the op has no gradient.
      differentiable: for "vjp", the inputs that have a gradient; empty: all that are not optional.
      memory_kind: what a memory policy takes the results for, "attention" or "matmul" (`--compile.memory_policy`);
        None: neither, so that `selective` makes them again in the backward pass.

    Raises:
      TypeError: an annotation is missing or unknown.
      ValueError: the name or that of an attribute is taken, the backward op asks for what the forward does not have,
        or `differentiable` names what is no input or may be None.
    """

    def register(function: Callable[..., Any]) -> JaxOp:
        _check_name(name)
        gradient = backward
        if backward == "vjp":
            gradient = JaxOp(f"{name}_backward", vjp_function(name, function, differentiable), None)
        if gradient is not None:
            _check_backward(signature_of(name, function), gradient)
        return JaxOp(name, function, gradient, memory_kind=memory_kind)

    return register


def _check_name(name: str) -> None:
    if not re.fullmatch(r"\w+::\w+", name):
        raise ValueError(f"{name!r} cannot name an op: give namespace::name, e.g. titan::double")
    if name in _OPS:
        raise ValueError(f"{name} is registered already; every op needs a name of its own")


def _check_backward(forward: Signature, backward: JaxOp) -> None:
    known = {*forward.inputs, *forward.results, *(f"grad_{result}" for result in forward.results)}
    for wanted in backward.signature.inputs:
        if wanted not in known:
            raise ValueError(
                f"{backward.name}: {wanted!r} is neither an input nor a result of the forward, nor a grad_"
            )
    for attribute in backward.signature.attributes:
        if attribute not in forward.attributes:
            raise ValueError(f"{backward.name}: the forward has no attribute {attribute!r}")
    for result in backward.signature.results:
        if result not in forward.inputs:
            raise ValueError(f"{backward.name}: returns a gradient of {result!r}, which is no input of the forward")


def _hashable(attributes: Mapping[str, Any]) -> Attributes:
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in attributes.items())


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _interpreter() -> contextlib.AbstractContextManager:
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams())


@functools.cache
def _log_choice(op: str, implementation: str, platform: str, interpreted: bool) -> None:
    """Once for each choice."""
    _log.info("%s: %s on %s%s", op, implementation, platform, " (interpreted: slow)" if interpreted else "")
