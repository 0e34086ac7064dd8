"""Memory policies as text."""

import pytest

from titan.graph.passes.memory_rules import ACTIONS, KINDS, POLICIES, parse_memory_policy


def _action(text: str, module: str, kind: str | None, *, in_layer: bool = True) -> str:
    return parse_memory_policy(text).action(module, kind, in_layer=in_layer)


def test_named_policies() -> None:
    for text, expected in {
        "none": {"input": "save", "matmul": "save", "attention": "save", "collective": "save", None: "save"},
        "full": {"input": "save", "matmul": "recompute", "attention": "recompute", None: "recompute"},
        "selective": {"input": "save", "matmul": "save", "attention": "save", "collective": "save", None: "recompute"},
        "offload": {"input": "offload", "matmul": "recompute", "collective": "recompute", None: "recompute"},
    }.items():
        for kind, action in expected.items():
            assert _action(text, "layers.7.attention", kind) == action, (text, kind)
        # They are about layers: the head's logits, for one, are kept.
        assert _action(text, "head", "matmul", in_layer=False) == "save"
    assert set(POLICIES) == {"none", "full", "selective", "offload"}


def test_the_last_rule_that_matches_counts() -> None:
    text = "full, layers.*.attention=save, layers.3.attention::matmul = offload, head=recompute"
    assert _action(text, "layers.0.attention.wq", None) == "save"
    assert _action(text, "layers.0.attention", "attention") == "save"
    assert _action(text, "layers.0.feed_forward", None) == "recompute"
    assert _action(text, "layers.3.attention.wq", "matmul") == "offload"
    assert _action(text, "layers.3.attention.wq", "attention") == "save"
    assert _action(text, "layers.33.attention.wq", "matmul") == "save"
    assert _action(text, "head", "matmul", in_layer=False) == "recompute"


def test_a_module_stands_for_what_is_within_it_and_for_a_loops_layers() -> None:
    assert _action("layers.*=recompute", "layers.*.attention.inner", None) == "recompute"  # scanned
    assert _action("layers.*=recompute", "layers.0+2i.attention", "matmul") == "recompute"
    assert _action("layers=recompute", "layers.5.attention", None) == "recompute"
    assert _action("**.wq=recompute", "layers.5.attention.wq", "matmul") == "recompute"
    assert _action("attention=recompute", "layers.5.attention", None) == "save"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "ful",
            "'ful' is neither a policy (none, full, selective, offload; it comes first) nor a rule, MODULE[::KIND]",
        ),
        ("", "'' is neither a policy"),
        ("full,", "'' is neither a policy"),
        ("layers.*=save,full", "'full' is neither a policy (none, full, selective, offload; it comes first)"),
        ("layers.*=keep", "'layers.*=keep': 'keep' is no action: give one of save, recompute, offload"),
        ("layers.*=", "'layers.*=': '' is no action"),
        ("layers.*=save=save", "'save=save' is no action"),
        (
            "none,layers.*::mm=save",
            "'layers.*::mm=save': 'mm' is no kind of value: give one of input, matmul, attention, collective",
        ),
        ("layers.*::=save", "'layers.*::=save': '' is no kind of value"),
        ("=save", "'=save' names no module: give a glob, such as layers.*"),
        ("::matmul=save", "'::matmul=save' names no module"),
    ],
)
def test_what_is_no_policy_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_memory_policy(text)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_every_action_and_kind_is_a_rule() -> None:
    for action in ACTIONS:
        for kind in KINDS:
            assert _action(f"a.b::{kind}={action}", "a.b.c", kind) == action
