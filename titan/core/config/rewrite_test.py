"""Rewriting trees: what rules match, identity of unchanged subtrees, and each refusal."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan.core.config.rewrite import RewriteError, Rule, match_path, nodes, rewrite


@dataclasses.dataclass(frozen=True)
class Linear:
    width: int

    def build(self):
        return self.width


@dataclasses.dataclass(frozen=True)
class Float8Linear:
    inner: Linear

    def build(self):
        return self.inner.build()


@dataclasses.dataclass(frozen=True)
class Block:
    attention: Linear
    mlp: tuple[Linear, ...] = ()


@dataclasses.dataclass(frozen=True)
class Model:
    layers: tuple[Block, ...]
    head: Linear | None = None


MODEL = Model(layers=(Block(Linear(1), (Linear(2), Linear(3))), Block(Linear(4))), head=Linear(5))

trees = st.builds(
    Model,
    layers=st.lists(
        st.builds(
            Block, st.builds(Linear, st.integers()), st.lists(st.builds(Linear, st.integers()), max_size=2).map(tuple)
        ),
        max_size=3,
    ).map(tuple),
    head=st.none() | st.builds(Linear, st.integers()),
)


def to_float8(**match):
    return Rule(name="float8", replace=Float8Linear, **match)


def test_nodes_lists_paths_outer_before_inner():
    assert [path for path, _ in nodes(MODEL)] == [
        "", "layers.0", "layers.0.attention", "layers.0.mlp.0", "layers.0.mlp.1", "layers.1", "layers.1.attention",
        "head",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("glob", "path", "expected"),
    [
        ("layers.*.attention", "layers.0.attention", True),
        ("layers.*", "layers.0.attention", False),
        ("*", "layers.0", False),
        ("**.attention", "attention", True),
        ("**.attention", "layers.0.attention", True),
        ("layers.**", "layers", True),
        ("layers.**.0", "layers.0.mlp.0", True),
        ("layers.[0-1].*", "layers.2.mlp", False),
        ("**", "", True),
        ("", "", True),
        ("", "layers", False),
        ("HEAD", "head", False),
    ],
)
def test_match_path(glob, path, expected):
    assert match_path(glob, path) is expected


def test_replaces_by_type_path_and_both():
    by_type = rewrite(MODEL, [to_float8(type=Linear)])
    assert sum(isinstance(node, Float8Linear) for _, node in nodes(by_type)) == 5
    by_path = rewrite(MODEL, [to_float8(path="layers.*.attention")])
    assert [path for path, node in nodes(by_path) if isinstance(node, Float8Linear)] == [
        "layers.0.attention",
        "layers.1.attention",
    ]
    by_both = rewrite(MODEL, [to_float8(type=Linear, path="layers.0.**")])
    assert by_both.layers[0] == Block(Float8Linear(Linear(1)), (Float8Linear(Linear(2)), Float8Linear(Linear(3))))


def test_replaces_with_a_node_and_keeps_untouched_subtrees():
    result = rewrite(MODEL, [Rule(name="head", path="head", replace=Linear(9))])
    assert result == dataclasses.replace(MODEL, head=Linear(9))
    assert result.layers is MODEL.layers
    assert MODEL.head == Linear(5)


def test_replaces_the_root():
    other = Model(layers=())
    assert rewrite(MODEL, [Rule(name="root", path="", replace=other)]) is other


@given(trees)
def test_identity_rule_returns_the_same_tree(tree):
    assert rewrite(tree, [Rule(name="identity", type=Linear, replace=lambda node: node, optional=True)]) is tree


@given(trees)
def test_wrap_and_unwrap_are_inverse(tree):
    wrapped = rewrite(tree, [Rule(name="wrap", type=Linear, replace=Float8Linear, optional=True)])
    assert (
        rewrite(wrapped, [Rule(name="unwrap", type=Float8Linear, replace=lambda node: node.inner, optional=True)])
        == tree
    )


@given(trees, st.permutations(["layers.*.attention", "layers.*.mlp.*", "head"]))
def test_result_does_not_depend_on_the_order_of_rules(tree, globs):
    rules = {
        glob: Rule(
            name=glob, path=glob, type=Linear, replace=lambda node, add=add: Linear(node.width + add), optional=True
        )
        for add, glob in enumerate(["layers.*.attention", "layers.*.mlp.*", "head"], start=1)
    }
    assert rewrite(tree, [rules[glob] for glob in globs]) == rewrite(tree, list(rules.values()))


def test_two_rules_on_one_node_are_refused():
    with pytest.raises(RewriteError, match="rules 'a' and 'b' both match layers.0.attention"):
        rewrite(
            MODEL,
            [Rule(name="a", type=Linear, replace=Linear(0)), Rule(name="b", path="**.attention", replace=Linear(0))],
        )


def test_a_match_inside_a_replaced_node_is_refused():
    outer = Rule(name="outer", path="layers.0", replace=Block(Linear(0)))
    inner = Rule(name="inner", path="**.mlp.1", replace=Linear(0))
    for rules in ([outer, inner], [inner, outer]):
        with pytest.raises(
            RewriteError, match=r"'inner' matches layers.0.mlp.1, which is inside layers.0 that rule 'outer'"
        ):
            rewrite(MODEL, rules)


def test_a_rule_that_matches_nothing_is_refused_unless_optional():
    with pytest.raises(RewriteError, match="'float8' matches no node .*closest node is layers.0.attention"):
        rewrite(MODEL, [to_float8(path="layer.0.attention")])
    with pytest.raises(RewriteError, match="the tree has no Float8Linear"):
        rewrite(MODEL, [to_float8(type=Float8Linear)])
    assert rewrite(MODEL, [to_float8(type=Float8Linear, optional=True)]) is MODEL


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        (3, "at head gives 3; a replacement is an instance of a frozen dataclass"),
        (lambda node: Linear, "a replacement is an instance of a frozen dataclass"),
        (dataclasses.make_dataclass("Thawed", [])(), "a replacement is an instance of a frozen dataclass"),
        (Block(Linear(0)), r"gives a Block, which has no build\(\), for a Linear"),
    ],
)
def test_unfit_replacements_are_refused(replace, message):
    with pytest.raises(RewriteError, match=message):
        rewrite(MODEL, [Rule(name="bad", path="head", replace=replace)])


def test_rules_without_a_condition_or_with_one_name_are_refused():
    with pytest.raises(RewriteError, match="neither a type nor a path"):
        Rule(name="all", replace=Linear(0))
    with pytest.raises(RewriteError, match="distinct names"):
        rewrite(
            MODEL, [Rule(name="a", path="head", replace=Linear(0)), Rule(name="a", path="layers.0", replace=Linear(0))]
        )
