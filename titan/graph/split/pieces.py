"""`split_step`: cuts a step at its loops over layers into pieces that are compiled one by one.

A piece is either straight, what lies before, between and after the loops, or a loop, of which one turn is a program
that is run as often as the loop has turns. Values go from piece to piece by name. What a forward loop stacks for a
backward loop alone is never made into a stack: it stays one value for each turn. What else a loop stacks, gradients of
its weights for one, is a stack of zeros at first, into which each turn writes its entry.
"""

import dataclasses
import operator
from collections.abc import Sequence

import torch
import torch.fx

import titan.graph.ir.barrier  # noqa: F401  registers torch.ops.titan.barrier
from titan.graph._compat import LazyGraphModule
from titan.graph.ir.reversed_scans import find_reversed_scans
from titan.graph.ir.step_graph import StepGraph
from titan.graph.ir.transfers import remove_transfers
from titan.graph.passes.activations import block_of, is_free
from titan.graph.passes.added_ops import add_op

aten = torch.ops.aten
_SCAN = torch.ops.higher_order.scan


@dataclasses.dataclass(frozen=True)
class Straight:
    """Ops that run once in a step.

    Attributes:
      name: what it does, for reports.
      module: a graph of `inputs` to `outputs`.
      inputs, outputs: names of values.
    """

    name: str
    module: torch.fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Loop:
    """One turn of a loop, and how the turns make the loop.

    Attributes:
      name: what it does, for reports.
      module: a graph of (what is carried, one entry of each of `stacks`, `shared`) to (what is carried to the next
        turn, one entry of each of `stacked`).
      num_turns: how often it runs.
      is_reversed: whether the first turn is that of the last entry.
      carry, stacks, shared: names of what goes in.
      carried: names of what the last turn carries on.
      stacked: names of the stacks made.
      zeros: for each of `stacked` the name of the stack of zeros that it begins as; None: it is one value a turn.
    """

    name: str
    module: torch.fx.GraphModule
    num_turns: int
    is_reversed: bool
    carry: tuple[str, ...]
    stacks: tuple[str, ...]
    shared: tuple[str, ...]
    carried: tuple[str, ...]
    stacked: tuple[str, ...]
    zeros: tuple[str | None, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """All that goes in. What is carried, and the zeros, nobody else reads."""
        return (*self.carry, *self.stacks, *self.shared, *filter(None, self.zeros))

    @property
    def outputs(self) -> tuple[str, ...]:
        """All that comes out."""
        return (*self.carried, *self.stacked)


@dataclasses.dataclass(frozen=True)
class SplitStep:
    """A step in pieces.

    Attributes:
      graph: the whole, without transfers between device and host.
      pieces: in the order in which they run. The last is straight; its outputs are those of the step, in their order.
      inputs: name of the value to name in the state or batch.
      values: name to form (of one device) of all values that go from piece to piece or in or out; of a value for each
        turn, that of the stack of them.
      by_turn: names of values that there are for each turn.
    """

    graph: StepGraph
    pieces: tuple[Straight | Loop, ...]
    inputs: dict[str, str]
    values: dict[str, torch.Tensor]
    by_turn: frozenset[str]


def split_step(graph: StepGraph) -> SplitStep:
    """Cuts a step, which should be as all passes left it. A step without loops is one piece."""
    graph = graph.copy()
    remove_transfers(graph.module)
    _take_from_barriers(graph)
    _copy_what_is_carried_and_read(graph.module.graph)
    cut = _Cut(graph.module)
    return SplitStep(
        graph,
        tuple(cut.pieces()),
        {node.name: node.meta["leaf"] for node in graph.module.graph.find_nodes(op="placeholder")},
        cut.values,
        frozenset(cut.by_turn),
    )


def _take_from_barriers(graph: StepGraph) -> None:
    """Lets ops read the batch itself where they read it behind a barrier, which holds back nothing that matters."""
    for barrier in graph.module.graph.find_nodes(op="call_function", target=torch.ops.titan.barrier.default):
        for result in list(barrier.users):
            held = barrier.args[0][result.args[1]]
            if held.op == "placeholder" and held.meta["leaf"] in graph.batch:
                result.replace_all_uses_with(held)


def _copy_what_is_carried_and_read(graph: torch.fx.Graph) -> None:
    """Gives each loop values of its own to carry first, whose memory its turns may take over."""
    for scan in graph.find_nodes(op="call_function", target=_SCAN):
        body, init, stacks, shared = scan.args
        reads = [*init, *stacks, *shared]
        own = list(init)
        for index, node in enumerate(init):
            if node.op == "placeholder" or len(node.users) > 1 or reads.count(node) > 1:
                with graph.inserting_before(scan):
                    region = node.meta.get("region", "forward")
                    own[index] = add_op(graph, aten.clone.default, (node,), node.meta["val"], like=node, region=region)
        scan.args = (body, own, stacks, shared)


class _Cut:
    """The work of `split_step`.

    Attributes:
      values, by_turn: see `SplitStep`.
    """

    def __init__(self, module: torch.fx.GraphModule):
        graph = module.graph
        self.values = {node.name: node.meta["val"] for node in graph.find_nodes(op="placeholder")}
        self.by_turn: set[str] = set()
        self._module = module
        self._reversed, self._flips = find_reversed_scans(graph)
        self._scans = graph.find_nodes(op="call_function", target=_SCAN)
        self._order = {node: index for index, node in enumerate(graph.nodes)}
        self._home: dict[torch.fx.Node, int] = {}  # straight pieces have even numbers, loops odd ones
        part = 0
        for node in graph.nodes:
            if _is_microbatch(node):
                self._home[node] = 0  # all in the first piece: the others are then the same for each of them
            elif node.target is _SCAN:
                self._home[node] = part + 1
                part += 2
            elif node.target is operator.getitem:
                self._home[node] = self._home[node.args[0]]
            elif node.op != "placeholder":
                self._home[node] = part

    def pieces(self) -> list[Straight | Loop]:
        """All pieces, in order."""
        results = [self._source(node) for node in self._module.graph.output_node().args[0]]
        names = [f"output.{index}" for index in range(len(results))]
        last, needed = self._straight(2 * len(self._scans), results, names)
        pieces: list[Straight | Loop] = [last]
        for part in reversed(range(2 * len(self._scans))):
            if part % 2:
                added, used = self._loop(self._scans[part // 2])
                pieces[:0] = added
                needed |= used
            elif made := sorted((node for node in needed if self._home.get(node) == part), key=self._order.get):
                piece, used = self._straight(part, made, [node.name for node in made])
                pieces.insert(0, piece)
                needed |= used
        return pieces

    def _straight(
        self, part: int, results: Sequence[torch.fx.Node], names: Sequence[str]
    ) -> tuple[Straight, set[torch.fx.Node]]:
        """The piece of a part that makes these values and gives them these names; the values that it needs."""
        needed: set[torch.fx.Node] = set()
        within: set[torch.fx.Node] = set()
        pending = list(results)
        while pending:
            node = self._source(pending.pop())
            if node not in within and (self._home.get(node) == part or self._is_cheap(node)):
                within.add(node)
                pending += node.all_input_nodes
            elif node not in within:
                needed.add(node)
        graph = torch.fx.Graph()
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        inputs: dict[str, torch.fx.Node] = {}
        for node in sorted(needed, key=self._order.get):
            name = self._name(node)
            if name not in inputs:
                inputs[name] = graph.placeholder(f"input_{len(inputs)}")
                inputs[name].meta = {"val": node.meta["val"]}
            copies[node] = inputs[name]
        for node in sorted(within, key=self._order.get):
            copies[node] = graph.node_copy(node, lambda used: copies[self._source(used)])
        graph.output(tuple(copies[node] for node in results))
        self.values |= {name: node.meta["val"] for name, node in zip(names, results, strict=True)}
        regions = dict.fromkeys(region for node in graph.nodes if (region := node.meta.get("region")))
        module = LazyGraphModule(self._module, graph)
        return Straight(", ".join(regions), module, tuple(inputs), tuple(names)), needed

    def _loop(self, scan: torch.fx.Node) -> tuple[list[Straight | Loop], set[torch.fx.Node]]:
        """A loop, before it what makes the zeros that it begins with, and the values that it needs."""
        attribute, init, stacks, shared = scan.args
        body = operator.attrgetter(attribute.target)(self._module)
        needed = {self._source(node) for node in (*init, *stacks, *shared)}
        results = [f"{scan.name}.{index}" for index in range(len(scan.meta["val"]))]
        self.values |= dict(zip(results, scan.meta["val"], strict=True))
        stacked = results[len(init) :]
        self.by_turn |= {name for name in stacked if self._is_by_turn(scan, name)}
        zeros = [None if name in self.by_turn else f"{name}.zeros" for name in stacked]
        blocks = (block_of(node.meta.get("module_fqn", "")) for node in body.graph.nodes)
        name = f"{next(filter(None, blocks), scan.name)} {scan.meta['region']}".strip()
        loop = Loop(
            name=name,
            module=body,
            num_turns=len(stacks[0].meta["val"]),
            is_reversed=scan in self._reversed,
            carry=tuple(map(self._name, init)),
            stacks=tuple(map(self._name, stacks)),
            shared=tuple(map(self._name, shared)),
            carried=tuple(results[: len(init)]),
            stacked=tuple(stacked),
            zeros=tuple(zeros),
        )
        return [*self._zeros(loop), loop], needed

    def _zeros(self, loop: Loop) -> list[Straight]:
        """A piece of its own: the one before the loop, of the head for one, needs the memory for other things."""
        graph = torch.fx.Graph()
        made = []
        for name, zeros in zip(loop.stacked, loop.zeros, strict=True):
            if zeros:
                value = self.values[name]
                node = graph.call_function(aten.zeros.default, (list(value.shape),), {"dtype": value.dtype})
                node.meta = {"val": value}
                self.values[zeros] = value
                made.append(node)
        graph.output(tuple(made))
        names = tuple(filter(None, loop.zeros))
        return [Straight(f"zeros for {loop.name}", LazyGraphModule({}, graph), (), names)] if made else []

    def _is_by_turn(self, scan: torch.fx.Node, name: str) -> bool:
        """Whether loops alone read a stack, one entry a turn."""
        results = [result for result in scan.users if self._name(result) == name]
        flips = [user for result in results for user in result.users if user in self._flips]
        users = {user for node in (*results, *flips) for user in node.users} - set(flips)
        return all(user.target is _SCAN and not {*results, *flips}.intersection(_not_stacks(user)) for user in users)

    def _is_cheap(self, node: torch.fx.Node) -> bool:
        """Whether a piece makes a value again rather than have it kept: a view, a constant, a gathered parameter."""
        if _is_microbatch(node):
            return False
        return node.op == "get_attr" or is_free(node) or bool(node.meta.get("parameter_gather"))

    def _source(self, node: torch.fx.Node) -> torch.fx.Node:
        return self._source(node.args[0]) if node in self._flips else node

    def _name(self, node: torch.fx.Node) -> str:
        node = self._source(node)
        if node.target is operator.getitem and node.args[0].target is _SCAN:
            return f"{node.args[0].name}.{node.args[1]}"
        return node.name


def _is_microbatch(node: torch.fx.Node) -> bool:
    """Whether an op takes a part out of an input."""
    return node.target is aten.select.int and node.args[0].op == "placeholder"


def _not_stacks(scan: torch.fx.Node) -> list[torch.fx.Node]:
    _, init, _, shared = scan.args
    return [*init, *shared]
