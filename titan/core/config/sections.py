"""Sections of flags from outside: a plugin's kernel, pass or optimizer has flags of its own, `--my_kernel.enable`."""

import dataclasses
import functools
import inspect
from typing import Any, TypeVar

from titan.core.config.tree import is_node, option

Root = TypeVar("Root")

_SECTIONS: dict[str, Any] = {}


def register_section(name: str, default: Any) -> None:
    """Adds a section to the configuration of every run.

    Args:
      name: of the field at the root, and so of its flags.
      default: a frozen dataclass whose fields are declared by `option`; the first line of its docstring is the
        section's help.

    Raises:
      ValueError: the name is taken by another section, or the default is no node.
    """
    if not is_node(default) or not name.isidentifier():
        raise ValueError(f"section {name!r}: give an identifier, and an instance of a frozen dataclass")
    if _SECTIONS.get(name, default) != default:
        raise ValueError(f"there are two sections {name!r}: {_SECTIONS[name]!r} and {default!r}")
    _SECTIONS[name] = default


def with_sections(root: Root) -> Root:
    """The configuration with the registered sections that it does not have yet, at their defaults.

    Raises:
      ValueError: a section has the name of another field of the root.
    """
    own = {field.name for field in dataclasses.fields(root)}
    added = {name: default for name, default in _SECTIONS.items() if name not in own}
    for name in own & _SECTIONS.keys():
        if not isinstance(getattr(root, name), type(_SECTIONS[name])):
            raise ValueError(f"section {name!r} is registered, and the configuration has a field of that name")
    if not added:
        return root
    values = {field.name: getattr(root, field.name) for field in dataclasses.fields(root)}
    return _extended(type(root), tuple(added.items()))(**values)


@functools.cache
def _extended(base: type, sections: tuple[tuple[str, Any], ...]) -> type:
    fields = [(name, type(default), option(default, _help(default))) for name, default in sections]
    extended = dataclasses.make_dataclass(base.__name__, fields, bases=(base,), frozen=True)
    extended.__reduce__ = lambda self: (_restored, (base, sections, _values(self)))
    return extended


def _values(root: Any) -> dict[str, Any]:
    return {field.name: getattr(root, field.name) for field in dataclasses.fields(root)}


def _restored(base: type, sections: tuple[tuple[str, Any], ...], values: dict[str, Any]) -> Any:
    """Unpickles: the class is made anew in each process."""
    return _extended(base, sections)(**values)


def _help(default: Any) -> str:
    return (inspect.getdoc(type(default)) or type(default).__name__).splitlines()[0]
