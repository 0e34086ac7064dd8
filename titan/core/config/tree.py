"""The configuration tree: nested frozen dataclasses whose leaves are declared by `option`.

Node: a frozen dataclass. Leaf: a field of type bool, int, float, str, `tuple[int, ...]` or `tuple[str, ...]`. Path: the
field names from the root, joined by dots (`training.steps`); it is also the name of the leaf's flag.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from titan.core.registry import Registry

LEAF_TYPES = (bool, int, float, str, tuple[int, ...], tuple[str, ...])
"""The types that a leaf may have."""

Node = TypeVar("Node")


def option(
    default: Any,
    help: str,  # noqa: A002 (the name that argparse and absl use)
    *,
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A dataclass field with a default, a help text, and the values it admits.

    Args:
      default: the value when no flag sets it; a nested dataclass or a tuple may be given as it is: both are immutable.
      help: one or two sentences shown by `--helpfull`, with the unit and what an empty or zero value means.
      choices: the admitted strings, for a leaf of type str (or for each element of a tuple of str); or a function that
        gives them, for names that plugins may add to.
      minimum: the smallest admitted number.
      maximum: the largest admitted number.

    Raises:
      TypeError: a choice is no string.
    """
    if not callable(choices) and not all(isinstance(choice, str) for choice in choices or ()):
        raise TypeError(f"choices of an option are strings, not {choices}: numbers have minimum and maximum")
    metadata = {"help": help, "choices": choices, "minimum": minimum, "maximum": maximum}
    if dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=lambda: default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class OpenNode:
    """Base of nodes that come in many classes, of which more may be registered from outside.

    A class that derives from it directly is the annotation of a field (`model: ModelConfig`); the field takes an
    instance of any class in its registry.

    Attributes:
      registry: class by the name under which a configuration file has it.
    """

    registry: ClassVar[Registry[type]]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One value of a tree, with what its `option` declares.

    Attributes:
      path: dotted path from the root, which is the name of the flag.
      type: one of `LEAF_TYPES`.
      value: the value in this tree.
      help, choices, minimum, maximum: see `option`.
    """

    path: str
    type: Any
    value: Any
    help: str
    choices: tuple[str, ...] | None
    minimum: float | None
    maximum: float | None


def is_node(value: Any) -> bool:
    """Whether `value` is a dataclass instance (and not a dataclass type)."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


@functools.cache
def field_types(node_type: type) -> dict[str, Any]:
    """Annotations of a dataclass's fields, resolved when they were written as strings."""
    hints = typing.get_type_hints(node_type)
    return {field.name: hints[field.name] for field in dataclasses.fields(node_type)}


def open_registry(annotation: Any) -> Registry[type] | None:
    """The registry of the classes that a field takes, if its annotation is a base of open nodes; else None."""
    return annotation.registry if isinstance(annotation, type) and OpenNode in annotation.__bases__ else None


def node_types(annotation: Any) -> tuple[type, ...]:
    """The dataclasses among the alternatives of an annotation: `A | B | None` gives (A, B); a leaf's type gives ().

    Of an open node these are all classes that are registered.
    """
    registry = open_registry(annotation)
    if registry is not None:
        return tuple(node_type for _, node_type in registry.items())
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    alternatives = typing.get_args(annotation) if is_union else (annotation,)
    return tuple(item for item in alternatives if isinstance(item, type) and dataclasses.is_dataclass(item))


def leaves(tree: Any, prefix: str = "") -> Iterator[Leaf]:
    """All leaves below a node, depth first, in the order of declaration.

    Args:
      tree: a dataclass instance.
      prefix: path of `tree` itself; empty at the root.

    Raises:
      TypeError: a field is neither a node nor of a leaf's type, or was declared without `option`.
    """
    for field in dataclasses.fields(tree):
        path = f"{prefix}.{field.name}" if prefix else field.name
        value, annotation = getattr(tree, field.name), field_types(type(tree))[field.name]
        if is_node(value):
            yield from leaves(value, path)
        elif value is None and node_types(annotation):
            continue  # an optional node that is absent has no leaves
        elif annotation in LEAF_TYPES and "help" in field.metadata:
            choices = field.metadata["choices"]
            own = {"choices": choices()} if callable(choices) else {}
            yield Leaf(path, annotation, value, **{**field.metadata, **own})
        else:
            raise TypeError(
                f"{type(tree).__qualname__}.{field.name}: a leaf of a configuration tree is declared with option() "
                f"and has type bool, int, float, str, tuple[int, ...] or tuple[str, ...], not {annotation}"
            )


def replace_leaves(tree: Node, values: Mapping[str, Any]) -> Node:
    """A new tree with the given leaves changed; subtrees without a change are shared with the old tree.

    Args:
      tree: a frozen dataclass.
      values: new values by dotted path.

    Raises:
      KeyError: a path that the tree does not have.
    """
    own: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        name, _, rest = path.partition(".")
        if name not in field_types(type(tree)) or (rest and not is_node(getattr(tree, name))):
            raise KeyError(f"{type(tree).__qualname__} has no leaf {path!r}")
        if rest:
            below.setdefault(name, {})[rest] = value
        else:
            own[name] = value
    for name, changes in below.items():
        own[name] = replace_leaves(own.get(name, getattr(tree, name)), changes)
    return dataclasses.replace(tree, **own) if own else tree
