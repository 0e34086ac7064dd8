"""Command line flags for a configuration tree: one absl flag per leaf, named by the leaf's dotted path.

ml_collections makes the flags from dataclasses, but it sets the parsed values on the dataclass itself and registers
only the flags that it sees on the command line. A configuration tree is frozen and should be listed by `--helpfull`.
So each section is handed to ml_collections as a mutable mirror together with the list of all its leaves, each flag
gets a parser that knows the leaf's choices and limits, and the overridden values are then put into the frozen tree.
A section that has a leaf `enable` is switched on by its name alone: `--aot` is `--aot.enable`.
The defaults may come in several variants, of which `--variant` names one.
"""

import contextlib
import dataclasses
import difflib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar

from absl import flags
from ml_collections import config_flags

from titan.core.config.serialize import from_json, to_text
from titan.core.config.tree import Leaf, is_node, leaves, replace_leaves
from titan.core.config.validate import ConfigError, check_leaf, describe_values, validate

Config = TypeVar("Config")

_COMMANDS = {
    "config_file": "config.json of an earlier run, to start from instead of the defaults; other flags override it.",
    "variant": "Variant of the defaults to start from, where there are several; none: the defaults themselves.",
    "print_config": "Print the resolved configuration and exit.",
    "help": "Print an overview of the flags and exit.",
    "helpfull": "Print all flags and exit.",
}


NO_VARIANT = "none"
"""Value of `--variant` that stands for the defaults themselves."""


