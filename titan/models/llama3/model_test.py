"""Llama 3: sizes, flags, what the tree builds, and what capture relies on."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from titan.core.config.rewrite import Rule, rewrite
from titan.core.config.validate import ConfigError, validate
from titan.core.init import Normal, Ones, TruncatedNormal, init_plan
from titan.models.decoder_for_test import VOCAB_SIZE, batch, build, loss_and_gradients
from titan.models.layers.attention import MathAttentionConfig, SdpaAttention, SdpaAttentionConfig
from titan.models.llama3.config import LLAMA3_SIZES, Llama3Config, llama3_405b

SMALL = Llama3Config(
    vocab_size=VOCAB_SIZE, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, rope_scaling="llama3"
)


@pytest.mark.parametrize(
    "size, num_parameters",
    [("debug", 6_031_616), ("8b", 8_030_261_248), ("70b", 70_553_706_496), ("405b", 405_853_388_800)],
)
def test_published_sizes(size, num_parameters):
    config = LLAMA3_SIZES[size]()
    validate(config)
    model = config.components().build()
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert not list(model.buffers())


def test_initialisers():
    plan = init_plan(llama3_405b().components().build())
    assert plan["embedding.weight"] == Normal(1.0)
    assert plan["head.weight"] == TruncatedNormal(16384**-0.5, 3.0)
    assert plan["norm.weight"] == plan["layers.0.attention_norm.weight"] == Ones()
    for index in (0, 1, 125):
        for name in ("attention.wo", "feed_forward.w2"):
            assert plan[f"layers.{index}.{name}.weight"] == TruncatedNormal(0.02 / (2 * (index + 1)) ** 0.5)
        for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"):
            assert plan[f"layers.{index}.{name}.weight"] == TruncatedNormal(0.02, 3.0)
    tied = init_plan(dataclasses.replace(SMALL, tie_embeddings=True).components().build())
    assert tied["embedding.weight"] == TruncatedNormal(32**-0.5) and "head.weight" not in tied


def test_the_config_imports_no_torch():
    paths = [path for path in sys.path if path]
    script = f"""
import sys
sys.path[:0] = {paths!r}
import titan.models.llama3.config
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_kv_heads": 3}, "--model.num_kv_heads: 3 does not divide model.num_heads=4; give a divisor of it"),
        ({"dim": 30}, "--model.head_dim: 0 means dim / num_heads, but 4 heads do not divide model.dim=30; "),
        ({"head_dim": 5}, "--model.head_dim: a head of 5 elements cannot be split into the pairs that RoPE rotates; "),
        ({"rope_low_frequency_factor": 4.0}, "--model.rope_high_frequency_factor: 4 is not above "),
    ],
)
def test_contradictory_flags_are_named(changes, message):
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(SMALL, **changes).validate()
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_flops_are_those_that_pytorch_counts_less_half_of_attention():
    model, inputs = build(SMALL), batch(length=24)
    with FlopCounterMode(display=False) as counter:
        model.loss(**inputs).backward()
    full_square = 2 * 24 * (SMALL.num_layers * SMALL.dim) * 2 * 3  # q k and p v, forward and twice that backward
    assert counter.get_total_flops() / (2 * 24) == SMALL.flops_per_token(24) + full_square / 2


def test_a_rewritten_tree_builds_the_other_attention_with_the_same_result():
    tree = SMALL.components()
    rule = Rule(
        name="sdpa",
        type=MathAttentionConfig,
        path="layers.1.attention.inner",
        replace=lambda node: SdpaAttentionConfig(node.scale),
    )
    rewritten = rewrite(tree, [rule]).build()
    model = build(SMALL)
    rewritten.load_state_dict(model.state_dict(), assign=True)
    kinds = [isinstance(layer.attention.inner, SdpaAttention) for layer in rewritten.layers]
    assert kinds == [False, True]
    torch.testing.assert_close(rewritten.loss(**batch()), model.loss(**batch()), rtol=1e-5, atol=0)


def test_padding_changes_nothing():
    model, inputs = build(SMALL), batch()
    padded = {name: torch.nn.functional.pad(tensor, (0, 5)) for name, tensor in inputs.items()}
    padded["labels_BT"][:, -5:] = -100
    weights = dict(model.named_parameters())
    for got, expected in zip(
        loss_and_gradients(model, weights, padded), loss_and_gradients(model, weights, inputs), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_weights_give_bfloat16_activations_and_a_float32_loss():
    model, inputs = build(SMALL, torch.bfloat16), batch()
    dtypes = set()
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))
    loss = model.loss(**inputs)
    assert dtypes == {torch.bfloat16} and loss.dtype == torch.float32
    torch.testing.assert_close(loss, build(SMALL).loss(**inputs), rtol=1e-3, atol=0)
    # A policy may keep some weights in float32, e.g. the norms; activations then still follow the linear layers.
    model.norm.float()
    assert torch.equal(model.loss(**inputs), loss)


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_captures_as_one_functional_graph_that_gives_the_same_bits(tie_embeddings):
    model, inputs = build(dataclasses.replace(SMALL, tie_embeddings=tie_embeddings)), batch()
    weights = dict(model.named_parameters())
    graph = make_fx(lambda *args: loss_and_gradients(model, *args), tracing_mode="fake")(weights, inputs)
    nodes = graph.graph.nodes
    operators = [node.target for node in nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert not [node for node in nodes if node.op == "get_attr"]  # no lifted constant
    assert not [operator for operator in operators if operator._schema.is_mutable]
    targets = [str(operator) for operator in operators]
    assert "aten._local_scalar_dense.default" not in targets
    # Shared by all layers, hence computed once however many there are.
    for name in ("cos", "sin", "bitwise_and", "eq"):
        assert len([target for target in targets if target.startswith(f"aten.{name}.")]) == 1, name
    # Keys and values are never repeated for the query heads that share them: both batched products of each layer
    # (and their backward, two each) have one matrix per key/value head.
    products = [node.meta["val"].shape[0] for node in nodes if str(node.target) == "aten.bmm.default"]
    assert products == [2 * SMALL.num_kv_heads] * (2 * 3 * SMALL.num_layers)

    expected = loss_and_gradients(model, weights, inputs)
    for got, want in zip(graph(weights, inputs), expected, strict=True):
        assert torch.equal(got, want)
