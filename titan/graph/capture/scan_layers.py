"""`scan_layers`: layers of one form as a loop, so that a program is as large as one of them however many there are.

A capture traces one turn of the loop with its gradient, and puts two `scan` ops into the step:

    forward:   carry; each layer's weights; shared  ->  last carry; each layer's carry
    backward:  gradients of the last carry and of shared; each layer's carry and weights; shared
                   ->  gradients of the first carry and of shared; of each layer's weights

The backward goes from the last layer to the first: what it scans is flipped before it, and what it stacks after it. Its
body begins with the layer's forward once more, from the layer's carry alone. Which of the values in between are kept
instead is for `passes.memory_policy` to say, and for that every op of the forward has a name in `meta["turn_op"]` that
is the same in both bodies, and the two `scan` ops have the same `meta["loop"]`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.fx
from torch.distributed.tensor import DTensor
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.utils._pytree import tree_map

from titan.graph.capture.attribution import attribute_backward, current_attribution
from titan.graph.ir.region import region

Tensors = tuple[torch.Tensor, ...]
Body = Callable[[Tensors, dict[str, torch.Tensor], Tensors], Tensors]
"""`(carry, weights of one layer, shared) -> next carry`."""


def scan_layers(
    body: Body,
    carry: Tensors,
    stacks: dict[str, torch.Tensor],
    shared: Tensors,
    leaf: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor,
) -> Tensors:
    """Runs `body` once for each layer. Outside of a capture this is a plain loop.

    Args:
      body: one layer; pure. Its carry keeps shapes and dtypes.
      carry: what goes from layer to layer, such as the residual stream.
      stacks: name to the weights of all layers, [layer, ...], of this rank.
      shared: what all layers read.
      leaf: makes of one layer's piece of a stack the weight that `body` takes, such as the DTensor that it is a shard
        of. Gradients are taken with respect to its result.

    Returns:
      The last carry.

    Raises:
      ValueError: the stacks are of different lengths or there is none, or the body changes the form of its carry.
    """
    num_layers = {len(stack) for stack in stacks.values()}
    if len(num_layers) != 1:
        raise ValueError(f"layers to scan over need stacks of one length, not {sorted(num_layers)}")
    if get_proxy_mode() is None:
        for index in range(num_layers.pop()):
            carry = body(carry, {name: leaf(name, stack[index]) for name, stack in stacks.items()}, shared)
        return carry

    def turn(carry: Tensors, weights: Tensors, shared: Tensors) -> Tensors:
        results = body(carry, dict(zip(stacks, weights, strict=True)), shared)
        for before, after in zip(carry, results, strict=True):
            if before.shape != after.shape or before.dtype != after.dtype:
                raise ValueError(
                    f"a layer in a scan turned {before.dtype}{list(before.shape)} into "
                    f"{after.dtype}{list(after.shape)}; what goes around a loop keeps its form"
                )
        return tuple(result.contiguous() for result in results)

    leaves = tuple((lambda tensor, name=name: leaf(name, tensor)) for name in stacks)
    return _ScanLayers.apply(_Layers(turn, leaves, len(carry)), *carry, *stacks.values(), *shared)


@dataclasses.dataclass(frozen=True)
class _Layers:
    """What the loop does.

    Attributes:
      turn: (carry, weights, shared) -> next carry.
      leaves: for each stack, makes the weight of a piece of it.
      num_carry: tensors in the carry.
    """

    turn: Callable[[Tensors, Tensors, Tensors], Tensors]
    leaves: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    num_carry: int

    def split(self, flat: Sequence) -> tuple[tuple, tuple, tuple]:
        """Carry, stacks and shared out of the flat sequence of all of them."""
        end = self.num_carry + len(self.leaves)
        return tuple(flat[: self.num_carry]), tuple(flat[self.num_carry : end]), tuple(flat[end:])


class _ScanLayers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layers: _Layers, *tensors: torch.Tensor) -> Tensors:
        carry, stacks, shared = layers.split(tensors)
        forms = [*map(_form, carry), *((stack.shape[1:], stack.dtype) for stack in stacks), *map(_form, shared)]
        if not any(ctx.needs_input_grad):
            body = _trace(lambda *flat: layers.turn(*_weights_of(layers, flat)), forms)
            return tuple(_emit(body, "scan", "", carry, stacks, shared))
        of_carry, of_stacks, of_shared = layers.split(ctx.needs_input_grad[1:])
        # Whatever is a float on its way through the loop may depend on a weight.
        of_carry = tuple(tensor.is_floating_point() for tensor in carry)
        ctx.layers, ctx.tensors = layers, tensors
        ctx.needed = (*of_carry, *of_stacks, *of_shared)
        grads = tuple(itertools.compress(carry, of_carry))
        totals = tuple(itertools.compress(shared, of_shared))
        ctx.num_grads, ctx.num_totals = len(grads), len(totals)
        joint = _trace(
            lambda *flat: _forward_and_backward(layers, ctx.needed, flat, ctx.num_grads, ctx.num_totals),
            [*map(_form, (*grads, *totals)), *forms],
        )
        ctx.body, body = joint, _take_forward(joint, len(grads) + len(totals), layers.num_carry)
        ctx.loop = _unused_name("scan")
        outputs = _emit(body, ctx.loop, ctx.loop, carry, stacks, shared)
        ctx.carries = outputs[layers.num_carry :]
        return tuple(outputs[: layers.num_carry])

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layers: _Layers = ctx.layers
        carry, stacks, shared = layers.split(ctx.tensors)
        of_carry, _, of_shared = layers.split(ctx.needed)
        grads = [grad.contiguous() for grad in itertools.compress(grads, of_carry)]
        totals = [torch.zeros_like(tensor) for tensor in itertools.compress(shared, of_shared)]
        scanned = [torch.flip(stack, (0,)) for stack in (*ctx.carries, *stacks)]
        outputs = _emit(ctx.body, f"{ctx.loop}_backward", ctx.loop, (*grads, *totals), scanned, shared)
        end = ctx.num_grads + ctx.num_totals
        of_weights = [torch.flip(stack, (0,)) for stack in outputs[end:]]
        found: Iterator[torch.Tensor] = iter((*outputs[: ctx.num_grads], *of_weights, *outputs[ctx.num_grads : end]))
        return None, *(next(found) if needed else None for needed in ctx.needed)


def _weights_of(layers: _Layers, flat: Sequence[torch.Tensor]) -> tuple[Tensors, Tensors, Tensors]:
    carry, pieces, shared = layers.split(flat)
    return carry, tuple(leaf(piece) for leaf, piece in zip(layers.leaves, pieces, strict=True)), shared


def _forward_and_backward(
    layers: _Layers, needed: Sequence[bool], flat: Sequence[torch.Tensor], num_grads: int, num_totals: int
) -> Tensors:
    """(next carry, gradients of the carry, new totals of shared, gradients of the weights) of one layer.

    Args:
      needed: which of carry, weights and shared have a gradient.
      flat: gradients of the next carry, the totals of shared so far, carry, pieces of the stacks, shared.
    """
    grads, totals = flat[:num_grads], flat[num_grads : num_grads + num_totals]
    with torch.enable_grad():
        carry, weights, shared = _weights_of(layers, flat[num_grads + num_totals :])
        leaves = [tensor.detach() for tensor in (*carry, *weights, *shared)]
        wanted = [leaf.requires_grad_() for leaf in itertools.compress(leaves, needed)]
        results = layers.turn(*layers.split(leaves))
        of_carry = layers.split(needed)[0]
        found = torch.autograd.grad(
            list(itertools.compress(results, of_carry)), wanted, grads, allow_unused=True, materialize_grads=True
        )
    with region("backward"):
        found = [(grad.to_local() if isinstance(grad, DTensor) else grad).contiguous() for grad in found]
        of_weights = found[num_grads : len(found) - num_totals]
        of_shared = found[len(found) - num_totals :]
        new_totals = [total + grad for total, grad in zip(totals, of_shared, strict=True)]
    return tuple(result.detach() for result in results) + (*found[:num_grads], *new_totals, *of_weights)


_Form = tuple[torch.Size, torch.dtype]


def _form(tensor: torch.Tensor) -> _Form:
    return tensor.shape, tensor.dtype


def _trace(function: Callable[..., Tensors], forms: Sequence[_Form]) -> torch.fx.GraphModule:
    """The graph of a function of contiguous tensors of these forms, apart from the trace that is going on."""
    attribution = current_attribution()

    def attributed(*flat: torch.Tensor) -> Tensors:
        with attribution:  # the tracer's own mode is now the innermost, and would see an op before it is labelled
            return function(*flat)

    with disable_proxy_modes_tracing():
        module = make_fx(attributed)(*(torch.empty(shape, dtype=dtype) for shape, dtype in forms))
    attribute_backward(module.graph)
    return module


def _take_forward(joint: torch.fx.GraphModule, num_skipped: int, num_carry: int) -> torch.fx.GraphModule:
    """The part of a joint graph that gives the next carry, as a body that also returns the carry that it was given.

    The joint graph loses that output; the forward's ops get a name, which is the same in both graphs.

    Args:
      num_skipped: leading inputs that the forward has not.
    """
    output = joint.graph.output_node()
    results = output.args[0][:num_carry]
    needed, pending = set(), list(results)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending.extend(node.all_input_nodes)
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    inputs = joint.graph.find_nodes(op="placeholder")[num_skipped:]
    for node in joint.graph.nodes:
        is_copied = node in inputs or (node in needed and node.op != "placeholder")
        # What the backward alone reads of the forward, as attention's log-sum-exp, has a name too: it may be kept.
        if is_copied or node.meta.get("region") == "forward":
            node.meta["turn_op"] = node.name
        if is_copied:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in (*results, *inputs[:num_carry])))
    output.args = (tuple(output.args[0][num_carry:]),)
    joint.graph.eliminate_dead_code()
    joint.recompile()
    return torch.fx.GraphModule(joint, graph)


def _unused_name(prefix: str) -> str:
    root = get_proxy_mode().tracer.root
    return next(name for name in (f"{prefix}_{index}" for index in itertools.count()) if not hasattr(root, name))


def _emit(
    body: torch.fx.GraphModule,
    name: str,
    loop: str,
    init: Sequence[torch.Tensor],
    stacks: Sequence[torch.Tensor],
    shared: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Puts a `scan` into the trace that is going on; returns its last carry and then its stacked results."""
    tracer = get_proxy_mode().tracer
    tracer.root.register_module(name if loop else _unused_name(name), body)
    arguments = tree_map(tracer.unwrap_proxy, (body, list(init), list(stacks), tuple(shared)))
    values = [node.meta["val"] for node in body.graph.output_node().args[0]]
    with disable_proxy_modes_tracing():
        shapes = [value.shape if i < len(init) else (len(stacks[0]), *value.shape) for i, value in enumerate(values)]
        outputs = [torch.empty(shape, dtype=value.dtype) for shape, value in zip(shapes, values, strict=True)]
    with fx_traceback.annotate(current_attribution().label()):
        proxy = tracer.create_proxy("call_function", torch.ops.higher_order.scan, arguments, {}, name="scan")
        if loop:
            proxy.node.meta["loop"] = loop
        return list(track_tensor_tree(tuple(outputs), proxy, constant=None, tracer=tracer))
