"""A registry: what may be extended from outside, by name. Imports nothing heavy, and loads an entry when it is used.

    FAMILIES: Registry[type] = Registry("model family")
    FAMILIES.register("llama3", "titan.models.llama3.config:Llama3Config")

A plugin (see `titan.core.plugins`) calls `register` in the same way.
"""

import difflib
import importlib
from collections.abc import Iterator
from typing import Any, Generic, TypeVar, cast

Entry = TypeVar("Entry")


class RegistryError(LookupError):
    """A name that is not registered, or registered twice, or whose entry cannot be loaded. Its text is one line."""


def load(dotted: str) -> Any:
    """Imports what "package.module:attribute" names.

    Raises:
      ImportError: there is no such module.
      AttributeError: the module has no such attribute.
    """
    module, _, attribute = dotted.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Registry(Generic[Entry]):
    """Entries of one kind by name, in the order of registration."""

    def __init__(self, kind: str):
        """Makes an empty registry.

        Args:
          kind: what an entry is, in the singular, as errors call it: "model family".
        """
        self.kind = kind
        self._entries: dict[str, Entry | str] = {}
        self._loaded: dict[str, Entry] = {}

    def register(self, name: str, entry: Entry | str) -> None:
        """Enters something under a name.

        Args:
          name: what users call it.
          entry: the thing itself, or "package.module:attribute", which is imported when the entry is first used.

        Raises:
          RegistryError: the name is taken by another entry.
        """
        if name in self._entries and self._entries[name] != entry:
            raise RegistryError(f"there are two {self.kind} entries {name!r}: {self._entries[name]!r} and {entry!r}")
        self._entries[name] = entry

    def __getitem__(self, name: str) -> Entry:
        """Returns the entry of that name, importing it if need be.

        Raises:
          RegistryError: there is none of that name, or its module or attribute does not exist.
        """
        if name in self._loaded:
            return self._loaded[name]
        if name not in self._entries:
            meant = difflib.get_close_matches(name, self._entries, n=1, cutoff=0.6)
            question = f"did you mean {meant[0]!r}? " if meant else ""
            raise RegistryError(f"there is no {self.kind} {name!r}; {question}registered: {', '.join(self) or 'none'}")
        entry = self._entries[name]
        if not isinstance(entry, str):
            return entry
        try:
            loaded = load(entry)
        except (ImportError, AttributeError) as error:
            raise RegistryError(f"the {self.kind} {name!r} cannot be loaded from {entry!r}: {error}") from error
        self._loaded[name] = cast(Entry, loaded)
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def items(self) -> Iterator[tuple[str, Entry]]:
        """Yields every name with its entry, importing all of them."""
        for name in tuple(self._entries):
            yield name, self[name]
