"""A small configuration tree with every kind of leaf, for the tests of this folder."""

import dataclasses

from titan.core.config.tree import option
from titan.core.config.validate import ConfigError


@dataclasses.dataclass(frozen=True)
class Inner:
    """Settings one level further down."""

    epsilon: float = option(1e-8, "Small number.", minimum=0, maximum=1)
    tags: tuple[str, ...] = option((), "Labels.")
    sizes: tuple[int, ...] = option((1, 2), "Sizes.", minimum=1)


@dataclasses.dataclass(frozen=True)
class Other:
    """Another kind of inner node."""

    depth: int = option(2, "Depth.")


@dataclasses.dataclass(frozen=True)
class Section:
    """Settings with every kind of leaf."""

    steps: int = option(3, "Steps of the run.", minimum=1)
    kind: str = option("cosine", "Course.", choices=("", "cosine", "linear"))
    enable: bool = option(True, "Switch.")
    inner: Inner = option(Inner(), "Inner settings.")
    either: Inner | Other | None = option(None, "A node of one of two classes, or none.")

    def validate(self):
        """Raises ConfigError for 13 steps."""
        if self.steps == 13:
            raise ConfigError("section.steps", "13 brings bad luck", "give 14")


@dataclasses.dataclass(frozen=True)
class Root:
    """A run."""

    name: str = option("run", "Name.")
    section: Section = option(Section(), "What the run does.")
    second: Inner = option(Inner(), "Second section.")

    def validate(self):
        """Raises ConfigError where both sections have tags."""
        if self.section.inner.tags and self.second.tags:
            raise ConfigError("second.tags", "section.inner.tags is set too", "set one of them")
