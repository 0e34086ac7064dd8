"""A configuration tree as text: JSON that is read back exactly, and YAML for people and for golden files."""

import dataclasses
import json
import os
import pathlib
from typing import Any, TypeVar

from titan.core.config.tree import field_types, is_node, node_types, open_registry
from titan.core.config.validate import ConfigError
from titan.core.files import write_atomically
from titan.core.registry import Registry

Tree = TypeVar("Tree")

_TYPE_KEY = "_type"  # names the class of a node where the annotation leaves a choice


def to_json(config: Any) -> str:
    """JSON of a tree: an object per node in the order of declaration, two blanks of indent, a newline at the end.

    Raises:
      ValueError: a number is not finite, which JSON cannot hold.
    """
    return json.dumps(_to_plain(config), indent=2, allow_nan=False) + "\n"


def from_json(text: str, config_type: type[Tree], *, source: str = "the text", flag: str = "config_file") -> Tree:
    """Reads what `to_json` wrote: `from_json(to_json(c), type(c)) == c`.

    A field that the text does not mention keeps its default, so that a tree saved before the field existed can be read.

    Args:
      text: a JSON object.
      config_type: class of the root.
      source: how errors call the text, e.g. the file's path.
      flag: the flag that errors blame.

    Raises:
      ConfigError: the text is no JSON object, or has a field that the classes do not have, or a value of a wrong type.
    """
    try:
        plain = json.loads(text)
    except ValueError as error:
        raise ConfigError(flag, f"{source} is not JSON ({error})", "give a config.json as a run writes it") from None
    if isinstance(plain, dict):
        for old, new in getattr(config_type, "renamed_leaves", {}).items():
            _rename(plain, old, new)
    return _from_plain(plain, config_type, "", _Source(source, flag))


def to_text(config: Any) -> str:
    """The tree as YAML: one leaf a line, nodes indented by two blanks, strings in double quotes, a newline at the end.

    Optional nodes that are absent are left out.

    The text depends on nothing but the tree, so that the resolved tree of a recipe can be kept as a golden file.
    """
    return "\n".join(_text_lines(config, "")) + "\n"


def save(config: Any, folder: str) -> None:
    """Writes `config.json` (for `--config_file`) and `config.txt` (`to_text`) into a folder, making it if need be."""
    os.makedirs(folder, exist_ok=True)
    for name, text in (("config.json", to_json(config)), ("config.txt", to_text(config))):
        write_atomically(pathlib.Path(folder, name), text.encode())


def _to_plain(node: Any) -> dict[str, Any]:
    plain = {}
    for field in dataclasses.fields(node):
        value, annotation = getattr(node, field.name), field_types(type(node))[field.name]
        if is_node(value):
            is_open = open_registry(annotation) is not None
            type_name = {_TYPE_KEY: type(value).__name__} if is_open or node_types(annotation) != (type(value),) else {}
            value = type_name | _to_plain(value)
        plain[field.name] = value
    return plain


def _rename(plain: dict[str, Any], old: str, new: tuple[str, ...]) -> None:
    """Moves a leaf that was saved under an old name to the new ones; where it is off, to the last of them."""
    *sections, name = old.split(".")
    parent: Any = plain
    for section in sections:
        parent = parent.get(section, {}) if isinstance(parent, dict) else {}
    if not isinstance(parent, dict) or name not in parent:
        return
    value = parent.pop(name)
    for path in new if value else new[-1:]:
        *sections, leaf = path.split(".")
        node = plain
        for section in sections:
            node = node.setdefault(section, {})
        if value or leaf not in node:
            node[leaf] = value


@dataclasses.dataclass(frozen=True)
class _Source:
    name: str
    flag: str

    def error(self, problem: str, cure: str) -> ConfigError:
        return ConfigError(self.flag, f"{self.name}: {problem}", cure)


def _from_plain(plain: Any, node_type: type[Tree], path: str, source: _Source) -> Tree:
    if not isinstance(plain, dict):
        raise source.error(
            f"{path or 'the root'} is {json.dumps(plain)}", f"give an object with the fields of {node_type.__name__}"
        )
    annotations = field_types(node_type)
    values = {}
    for name, value in plain.items():
        child_path = f"{path}.{name}" if path else name
        if name not in annotations:
            raise source.error(
                f"there is no field {child_path!r}", "remove it, or load the file with the version that wrote it"
            )
        values[name] = _value_from_plain(value, annotations[name], child_path, source)
    missing = [
        field.name
        for field in dataclasses.fields(node_type)
        if field.name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise source.error(f"{path or 'the root'} lacks {', '.join(missing)}", "add what is missing")
    return node_type(**values)


def _open_node_from_plain(value: Any, registry: Registry[type], path: str, source: _Source) -> Any:
    if not isinstance(value, dict) or not isinstance(value.get(_TYPE_KEY), str):
        raise source.error(f"{path} does not say its {_TYPE_KEY!r}", f"give one of {', '.join(registry)}")
    name = value[_TYPE_KEY]
    if name not in registry:
        raise source.error(
            f"{path} is a {name!r}, which is not registered",
            f"load the plugin that has it (--plugins=...), or give one of {', '.join(registry)}",
        )
    fields = {key: item for key, item in value.items() if key != _TYPE_KEY}
    return _from_plain(fields, registry[name], path, source)


def _value_from_plain(value: Any, annotation: Any, path: str, source: _Source) -> Any:
    registry = open_registry(annotation)
    if registry is not None:
        return _open_node_from_plain(value, registry, path, source)
    alternatives = node_types(annotation)
    if alternatives:
        if value is None and alternatives != (annotation,):
            return None
        if isinstance(value, dict) and _TYPE_KEY in value:
            by_name = {item.__name__: item for item in alternatives}
            name = value[_TYPE_KEY]
            if name not in by_name:
                raise source.error(f"{path} is a {name!r}", f"give one of {', '.join(by_name)}")
            return _from_plain(
                {key: item for key, item in value.items() if key != _TYPE_KEY}, by_name[name], path, source
            )
        return _from_plain(value, alternatives[0], path, source)
    if annotation in (tuple[int, ...], tuple[str, ...]):
        element_type = annotation.__args__[0]
        if isinstance(value, list) and all(type(element) is element_type for element in value):
            return tuple(value)
    elif type(value) is annotation:
        return value
    elif annotation is float and type(value) is int:
        return float(value)
    raise source.error(
        f"{path} is {json.dumps(value)}", f"give a value of type {getattr(annotation, '__name__', annotation)}"
    )


def _text_lines(node: Any, indent: str):
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if is_node(value):
            yield f"{indent}{field.name}:  # {type(value).__name__}"
            yield from _text_lines(value, indent + "  ")
        elif value is not None:
            yield f"{indent}{field.name}: {_scalar(value)}"


def _scalar(value: Any) -> str:
    text = json.dumps(value, allow_nan=False)
    if isinstance(value, float) and "e" in text and "." not in text:
        return text.replace("e", ".0e")  # YAML 1.1 reads 1e-08 as a string
    return text
