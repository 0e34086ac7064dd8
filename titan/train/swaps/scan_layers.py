"""`--tpu_config.use_scan_layers`: a model's layers as loops over what repeats in them.

Consecutive layers that differ in nothing but their initial values become one loop; a pattern that repeats, such as
three layers with a window and one without, is one turn of it. Weights of a loop are stacked, [turn, ...]. A layer that
does not repeat is a loop of one turn, so that all layers have the same form.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_flatten, tree_unflatten

from titan.core.config.tree import is_node
from titan.core.init import Initializer
from titan.graph.capture.scan_layers import scan_layers


@dataclasses.dataclass(frozen=True)
class ScannedLayersConfig:
    """Configuration of `ScannedLayers`.

    Attributes:
      first: index among the model's layers of the first one here.
      num_turns: how often the blocks repeat.
      blocks: the layers of one turn.
    """

    first: int
    num_turns: int
    blocks: tuple[Any, ...]

    def build(self) -> "ScannedLayers":
        """The module, on the current default device; its blocks have the weights of one turn."""
        return ScannedLayers(self)


class ScannedLayers(nn.Module):
    """Layers as a loop; it is called as each of them is.

    Its blocks' own weights are not stacked and never used: it is called under `torch.func.functional_call` with stacks
    in their place, tensors or DTensors [turn, ...].
    """

    is_anonymous = True  # the blocks' names say enough

    def __init__(self, config: ScannedLayersConfig):
        super().__init__()
        self.config = config
        period = len(config.blocks)
        for index, block in enumerate(config.blocks):
            # "*" for all layers, else the first of these layers and the distance to the next.
            name = "*" if period == 1 and config.first == 0 else f"{config.first + index}+{period}i"
            self.add_module(name, block.build())

    def forward(self, carry: Any, *shared: Any) -> Any:
        """Maps what goes from layer to layer (a tensor, or tensors) to what the last one gives.

        Args:
          carry: see `scan_layers`.
          shared: what the layers take besides.
        """
        stacks = dict(self.named_parameters())
        carry_leaves, carry_form = tree_flatten(carry)
        shared_leaves, shared_form = tree_flatten(shared)

        def turn(leaves, weights, shared_leaves):
            carry = tree_unflatten(list(leaves), carry_form)
            arguments = tree_unflatten(list(shared_leaves), shared_form)
            for name, block in self.named_children():
                prefix = f"{name}."
                own = {key.removeprefix(prefix): weight for key, weight in weights.items() if key.startswith(prefix)}
                carry = torch.func.functional_call(block, own, (carry, *arguments))
            return tuple(tree_flatten(carry)[0])

        local = {name: stack.to_local() if isinstance(stack, DTensor) else stack for name, stack in stacks.items()}
        results = scan_layers(
            turn, tuple(carry_leaves), local, tuple(shared_leaves), lambda name, piece: _weight(stacks[name], piece)
        )
        return tree_unflatten(list(results), carry_form)

    def layer_names(self, name: str) -> Iterator[str]:
        """The names, below the module that holds all layers, of the weights stacked as the parameter `name` of this."""
        block, _, rest = name.partition(".")
        index = [child for child, _ in self.named_children()].index(block)
        for turn in range(self.config.num_turns):
            yield f"{self.config.first + index + turn * len(self.config.blocks)}.{rest}"


def _weight(stack: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """One turn's weight: distributed as the stack is, but for the dim of turns."""
    if not isinstance(stack, DTensor):
        return piece
    placements = [Shard(p.dim - 1) if isinstance(p, Shard) else p for p in stack.placements]
    return DTensor.from_local(
        piece,
        stack.device_mesh,
        placements,
        run_check=False,
        shape=stack.shape[1:],
        stride=stack.stride()[1:],
    )


def stacked_parameters(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Of each parameter that is a stack the names of its parts in the model without loops, first turn first."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, ScannedLayers):
            parent = path.rpartition(".")[0]
            for name, _ in module.named_parameters():
                found[f"{path}.{name}"] = tuple(f"{parent}.{layer}" for layer in module.layer_names(name))
    return found


def with_scanned_layers(components: Any, *, longest_pattern: int | None = None) -> Any:
    """A component tree whose tuples of layers are loops: those direct fields of it that are tuples of nodes.

    Args:
      longest_pattern: layers in one turn at most; None: any number.
    """
    changes = {}
    for field in dataclasses.fields(components):
        value = getattr(components, field.name)
        if isinstance(value, tuple) and value and all(map(is_node, value)):
            changes[field.name] = tuple(
                ScannedLayersConfig(run.start, len(run) // period, value[run.start : run.start + period])
                for run, period in repeats([_form(layer) for layer in value], longest_pattern)
            )
    return dataclasses.replace(components, **changes)


def repeats(forms: Sequence[Any], longest_pattern: int | None = None) -> Iterator[tuple[range, int]]:
    """Cuts a sequence into runs of a repeated pattern: (run, length of the pattern), from the first element on.

    Each run is the longest that begins where it does, of the shortest pattern that gives it.
    """
    start = 0
    while start < len(forms):
        best, best_period = 1, 1
        longest = (len(forms) - start) // 2
        for period in range(1, min(longest, longest_pattern or longest) + 1):
            end = start + period
            while end < len(forms) and forms[end] == forms[end - period]:
                end += 1
            length = (end - start) // period * period
            if length >= 2 * period and length > best:
                best, best_period = length, period
        yield range(start, start + best), best_period
        start += best


def _form(value: Any) -> Any:
    """A configuration node as a value that is equal for nodes that differ in initial values alone."""
    if isinstance(value, Initializer):
        return None
    if is_node(value):
        return type(value), tuple(_form(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, tuple):
        return tuple(map(_form, value))
    return value
