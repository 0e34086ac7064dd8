"""Keys of arguments, and descriptions of nodes."""

import itertools
import math

import torch
import torch.fx

from titan.graph.ir.dialect import argument_key, describe, draws_random_numbers, group_argument

aten = torch.ops.aten


def test_arguments_that_python_calls_equal_have_different_keys() -> None:
    node = torch.fx.Graph().placeholder("x")
    numbers = [1, 1.0, True, 1 + 0j, 0, 0.0, -0.0, False, complex(0.0, -0.0), math.nan]
    different = [*numbers, "1", None, torch.float32, node]
    for a, b in itertools.combinations(different, 2):
        assert argument_key(a) != argument_key(b), (a, b)
        assert argument_key([a, {"k": a}]) != argument_key([a, {"k": b}]), (a, b)
    for value in different:
        assert argument_key((value, [value])) == argument_key([value, (value,)])
        hash(argument_key({"k": [value]}))
    assert argument_key(float("nan")) == argument_key(-math.nan)


def test_a_description_is_as_long_as_what_is_known() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(aten.add.Tensor, (x, 1))
    assert describe(node) == "node add_tensor (aten.add.Tensor)"
    node.meta.update(module_fqn="layers.0", source="model.py:7")
    assert describe(node) == "node add_tensor (aten.add.Tensor) in module layers.0 at model.py:7"
    assert describe(x) == "node x (placeholder)"


def test_group_argument_and_randomness_are_read_from_the_schema() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")

    def call(target, *args, **kwargs) -> torch.fx.Node:
        return graph.call_function(target, args, kwargs)

    assert group_argument(call(torch.ops._c10d_functional.all_reduce.default, x, "sum", "a")) == 2
    assert group_argument(call(torch.ops._c10d_functional.wait_tensor.default, x)) is None
    assert group_argument(call(aten.sin.default, x)) is None
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert not draws_random_numbers(call(attention, x, x, x))
    assert not draws_random_numbers(call(attention, x, x, x, 0.0))
    assert draws_random_numbers(call(attention, x, x, x, 0.1))
    assert draws_random_numbers(call(attention, x, x, x, dropout_p=0.1))
    assert draws_random_numbers(call(aten.rand.default, [2]))
    assert not draws_random_numbers(call(aten.sin.default, x))
