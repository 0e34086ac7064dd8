"""Qwen3: sizes, flags, initialisers, what the tree builds, and what capture relies on."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from titan.core.config.validate import ConfigError, validate
from titan.core.init import Normal, Ones, init_plan
from titan.models.decoder_for_test import VOCAB_SIZE, batch, build, loss_and_gradients
from titan.models.layers.routed_rows import count_rows
from titan.models.qwen3.config import QWEN3_SIZES, Qwen3Config, Qwen3MoeConfig

DENSE = Qwen3Config(vocab_size=VOCAB_SIZE, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=12, ffn_dim=48)
MOE = Qwen3MoeConfig(
    vocab_size=VOCAB_SIZE,
    dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    num_experts=5,
    num_active_experts=2,
    expert_ffn_dim=24,
)


@pytest.mark.parametrize(
    "size, num_parameters",
    [
        ("debug", 5_245_696),
        ("0.6b", 596_049_920),
        ("1.7b", 1_720_574_976),
        ("4b", 4_022_468_096),
        ("8b", 8_190_735_360),
        ("14b", 14_768_307_200),
        ("32b", 32_762_123_264),
        ("moe_debug", 6_040_320),
        ("30b_a3b", 30_532_122_624),
        ("235b_a22b", 235_093_634_560),
    ],
)
def test_published_sizes(size, num_parameters):
    config = QWEN3_SIZES[size]()
    validate(config)
    model = config.components().build()
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert not list(model.buffers())


@pytest.mark.parametrize("size", ["0.6b", "235b_a22b"])
def test_initialisers(size):
    model = QWEN3_SIZES[size]().components().build()
    parameters = dict(model.named_parameters())
    for fqn, initializer in init_plan(model).items():
        assert initializer == (Ones() if parameters[fqn].dim() == 1 else Normal(0.02)), fqn
    assert ("head.weight" in parameters) == (size != "0.6b")


def test_the_config_imports_no_torch():
    paths = [path for path in sys.path if path]
    script = f"""
import sys
sys.path[:0] = {paths!r}
import titan.models.qwen3.config
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    "config, changes, message",
    [
        (DENSE, {"num_kv_heads": 3}, "--model.num_kv_heads: 3 does not divide model.num_heads=4; give a divisor of it"),
        (MOE, {"head_dim": 5}, "--model.head_dim: a head of 5 elements cannot be split into the pairs that RoPE "),
        (MOE, {"num_active_experts": 6}, "--model.num_active_experts: 6 are more than model.num_experts=5; give "),
    ],
)
def test_contradictory_flags_are_named(config, changes, message):
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(config, **changes).validate()
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_flops_are_those_that_pytorch_counts(config):
    model, inputs = build(config), batch(length=24)
    with FlopCounterMode(display=False) as counter:
        model.loss(**inputs).backward()
    # Forward and twice that backward, for each token.
    full_square = 2 * 24 * config.num_layers * config.num_heads * config.head_dim * 2 * 3
    counted = counter.get_total_flops() / (2 * 24) - full_square / 2
    if config is MOE:  # the loop has each expert map every row
        expert = config.num_layers * 2 * 3 * config.dim * config.expert_ffn_dim * 3
        counted -= (config.num_experts - 1) * config.num_active_experts * expert
    assert counted == config.flops_per_token(24)


@pytest.mark.parametrize(
    "size, active", [("32b", 32.76e9 - 151936 * 5120), ("30b_a3b", 3.04e9), ("235b_a22b", 21.57e9)]
)
def test_flops_of_published_sizes_follow_the_active_parameters(size, active):
    """`active` are the published active parameters without the embedding's table, which is looked up."""
    assert QWEN3_SIZES[size]().flops_per_token(0) == pytest.approx(6 * active, rel=2e-3)


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_padding_changes_nothing(config):
    model, inputs = build(config), batch()
    padded = {name: torch.nn.functional.pad(tensor, (0, 5)) for name, tensor in inputs.items()}
    padded["labels_BT"][:, -5:] = -100
    weights = dict(model.named_parameters())
    results = (loss_and_gradients(model, weights, which) for which in (padded, inputs))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_a_token_sees_nothing_of_other_segments(config):
    model, inputs = build(config), batch()
    del inputs["labels_BT"]
    inputs["segment_ids_BT"][:, 9:] = 2
    logits = model(**inputs)
    inputs["tokens_BT"] = inputs["tokens_BT"].clone()
    inputs["tokens_BT"][:, :9] = 7
    changed = model(**inputs)
    torch.testing.assert_close(changed[:, 9:], logits[:, 9:], rtol=1e-5, atol=1e-5)
    assert (changed[:, :9] - logits[:, :9]).abs().max() > 0.1


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_bfloat16_weights_give_bfloat16_activations_and_a_float32_loss(config):
    model, inputs = build(config, torch.bfloat16), batch()
    dtypes = set()
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))
    loss = model.loss(**inputs)
    assert dtypes == {torch.bfloat16} and loss.dtype == torch.float32
    torch.testing.assert_close(loss, build(config).loss(**inputs), rtol=5e-3, atol=0)


@pytest.mark.parametrize("tie_embeddings", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_captures_as_one_functional_graph_that_gives_the_same_bits(config, tie_embeddings):
    model, inputs = build(dataclasses.replace(config, tie_embeddings=tie_embeddings)), batch()
    weights = dict(model.named_parameters())
    graph = make_fx(lambda *args: loss_and_gradients(model, *args), tracing_mode="fake")(weights, inputs)
    operators = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert not [node for node in graph.graph.nodes if node.op == "get_attr"]  # no lifted constant
    assert not [operator for operator in operators if operator._schema.is_mutable]
    assert "aten._local_scalar_dense.default" not in map(str, operators)
    for got, want in zip(graph(weights, inputs), loss_and_gradients(model, weights, inputs), strict=True):
        assert torch.equal(got, want)


def test_all_tokens_of_a_batch_are_routed():
    model, inputs = build(MOE), batch()
    sizes = []
    for layer in model.layers:
        layer.feed_forward.router.register_forward_hook(
            lambda module, args, routing: sizes.append(count_rows(routing.experts_Mk, MOE.num_experts))
        )
    model.loss(**inputs)
    assert [int(size.sum()) for size in sizes] == [2 * 24 * MOE.num_active_experts] * MOE.num_layers
