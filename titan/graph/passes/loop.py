"""A `scan` of a graph, to be given more to carry, to scan and to stack."""

import operator

import torch
import torch.fx

from titan.graph.passes.added_ops import add_op

aten = torch.ops.aten


class Loop:
    """One `scan` and its body.

    Attributes:
      scan: the op.
      body: the graph of one turn.
    """

    def __init__(self, module: torch.fx.GraphModule, scan: torch.fx.Node):
        self.scan = scan
        self.body: torch.fx.Graph = operator.attrgetter(scan.args[0].target)(module).graph

    @property
    def num_carry(self) -> int:
        """How many values go from turn to turn."""
        return len(self.scan.args[1])

    @property
    def length(self) -> int:
        """The number of turns."""
        return len(self.scan.args[2][0].meta["val"])

    def inputs(self) -> list[torch.fx.Node]:
        """The body's inputs: what it carries, its entry of each stack, what is shared."""
        return self.body.find_nodes(op="placeholder")

    def stack_result(self, node: torch.fx.Node) -> torch.fx.Node:
        """Stacks a value of each turn; returns the stack."""
        output, value = self.body.output_node(), node.meta["val"]
        output.args = ((*output.args[0], node),)
        stack = value.new_empty((self.length, *value.shape))
        self.scan.meta["val"] = (*self.scan.meta["val"], stack)
        return self._result(len(self.scan.meta["val"]) - 1, stack)

    def scan_over(self, stack: torch.fx.Node) -> torch.fx.Node:
        """Gives each turn its entry of a stack; returns the body's input."""
        body, init, stacks, shared = self.scan.args
        after = self.inputs()[len(init) + len(stacks) - 1]
        self.scan.args = (body, init, [*stacks, stack], shared)
        return self._add_input(after, stack, stack.meta["val"][0])

    def carry(self, init: torch.fx.Node) -> torch.fx.Node:
        """Gives the first turn a value and each later one what `pass_on` says; returns the body's input."""
        body, inits, stacks, shared = self.scan.args
        after = self.inputs()[len(inits) - 1]
        for result in list(self.scan.users):
            if result.args[1] >= len(inits):
                result.update_arg(1, result.args[1] + 1)
        self.scan.args = (body, [*inits, init], stacks, shared)
        added = self._add_input(after, init, init.meta["val"])
        output = self.body.output_node()
        output.args = ((*output.args[0][: len(inits)], added, *output.args[0][len(inits) :]),)
        values = self.scan.meta["val"]
        self.scan.meta["val"] = (*values[: len(inits)], init.meta["val"], *values[len(inits) :])
        return added

    def pass_on(self, carried: torch.fx.Node, node: torch.fx.Node) -> torch.fx.Node:
        """Makes `node` what the next turn is given for `carried`; returns what the last turn passes on."""
        index = self.inputs().index(carried)
        output = self.body.output_node()
        output.args = ((*output.args[0][:index], node, *output.args[0][index + 1 :]),)
        return self._result(index, carried.meta["val"])

    def _add_input(self, after: torch.fx.Node, source: torch.fx.Node, value: torch.Tensor) -> torch.fx.Node:
        with self.body.inserting_after(after):
            added = self.body.placeholder(f"kept_{source.name}")
        added.target = added.name  # unique, unlike what it was made from
        added.meta = {"val": value}
        return added

    def _result(self, index: int, value: torch.Tensor) -> torch.fx.Node:
        graph, region = self.scan.graph, self.scan.meta["region"]
        with graph.inserting_before(self.scan.next):
            return add_op(graph, operator.getitem, (self.scan, index), value, like=self.scan, region=region)