def parse(
    argv: Sequence[str],
    default: Config,
    *,
    variants: Mapping[str, Config] | None = None,
    variant_flag: str = "",
    fit: Callable[[Config, Set[str]], tuple[Config, Sequence[str]]] | None = None,
) -> Config:
    """The validated configuration that a command line asks for: a base, with the given flags.

    The base is `--config_file`, else the variant that `--variant` names, else `default`.

    Writes nothing to absl's global FLAGS, so it can be called any number of times.

    Args:
      argv: program name and arguments, as in `sys.argv`.
      default: frozen dataclass: the recipe.
      variants: other bases of the same type, by name.
      variant_flag: a flag whose value chooses the variant of that name, if there is one and `--variant` is not given; a
        line on standard error says so. Given both, they must name the same.
      fit: fits what the command line leaves at its default to what it sets: from the configuration and the paths of the
        leaves that are given to the configuration to use and lines that say what was changed.

    Raises:
      ConfigError: a bad flag or an invalid configuration.
      SystemExit: with code 0, after `--help`, `--helpfull` or `--print_config` was obeyed on standard output.
    """
    values = define_flags(default)
    _read(values, argv, default)
    if values["help"].value or values["helpfull"].value:
        print(full_help(default) if values["helpfull"].value else short_help(argv[0], default))
        if variants:
            print(f"Variants: {', '.join(variants)}")
        raise SystemExit(0)
    overrides = _overrides(values, default)
    base = _base(values, default, variants or {}, str(overrides.get(variant_flag, "")), variant_flag)
    absent = overrides.keys() - {leaf.path for leaf in leaves(base)}
    if absent:  # only with --config_file, where the file lacks an optional node that the default has
        raise ConfigError(
            min(absent), "the configuration in --config_file has no such field", "leave out one of the two"
        )
    config = replace_leaves(base, overrides)
    if fit is not None:
        config, lines = fit(config, overrides.keys())
        for line in lines:
            print(line, file=sys.stderr)
    validate(config)
    if values["print_config"].value:
        print(to_text(config), end="")
        raise SystemExit(0)
    return config


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns a ConfigError raised in the `with` block into its one line on standard error and exit code 2."""
    try:
        yield
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def define_flags(default: Any) -> flags.FlagValues:
    """A new set of flags: one per leaf of `default`, and those that are commands, such as `--print_config`.

    Args:
      default: frozen dataclass whose fields are leaves, and nodes (the sections) with leaves and nodes of their own.

    Raises:
      TypeError: a field of the tree is not a valid leaf.
    """
    values = flags.FlagValues()
    for name in ("config_file", "variant"):
        flags.DEFINE_string(name, "", _COMMANDS[name], flag_values=values)
    for name in ("print_config", "help", "helpfull"):
        flags.DEFINE_bool(name, False, _COMMANDS[name], flag_values=values)
    for leaf in _root_leaves(default):
        flags.DEFINE(_LeafParser(leaf), leaf.path, leaf.value, leaf.help, flag_values=values)
        values[leaf.path].boolean = leaf.type is bool  # it need not be followed by a value
    for name, section in _sections(default):
        section_leaves = list(leaves(section, name))
        config_flags.DEFINE_config_dataclass(
            name, _mirror(section), flag_values=values, sys_argv=[f"--{leaf.path}" for leaf in section_leaves]
        )
        values[name].parser = _SectionParser(name, section_leaves)
        for leaf in section_leaves:
            values[leaf.path].parser = _LeafParser(leaf)
            values[leaf.path].help = leaf.help
    return values


class _LeafParser(flags.ArgumentParser):
    """Text of a flag to the value of a leaf. Raises ConfigError, which absl hands on as it is."""

    def __init__(self, leaf: Leaf):
        super().__init__()
        self._leaf = leaf

    def parse(self, argument: Any) -> Any:
        if not isinstance(argument, str):
            return argument  # a default
        try:
            value = _TEXT_TO_VALUE[self._leaf.type](argument)
        except (KeyError, ValueError):
            cure = f"give {describe_values(self._leaf)}"
            raise ConfigError(self._leaf.path, f"{argument!r} is not admitted", cure) from None
        check_leaf(dataclasses.replace(self._leaf, value=value))
        return value


class _SectionParser(flags.ArgumentParser):
    """Refuses a value for a whole section, whose flag exists only because ml_collections defines it."""

    def __init__(self, name: str, section_leaves: Sequence[Leaf]):
        super().__init__()
        self._name = name
        self._fields = [f"--{leaf.path}" for leaf in section_leaves]

    def parse(self, argument: Any) -> Any:
        raise ConfigError(self._name, "a section takes no value", f"set its fields, e.g. {self._fields[0]}")


def _elements(text: str) -> list[str]:
    return [element.strip() for element in text.split(",")] if text.strip() else []


_TEXT_TO_VALUE = {
    bool: lambda text: {"true": True, "1": True, "false": False, "0": False}[text.lower()],
    int: int,
    float: float,
    str: str,
    tuple[int, ...]: lambda text: tuple(int(element) for element in _elements(text)),
    tuple[str, ...]: lambda text: tuple(_elements(text)),
}


def _mirror(node: Any) -> Any:
    """A mutable dataclass instance with the fields and values of a frozen node, all the way down."""
    mutable = {}
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        mutable[field.name] = _mirror(value) if is_node(value) else value
    return dataclasses.make_dataclass(type(node).__name__, [(name, type(value)) for name, value in mutable.items()])(
        **mutable
    )


def _read(values: flags.FlagValues, argv: Sequence[str], default: Any) -> None:
    try:
        arguments = values(_spelled_out(argv, default))
    except flags.UnrecognizedFlagError as error:
        names = [leaf.path for leaf in leaves(default)] + list(_COMMANDS)
        raise ConfigError(error.flagname, "there is no such flag", _suggestion(error.flagname, names)) from None
    except flags.CantOpenFlagFileError as error:
        raise ConfigError("flagfile", str(error).removeprefix("ERROR:: "), "correct the path") from None
    except (flags.Error, ValueError) as error:  # a flag without its value, or --noflag with one
        named = re.search(r"--([\w.]+)", str(error))
        raise ConfigError(named[1] if named else "", str(error), "write flags as --section.field=value") from None
    if len(arguments) > 1:
        raise ConfigError("", f"{arguments[1]!r} is not a flag", "write flags as --section.field=value")


def _spelled_out(argv: Sequence[str], default: Any) -> list[str]:
    """The command line in today's full names of leaves.

    `--section` and `--nosection` are written as `--section.enable` and its opposite, and a leaf that was renamed by its
    new name, of which a line on standard error tells.
    """
    switches = [name for name, section in _sections(default) if isinstance(getattr(section, "enable", None), bool)]
    spelled = {f"--{no}{name}": f"--{no}{name}.enable" for name in switches for no in ("", "no")}
    return [new for argument in argv for new in _renamed(spelled.get(argument, argument), default)]


def _renamed(argument: str, default: Any) -> list[str]:
    flag, is_joined, value = argument.partition("=")
    renamed = getattr(default, "renamed_leaves", {})
    is_off = flag.startswith("--no") and flag[4:] in renamed
    old = flag[4:] if is_off else flag.removeprefix("--")
    if not flag.startswith("--") or old not in renamed:
        return [argument]
    is_off = is_off or value.lower() in ("false", "0")
    names = renamed[old][-1:] if is_off else renamed[old]
    print(f"--{old} is now {' '.join(f'--{name}' for name in names)}; the old name goes with 0.3", file=sys.stderr)
    no = "no" if flag.startswith("--no") and flag[4:] in renamed else ""
    return [f"--{no}{name}{is_joined}{value}" for name in names]


def _suggestion(unknown: str, names: list[str]) -> str:
    """The flags that an unknown one may have meant: those below it, else those of the same or a similar name."""

    def last_part(name: str) -> str:
        return name.rpartition(".")[2]

    close_parts = difflib.get_close_matches(last_part(unknown), map(last_part, names), n=1, cutoff=0.75)
    meant = (
        [name for name in names if name.startswith(f"{unknown}.")]
        or [name for name in names if last_part(name) == last_part(unknown)]
        or difflib.get_close_matches(unknown.removeprefix("no"), names, n=1, cutoff=0.75)
        or [name for name in names if last_part(name) in close_parts]
    )
    question = f"did you mean {' or '.join('--' + name for name in meant[:2])}? " if meant else ""
    return f"{question}--helpfull lists all flags"


def _overrides(values: flags.FlagValues, default: Any) -> dict[str, Any]:
    """The values given on the command line, by dotted path."""
    given = {leaf.path: values[leaf.path].value for leaf in _root_leaves(default) if values[leaf.path].present}
    for name, _ in _sections(default):
        overrides = config_flags.get_override_values(values[name])
        given |= {f"{name}.{path}": value for path, value in overrides.items()}
    return given


def _base(
    values: flags.FlagValues, default: Config, variants: Mapping[str, Config], flag_value: str, flag: str
) -> Config:
    """The configuration that flags are applied to; `flag_value` is that of the flag which may choose a variant."""
    path, variant = values["config_file"].value, values["variant"].value
    if path:
        if variant not in ("", NO_VARIANT):
            raise ConfigError("variant", "--config_file is a whole configuration", "leave out one of the two")
        return _load(path, type(default))
    if not variant and flag_value in variants:
        cure = f"--variant={NO_VARIANT} leaves it out"
        print(f"--{flag}={flag_value}: the variant of that name is the base; {cure}", file=sys.stderr)
        return variants[flag_value]
    if variant in ("", NO_VARIANT):
        return default
    if variant not in variants:
        cure = f"give one of {', '.join(variants)}, or {NO_VARIANT}" if variants else "leave it out"
        raise ConfigError("variant", f"{variant!r} is no variant of this recipe", cure)
    if flag_value not in ("", variant):
        other = "leave out --variant" if flag_value in variants else f"give --variant={NO_VARIANT}"
        raise ConfigError(
            "variant", f"{variant!r} and --{flag}={flag_value} disagree", f"{other}, or give --{flag}={variant}"
        )
    return variants[variant]


def _load(path: str, config_type: type[Config]) -> Config:
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(
            "config_file", f"{path!r} cannot be read ({reason})", "give the config.json of a run"
        ) from None
    return from_json(text, config_type, source=path)


def short_help(program: str, default: Any) -> str:
    """Usage and the list of sections, for `--help`."""
    rows = [(f"--{leaf.path}", leaf.help) for leaf in _root_leaves(default)]
    rows += [(f"--{name}.*", _summary(default, name)) for name, _ in _sections(default)]
    rows += [(f"--{name}", text) for name, text in _COMMANDS.items()]
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"Usage: {os.path.basename(program)} [--section.field=value ...]", ""]
    for name, text in rows:
        lines += _wrap(text, first=name.ljust(width), rest=" " * width)
    return "\n".join(lines)


def full_help(default: Any) -> str:
    """Every flag with its documentation, admitted values and default, by section in the order of declaration."""
    lines = [line for leaf in _root_leaves(default) for line in _leaf_help(leaf)]
    for name, section in _sections(default):
        lines += ["", f"{name}: {_summary(default, name)}"]
        lines += [line for leaf in leaves(section, name) for line in _leaf_help(leaf)]
    lines.append("")
    for name, text in _COMMANDS.items():
        lines += [f"  --{name}", *_wrap(text, first="      ", rest="      ")]
    return "\n".join(lines).lstrip("\n")


def _root_leaves(default: Any) -> list[Leaf]:
    return [leaf for leaf in leaves(default) if "." not in leaf.path]


def _sections(default: Any) -> list[tuple[str, Any]]:
    pairs = [(field.name, getattr(default, field.name)) for field in dataclasses.fields(default)]
    return [(name, value) for name, value in pairs if is_node(value)]


def _summary(default: Any, name: str) -> str:
    """The help of a section's field."""
    return next(field.metadata["help"] for field in dataclasses.fields(default) if field.name == name)


def _leaf_help(leaf: Leaf) -> list[str]:
    name = f"--[no]{leaf.path}" if leaf.type is bool else f"--{leaf.path}"
    shown = ",".join(map(str, leaf.value)) if isinstance(leaf.value, tuple) else leaf.value
    default = str(shown).lower() if leaf.type is bool else repr(shown)
    header = _wrap(f"{name}: {describe_values(leaf)}; default {default}", first="  ", rest="      ")
    return header + _wrap(leaf.help, first="      ", rest="      ")


def _wrap(text: str, *, first: str, rest: str) -> list[str]:
    columns = min(shutil.get_terminal_size((100, 24)).columns, 120)
    return textwrap.wrap(
        text, columns, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
