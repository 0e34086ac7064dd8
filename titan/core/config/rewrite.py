"""Rewriting a configuration tree before the model is built: nodes found by type or path are replaced by other nodes.

This is how kernels, float8 and attention variants are swapped: the model's tree has one configuration node per module,
and a rule puts another node in its place. Trees are immutable, so the result is a new tree that shares every subtree
in which nothing was replaced.
"""

import dataclasses
import difflib
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from titan.core.config.tree import is_node

Tree = TypeVar("Tree")


class RewriteError(ValueError):
    """A rule that matches nothing, contradicts another rule, or gives something that is no configuration node."""


class NoMatchError(RewriteError):
    """A rule that is not optional and matches nothing.

    Attributes:
      rule: its name.
    """

    def __init__(self, rule: str, message: str):
        super().__init__(message)
        self.rule = rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """Which nodes to replace, and by what. At least one of `type` and `path` is given; with both, both must match.

    Attributes:
      name: how errors call the rule.
      replace: the new node, or a function from the old node to the new one.
      type: matches nodes that are instances of this dataclass (or of one of these).
      path: matches nodes by a glob over the dotted path. In one segment `*`, `?` and `[0-3]` are wildcards; the segment
        `**` stands for any number of segments, none included. Elements of tuples have their index as the segment:
        `layers.*.attention`, `layers.[0-3].**.norm`. The root's path is the empty string.
      optional: whether the rule may match nothing.
    """

    name: str
    replace: Any | Callable[[Any], Any]
    type: type | tuple[type, ...] | None = None
    path: str | None = None
    optional: bool = False

    def __post_init__(self):
        if self.type is None and self.path is None:
            raise RewriteError(
                f"rule {self.name!r} has neither a type nor a path: give at least one, else it would match all"
            )

    def matches(self, path: str, node: Any) -> bool:
        """Whether the rule applies to `node`, which stands at `path`."""
        if self.type is not None and not isinstance(node, self.type):
            return False
        return self.path is None or match_path(self.path, path)


def match_path(glob: str, path: str) -> bool:
    """Whether a dotted path matches a glob as `Rule.path` describes it; letters are compared with their case."""

    def match(globs: tuple[str, ...], segments: tuple[str, ...]) -> bool:
        if not globs:
            return not segments
        if globs[0] == "**":
            return any(match(globs[1:], segments[start:]) for start in range(len(segments) + 1))
        return bool(segments) and fnmatch.fnmatchcase(segments[0], globs[0]) and match(globs[1:], segments[1:])

    return match(_split(glob), _split(path))


def _split(path: str) -> tuple[str, ...]:
    return tuple(path.split(".")) if path else ()


def nodes(tree: Any) -> Iterator[tuple[str, Any]]:
    """Every node of a tree with its path, outer nodes before inner ones; of containers, tuples are entered."""
    yield from _nodes("", tree)


def _nodes(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if is_node(value):
        yield path, value
    for name, child in _children(value):
        yield from _nodes(f"{path}.{name}" if path else name, child)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if is_node(value):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    elif type(value) is tuple:
        yield from ((str(index), element) for index, element in enumerate(value))


def rewrite(tree: Tree, rules: Sequence[Rule]) -> Tree:
    """A new tree in which every node that a rule matches is replaced; rules see the given tree, never the result.

    The outcome does not depend on the order of the rules: no two of them may match the same node, and nothing may match
    inside a node that is replaced.

    Args:
      tree: a frozen dataclass, with dataclasses and (nested) tuples of them below it.
      rules: the rules, with distinct names.

    Returns:
      The rewritten tree. Subtrees in which no node changed are the same objects as before, up to the root itself.

    Raises:
      NoMatchError: a rule that is not optional matches nothing.
      RewriteError: two rules match one node; a node matches inside a replaced one; a replacement is not an instance of
        a frozen dataclass, or lacks the `build` method of the old node.
    """
    if not is_node(tree):
        raise RewriteError(f"a tree to rewrite is an instance of a dataclass, not {tree!r}")
    names = [rule.name for rule in rules]
    if len(set(names)) != len(names):
        raise RewriteError(f"rules must have distinct names, got {names}")
    matched = _match(tree, rules)
    names_matched = {rule.name for rule in matched.values()}
    for rule in rules:
        if not rule.optional and rule.name not in names_matched:
            message = f"rule {rule.name!r} matches no node{_hint(tree, rule)}; correct it, or mark it optional"
            raise NoMatchError(rule.name, message)
    return _replace("", tree, matched)


def _match(tree: Any, rules: Sequence[Rule]) -> dict[str, Rule]:
    """The rule for each path that is to be replaced."""
    matched: dict[str, Rule] = {}
    for path, node in nodes(tree):
        for rule in rules:
            if not rule.matches(path, node):
                continue
            if path in matched:
                raise RewriteError(
                    f"rules {matched[path].name!r} and {rule.name!r} both match {_name(path)}; narrow one of them"
                )
            for outer in _ancestors(path):
                if outer in matched:
                    raise RewriteError(
                        f"rule {rule.name!r} matches {_name(path)}, which is inside {_name(outer)} that rule "
                        f"{matched[outer].name!r} replaces; narrow one of them, or rewrite in two steps"
                    )
            matched[path] = rule
    return matched


def _ancestors(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def _name(path: str) -> str:
    return path or "the root"


def _hint(tree: Any, rule: Rule) -> str:
    """What the author of a rule without a match may have meant."""
    paths = [path for path, node in nodes(tree) if rule.type is None or isinstance(node, rule.type)]
    if rule.type is not None and not paths:
        types = rule.type if isinstance(rule.type, tuple) else (rule.type,)
        return f" (the tree has no {' or '.join(item.__qualname__ for item in types)})"
    close = difflib.get_close_matches(rule.path, paths, n=1, cutoff=0.0)
    return f" (path {rule.path!r}; the closest node is {_name(close[0])})" if close else ""


def _replace(path: str, value: Any, matched: dict[str, Rule]) -> Any:
    if path in matched:
        return _replacement(path, value, matched[path])
    changed = {}
    for name, child in _children(value):
        new_child = _replace(f"{path}.{name}" if path else name, child, matched)
        if new_child is not child:
            changed[name] = new_child
    if not changed:
        return value
    if is_node(value):
        return dataclasses.replace(value, **changed)
    return tuple(changed.get(str(index), element) for index, element in enumerate(value))


def _replacement(path: str, node: Any, rule: Rule) -> Any:
    new = rule.replace if is_node(rule.replace) or not callable(rule.replace) else rule.replace(node)
    where = f"rule {rule.name!r} at {_name(path)}"
    if not is_node(new) or not type(new).__dataclass_params__.frozen:
        raise RewriteError(f"{where} gives {new!r}; a replacement is an instance of a frozen dataclass")
    if hasattr(node, "build") and not hasattr(new, "build"):
        raise RewriteError(
            f"{where} gives a {type(new).__qualname__}, which has no build(), for a {type(node).__qualname__}"
        )
    return new
