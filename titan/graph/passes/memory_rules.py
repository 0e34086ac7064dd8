"""Memory policies as text: which values of the forward pass are kept for the backward, and how.

    none                                       keep every value that the backward pass reads
    full                                       keep each layer's input, compute the rest once more
    selective                                  keep layer inputs and the results of matmuls, attention and collectives
    offload                                    as full, with the layer inputs in host memory
    selective,layers.*::attention=offload      a policy and rules, of which the last that matches counts
    layers.*.feed_forward=recompute            rules alone change `none`

A rule is MODULE[::KIND]=ACTION. MODULE is a glob over module paths (`*` is one segment, `**` any number) and stands for
the modules that it matches and all within them. This file imports neither torch nor jax.
"""

import dataclasses
from collections.abc import Collection

from titan.core.config.rewrite import match_path

ACTIONS = ("save", "recompute", "offload")
KINDS = ("input", "matmul", "attention", "collective")
"""`input`: what a layer is given by the one before it. The others: results of ops of that kind."""


class MemoryPolicyError(ValueError):
    """A policy that is none, or that does not suit the model."""


@dataclasses.dataclass(frozen=True)
class MemoryRule:
    """What to do with some values.

    Attributes:
      module: glob over module paths; None: everything within a layer of the model.
      kind: one of `KINDS`; None: all.
      action: one of `ACTIONS`.
    """

    module: str | None
    kind: str | None
    action: str

    def __str__(self) -> str:
        return f"{self.module}{'::' if self.kind else ''}{self.kind or ''}={self.action}"

    def matches(self, module_fqn: str, kind: str | None, *, in_layer: bool) -> bool:
        """Whether the rule is about the values of this kind that are made in (or, inputs, given to) this module."""
        if self.kind is not None and self.kind != kind:
            return False
        return in_layer if self.module is None else self.is_about(module_fqn)

    def is_about(self, module_fqn: str) -> bool:
        """Whether the rule's glob is that of this module or of one around it."""
        return self.module is not None and match_path(f"{self.module}.**", module_fqn)


@dataclasses.dataclass(frozen=True)
class MemoryPolicy:
    """Rules, of which the last that matches counts; what none matches is saved."""

    rules: tuple[MemoryRule, ...] = ()

    def action(self, module_fqn: str, kind: str | None, *, in_layer: bool) -> str:
        """One of `ACTIONS`."""
        for rule in reversed(self.rules):
            if rule.matches(module_fqn, kind, in_layer=in_layer):
                return rule.action
        return "save"

    def check(self, module_fqns: Collection[str]) -> None:
        """Raises MemoryPolicyError for a rule that none of these modules is meant by."""
        for rule in self.rules:
            if rule.module is not None and not any(map(rule.is_about, module_fqns)):
                near = sorted({".".join(fqn.split(".")[:2]) for fqn in module_fqns if fqn})
                raise MemoryPolicyError(f"the rule {rule} is about no module of the model, which has {', '.join(near)}")


_RECOMPUTE = MemoryRule(None, None, "recompute")
POLICIES = {
    "none": (),
    "full": (_RECOMPUTE, MemoryRule(None, "input", "save")),
    "selective": (_RECOMPUTE, *(MemoryRule(None, kind, "save") for kind in KINDS)),
    "offload": (_RECOMPUTE, MemoryRule(None, "input", "offload")),
}


def parse_memory_policy(text: str) -> MemoryPolicy:
    """The policy that a text describes.

    Raises:
      MemoryPolicyError: it is no policy; says which part is wrong and what there is.
    """
    rules: list[MemoryRule] = []
    for position, part in enumerate(text.replace(" ", "").split(",")):
        if "=" not in part:
            if part not in POLICIES or position:
                raise MemoryPolicyError(
                    f"{part!r} is neither a policy ({', '.join(POLICIES)}; it comes first) nor a rule, "
                    "MODULE[::KIND]=ACTION"
                )
            rules += POLICIES[part]
            continue
        where, _, action = part.partition("=")
        module, separator, kind = where.partition("::")
        if action not in ACTIONS:
            raise MemoryPolicyError(f"{part!r}: {action!r} is no action: give one of {', '.join(ACTIONS)}")
        if separator and kind not in KINDS:
            raise MemoryPolicyError(f"{part!r}: {kind!r} is no kind of value: give one of {', '.join(KINDS)}")
        if not module:
            raise MemoryPolicyError(f"{part!r} names no module: give a glob, such as layers.*")
        rules.append(MemoryRule(module, kind or None, action))
    return MemoryPolicy(tuple(rules))
