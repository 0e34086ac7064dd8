"""The order of passes, and passes from outside."""

import pytest

from titan.core.registry import RegistryError
from titan.graph.passes import registry
from titan.graph.passes.options import PassOptions
from titan.graph.passes.registry import pass_names, passes_for, register_pass


@pytest.fixture(autouse=True)
def passes(monkeypatch):
    monkeypatch.setattr(registry, "_PASSES", dict(registry._PASSES))


def _names(executor, **options):
    return [step.__name__ for step in passes_for(executor, PassOptions(**options))]


def test_passes_are_in_the_order_in_which_they_run():
    common = ["no_ops", "common_subexpressions", "dead_code", "memory_policy"]
    assert _names("torch") == common
    assert _names("xla") == [*common, "cross_entropy_backward"]


def plain(graph):
    """A pass."""
    return graph


def configured(options):
    """The maker of a pass, which the name of the run switches on."""
    return plain if options.config == "on" else None


def test_a_pass_from_outside_has_its_place_and_name():
    register_pass("first", f"{__name__}:plain", before="no_ops", executors=("xla",))
    register_pass("last", f"{__name__}:configured", is_configured=True)
    assert _names("xla", config="on") == ["first", *_names("torch")[:4], "cross_entropy_backward", "last"]
    assert _names("torch", config="off") == ["no_ops", "common_subexpressions", "dead_code", "memory_policy"]
    assert pass_names()[0] == "first" and pass_names()[-1] == "last"
    (first, *_) = passes_for("xla", PassOptions())
    assert first("graph") == "graph"


def test_mistakes_are_errors():
    register_pass("first", f"{__name__}:plain")
    register_pass("first", f"{__name__}:plain")  # a module imported twice
    with pytest.raises(RegistryError, match="two passes 'first'"):
        register_pass("first", f"{__name__}:configured")
    with pytest.raises(RegistryError, match="'other' is to come before 'no_such_pass', and there is none: no_ops"):
        register_pass("other", f"{__name__}:plain", before="no_such_pass")
