"""The torch schema of a JAX function, read from its annotations."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import jax

_ATTRIBUTE_TYPES = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    tuple[int, ...]: "int[]",
    tuple[float, ...]: "float[]",
}


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a JAX function takes and returns, as a torch op sees it.

    Attributes:
      inputs: names of the tensor arguments, in order.
      optional: those of them that may be None.
      omissible: those of them that may be left out, and are None then.
      attributes: names of the static arguments, all keyword-only, with their torch types.
      defaults: the attributes' defaults, for those that have one.
      results: names of the results; a single array is `out`.
      result_type: the NamedTuple of several results, or None for a single array.
    """

    inputs: tuple[str, ...]
    optional: frozenset[str]
    omissible: frozenset[str]
    attributes: Mapping[str, str]
    defaults: Mapping[str, Any]
    results: tuple[str, ...]
    result_type: type | None

    def schema(self) -> str:
        """The schema for `torch.library`, without the op's name: `(Tensor x, *, int tile=128) -> Tensor`."""
        arguments = [
            f"Tensor{'?' if name in self.optional else ''} {name}{'=None' if name in self.omissible else ''}"
            for name in self.inputs
        ]
        if self.attributes:
            arguments.append("*")
        for name, kind in self.attributes.items():
            default = f"={_literal(self.defaults[name])}" if name in self.defaults else ""
            arguments.append(f"{kind} {name}{default}")
        results = ", ".join("Tensor" for _ in self.results)
        return f"({', '.join(arguments)}) -> {results if len(self.results) == 1 else f'({results})'}"

    def unpack(self, result: Any) -> tuple[Any, ...]:
        """The results of a call as a tuple, however many there are."""
        return tuple(result) if self.result_type else (result,)

    def same_call(self, other: "Signature") -> bool:
        """Whether two functions are called alike and return alike; defaults may differ."""
        mine = (self.inputs, self.optional, tuple(self.attributes.items()), self.results)
        return mine == (other.inputs, other.optional, tuple(other.attributes.items()), other.results)


def signature_of(name: str, function: Callable[..., Any]) -> Signature:
    """The signature of an annotated JAX function.

    Positional parameters are `jax.Array` or `jax.Array | None`; keyword-only ones are static, of type bool, int, float,
    str, tuple[int, ...] or tuple[float, ...]. The result is a `jax.Array` or a NamedTuple of them.

    Raises:
      TypeError: an annotation is missing or none of these, naming the parameter.
    """
    hints = typing.get_type_hints(function)
    inputs: list[str] = []
    optional: set[str] = set()
    omissible: set[str] = set()
    attributes: dict[str, str] = {}
    defaults: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        hint = hints.get(parameter.name)
        where = f"{name}: parameter {parameter.name}"
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            if hint not in _ATTRIBUTE_TYPES:
                raise TypeError(
                    f"{where} is keyword-only and so a static attribute: annotate it bool, int, float, str, "
                    f"tuple[int, ...] or tuple[float, ...], not {hint}"
                )
            attributes[parameter.name] = _ATTRIBUTE_TYPES[hint]
            if parameter.default is not inspect.Parameter.empty:
                defaults[parameter.name] = parameter.default
            continue
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD or hint not in (jax.Array, jax.Array | None):
            raise TypeError(
                f"{where} is positional and so a tensor: annotate it jax.Array or jax.Array | None, not {hint}"
            )
        inputs.append(parameter.name)
        if hint != jax.Array:
            optional.add(parameter.name)
            if parameter.default is None:
                omissible.add(parameter.name)
    results, result_type = _results(name, hints.get("return"))
    return Signature(
        tuple(inputs), frozenset(optional), frozenset(omissible), attributes, defaults, results, result_type
    )


def _results(name: str, hint: Any) -> tuple[tuple[str, ...], type | None]:
    if hint is jax.Array:
        return ("out",), None
    fields = getattr(hint, "_fields", ())
    hints = typing.get_type_hints(hint) if fields else {}
    if not fields or any(hints.get(field) is not jax.Array for field in fields):
        raise TypeError(f"{name}: its result must be annotated jax.Array or a NamedTuple of jax.Array, not {hint}")
    return fields, hint


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value)
