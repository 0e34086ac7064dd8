"""Checking a configuration tree before anything is built: limits of leaves, sections, and the tree as a whole."""

import dataclasses
import math
import os
from typing import Any

from titan.core.config.tree import Leaf, is_node, leaves


class ConfigError(Exception):
    """A mistake in the configuration; `str()` is one line that names the flag, the problem and the cure.

    It is no ValueError, because absl rewrites the message of a ValueError that is raised while a flag is parsed.

    Attributes:
      flag: dotted name without dashes, e.g. "data.path"; empty when no single flag is at fault.
      problem: what is wrong with the value.
      cure: what to do about it.
    """

    def __init__(self, flag: str, problem: str, cure: str):
        super().__init__(flag, problem, cure)  # all three in `args`, so that the error can be pickled
        self.flag = flag
        self.problem = problem
        self.cure = cure

    def __str__(self) -> str:
        where = f"--{self.flag}: " if self.flag else ""
        return " ".join(f"{where}{self.problem}; {self.cure}".split())


class LocalConfigError(ConfigError):
    """A mistake that one process of several came upon and has to report, as a broken image in its share."""


def validate(config: Any) -> None:
    """Checks every leaf's type and limits, then each node's own `validate()`, inner nodes before outer ones.

    Raises:
      ConfigError: the first violation found.
      TypeError: a field of the tree is not a valid leaf (an error in the program, not in the flags).
    """
    for leaf in leaves(config):
        check_leaf(leaf)
    _validate_nodes(config)


def _validate_nodes(node: Any) -> None:
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if is_node(value):
            _validate_nodes(value)
    if hasattr(node, "validate"):
        node.validate()


def describe_values(leaf: Leaf) -> str:
    """What a leaf admits, in words: "an integer of at least 1", "one of cosine, linear, constant"."""
    if leaf.choices == ():
        return "nothing: there is none to choose unless a plugin adds one"
    if leaf.choices:
        kind = f"one of {', '.join(choice or repr(choice) for choice in leaf.choices)}"
        return f"a comma-separated list out of {kind.removeprefix('one of ')}" if leaf.type == tuple[str, ...] else kind
    kind = {
        bool: "true or false",
        int: "an integer",
        float: "a finite number",
        str: "a string",
        tuple[int, ...]: "a comma-separated list of integers",
        tuple[str, ...]: "a comma-separated list of strings",
    }[leaf.type]
    if leaf.minimum is not None and leaf.maximum is not None:
        return f"{kind} from {leaf.minimum} to {leaf.maximum}"
    if leaf.minimum is not None:
        return f"{kind} of at least {leaf.minimum}"
    if leaf.maximum is not None:
        return f"{kind} of at most {leaf.maximum}"
    return kind


def check_leaf(leaf: Leaf) -> None:
    """Raises ConfigError unless the leaf's value has the leaf's type and lies within its choices and limits."""
    elements = leaf.value if isinstance(leaf.value, tuple) else (leaf.value,)
    if not _has_type(leaf.value, leaf.type) or not all(_is_admitted(leaf, element) for element in elements):
        raise ConfigError(leaf.path, f"{leaf.value!r} is not admitted", f"give {describe_values(leaf)}")


def _has_type(value: Any, leaf_type: Any) -> bool:
    if leaf_type in (tuple[int, ...], tuple[str, ...]):
        element_type = leaf_type.__args__[0]
        return isinstance(value, tuple) and all(_has_type(element, element_type) for element in value)
    if leaf_type is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is leaf_type  # exact, since True is an int too


def _is_admitted(leaf: Leaf, value: Any) -> bool:
    if leaf.choices is not None and value not in leaf.choices:
        return False
    return not (
        (leaf.minimum is not None and value < leaf.minimum) or (leaf.maximum is not None and value > leaf.maximum)
    )


def check_exists(flag: str, path: str) -> None:
    """Raises ConfigError unless `path` (with `~` expanded) is an existing, readable file or folder."""
    expanded = os.path.expanduser(path)
    if not os.path.exists(expanded):
        raise ConfigError(flag, f"there is no file or folder {path!r}", "correct the path")
    if not os.access(expanded, os.R_OK):
        raise ConfigError(flag, f"{path!r} cannot be read", "change its permissions, or give another path")


def check_writable_folder(flag: str, path: str) -> None:
    """Raises ConfigError unless `path` (with `~` expanded) is a writable folder or can be made one. Makes nothing."""
    existing = os.path.abspath(os.path.expanduser(path))
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        raise ConfigError(flag, f"{path!r} cannot be a folder, since {existing!r} is a file", "give another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(flag, f"the folder {existing!r} is not writable", "give a folder in which you may write")
