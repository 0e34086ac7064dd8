"""Swaps reach the model that a run builds, and only the nodes that their rules match."""

import dataclasses

import pytest

from titan.core.config.rewrite import RewriteError, Rule
from titan.core.config.validate import ConfigError
from titan.core.registry import Registry
from titan.models.layers.attention import MathAttention, MathAttentionConfig, SdpaAttention, SdpaAttentionConfig
from titan.train.assembly import components
from titan.train.config.parallelism import ParallelismConfig
from titan.train.config.run import Config
from titan.train.swaps import rules


def _sdpa(config: Config) -> tuple[Rule, ...]:
    if config.name != "swapped":
        return ()
    return (Rule(name="sdpa", type=MathAttentionConfig, replace=lambda node: SdpaAttentionConfig(node.scale)),)


def _registry(**swaps):
    registry = Registry("swap")
    for name, swap_rules in swaps.items():
        registry.register(name, swap_rules)
    return registry


def _inner(name: str) -> list[type]:
    model = components(dataclasses.replace(Config(), name=name)).build()
    return [type(layer.attention.inner) for layer in model.layers]


def test_without_a_swap_the_tree_is_the_models_own():
    assert components(Config()) == Config().model.components()


def test_a_swap_replaces_nodes_where_the_configuration_asks_for_it(monkeypatch):
    monkeypatch.setattr(rules, "SWAPS", _registry(sdpa=_sdpa))
    num_layers = Config().model.num_layers
    assert _inner("swapped") == [SdpaAttention] * num_layers
    assert _inner("other") == [MathAttention] * num_layers


def test_two_swaps_of_one_node_are_an_error(monkeypatch):
    def first_layer(config: Config) -> tuple[Rule, ...]:
        return (Rule(name="first", path="layers.0.attention.inner", replace=SdpaAttentionConfig(1.0)),)

    monkeypatch.setattr(rules, "SWAPS", _registry(sdpa=_sdpa, first=first_layer))
    with pytest.raises(RewriteError, match="rules 'sdpa' and 'first' both match layers.0.attention.inner"):
        _inner("swapped")


def test_a_swap_that_has_nothing_to_replace_is_refused_in_one_line(monkeypatch):
    def nothing(config: Config) -> tuple[Rule, ...]:
        return (Rule(name="nowhere", path="no.such.node", replace=SdpaAttentionConfig(1.0)),)

    monkeypatch.setattr(rules, "SWAPS", _registry(my_kernel=nothing))
    with pytest.raises(ConfigError) as error:
        components(Config())
    assert str(error.value) == "--my_kernel: Llama3 has no part that it would take the place of; leave it out"


def test_a_model_whose_mask_cannot_be_split_is_no_silent_mistake():
    @dataclasses.dataclass(frozen=True)
    class OtherMask:
        def build(self):
            raise AssertionError("not built")

    config = dataclasses.replace(Config(), parallelism=ParallelismConfig(context_parallel=2))
    tree = dataclasses.replace(config.model.components(), mask=OtherMask())
    with pytest.raises(RewriteError, match="rule 'split_mask' matches no node"):
        rules.with_swaps(tree, config)
