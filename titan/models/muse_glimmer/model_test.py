"""Muse Glimmer against a reference written out from its description, and a test for each of its peculiarities."""

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from titan.core.config.validate import ConfigError, validate
from titan.core.init import Normal, Zeros, init_plan
from titan.models.decoder_for_test import VOCAB_SIZE, batch, build, loss_and_gradients
from titan.models.layers.attention import causal_segment_mask
from titan.models.layers.rope import NoRotaryConfig, RotaryConfig
from titan.models.muse_glimmer.config import MUSE_GLIMMER_SIZES, MuseGlimmerConfig, muse_glimmer_30b

# Two periods; the window is shorter than a document, heads have other sizes than dim / num_heads, and logits reach
# into the bend of the soft cap.
SMALL = MuseGlimmerConfig(
    vocab_size=VOCAB_SIZE, dim=32, num_heads=4, num_kv_heads=2, head_dim=12, ffn_dim=48, window=5, logit_scale=6.0
)


def packed_batch() -> dict[str, torch.Tensor]:
    """A row of two documents, and one of a single document."""
    inputs = batch(length=24)
    inputs["segment_ids_BT"][0, 9:] = 2
    inputs["positions_BT"][0, 9:] -= 9
    inputs["labels_BT"][:, ::5] = -100
    return inputs


def reference_logits(weights: dict[str, torch.Tensor], config: MuseGlimmerConfig, inputs) -> torch.Tensor:
    """Token by token and head by head, with rotations as products of complex numbers, in the weights' dtype."""
    rows = []
    for tokens, positions, segments in zip(
        *(inputs[name] for name in ("tokens_BT", "positions_BT", "segment_ids_BT")), strict=True
    ):
        x = unit(weights["embedding.weight"][tokens], 1e-5)
        for layer in range(config.num_layers):
            own = {
                n.removeprefix(f"layers.{layer}."): w for n, w in weights.items() if n.startswith(f"layers.{layer}.")
            }
            normed = unit(x, 1e-5) * (own["attention_norm.weight"] + 1)
            attended = reference_attention(own, config, normed, positions, segments, layer % 4 == 3)
            x = x + unit(attended, 1e-8) * (own["attention_post_norm.weight"] + 1)
            normed = unit(x, 1e-5) * (own["feed_forward_norm.weight"] + 1)
            gate, up = (normed @ own[f"feed_forward.{name}.weight"].T for name in ("w1", "w3"))
            fed = (gate * torch.sigmoid(gate) * up) @ own["feed_forward.w2.weight"].T
            x = x + unit(fed, 1e-8) * (own["feed_forward_post_norm.weight"] + 1)
        h = unit(x, 1e-5) * weights["norm.weight"]
        rows.append(20 * torch.tanh(h @ weights["head.weight"].T * config.logit_scale / 20))
    return torch.stack(rows)


def reference_attention(own, config: MuseGlimmerConfig, x, positions, segments, is_global: bool) -> torch.Tensor:
    length, size, group = len(x), config.head_dim, config.num_heads // config.num_kv_heads
    q, k, v = ((x @ own[f"attention.w{name}.weight"].T).unflatten(1, (-1, size)) for name in "qkv")
    q, k = unit(q, 1e-5) * 43.7840518911 / math.sqrt(128), unit(k, 1e-5)
    if not is_global:
        frequencies = 500_000.0 ** (-torch.arange(0, size, 2, dtype=x.dtype) / size)
        turns = torch.polar(torch.ones(length, size // 2, dtype=x.dtype), positions[:, None] * frequencies)
        q, k = (
            torch.view_as_real(torch.view_as_complex(heads.unflatten(2, (-1, 2))) * turns[:, None]).flatten(2)
            for heads in (q, k)
        )
    out = []
    for token in range(length):
        first = 0 if is_global else max(0, token - config.window + 1)
        seen = [key for key in range(first, token + 1) if segments[key] == segments[token]]
        heads = []
        for head in range(config.num_heads):
            scores = k[seen, head // group] @ q[token, head] / math.sqrt(size)
            heads.append(torch.softmax(scores, 0) @ v[seen, head // group])
        out.append(torch.cat(heads))
    gate = torch.sigmoid(x @ own["attention.o_gate.weight"].T)
    return (torch.stack(out) * gate) @ own["attention.wo.weight"].T


def unit(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps)


def logits_of(model, inputs) -> torch.Tensor:
    return model(inputs["tokens_BT"], inputs["positions_BT"], inputs["segment_ids_BT"])


@pytest.mark.parametrize("attention", ["sdpa", "math"])
def test_logits_and_gradients_equal_the_reference(attention):
    model, inputs = build(dataclasses.replace(SMALL, attention=attention)), packed_batch()
    weights = {name: weight.detach().double().requires_grad_() for name, weight in model.named_parameters()}
    expected = reference_logits(weights, SMALL, inputs)
    assert 3 < expected.abs().max() < 20  # else the bound below says little
    assert (logits_of(model, inputs) - expected).abs().max() <= 1e-4

    expected_loss = torch.nn.functional.cross_entropy(
        expected.flatten(0, 1), inputs["labels_BT"].flatten().long(), reduction="sum"
    )
    loss = model.loss(**inputs)
    loss.backward()
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-6, atol=0)
    expected_gradients = torch.autograd.grad(expected_loss, list(weights.values()))
    for (name, weight), gradient in zip(model.named_parameters(), expected_gradients, strict=True):
        assert gradient.norm() > 0, name
        assert (weight.grad - gradient).norm() / gradient.norm() <= 1e-4, name


@pytest.mark.parametrize(
    "changes",
    [
        {"window": 6},
        {"global_interval": 8},
        {"query_scale": 3.8},
        {"logit_scale": 6.1},
        {"logit_soft_cap": 21.0},
        {"rope_theta": 4e5},
        {"norm_eps": 1e-3},
        {"post_norm_eps": 1e-3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_reference_would_notice_another_hyperparameter(changes):
    inputs = packed_batch()
    expected, got = (logits_of(build(config), inputs) for config in (SMALL, dataclasses.replace(SMALL, **changes)))
    assert (got - expected).abs().max() > 1e-3


def test_sizes_are_those_of_the_description():
    config = muse_glimmer_30b()
    validate(config)
    model = config.components().build()
    attention = 6656 * (3 * 32 * 128 + 2 * 2 * 128)  # wq, wo, o_gate; wk, wv
    layer = attention + 3 * 6656 * 19968 + 4 * 6656
    expected = 52 * layer + 2 * 202048 * 6656 + 6656
    assert sum(parameter.numel() for parameter in model.parameters()) == expected == 27_854_780_928
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert not list(model.buffers())
    debug = MUSE_GLIMMER_SIZES["debug"]()
    validate(debug)
    assert sum(p.numel() for p in debug.components().build().parameters()) == 2_756_736
    assert debug.num_layers == 2 * debug.global_interval


def test_every_fourth_layer_is_global_and_without_rope():
    layers = muse_glimmer_30b().components().layers
    assert [layer.attention.inner.window for layer in layers] == [2048, 2048, 2048, 0] * 13
    without_rope = [index for index, layer in enumerate(layers) if layer.attention.rotary == NoRotaryConfig()]
    assert without_rope == list(range(3, 52, 4))
    others = {layer.attention.rotary for layer in layers} - {NoRotaryConfig()}
    assert others == {RotaryConfig(adjacent_pairs=True)}


def attend(layer: int, x_BTE: torch.Tensor, model=None) -> torch.Tensor:
    """What the attention of one layer gives for a row of one document."""
    model = model or build(SMALL)
    positions = torch.arange(x_BTE.shape[1]).unsqueeze(0)
    return model.layers[layer].attention(x_BTE, model.rope(positions), causal_segment_mask(torch.ones_like(positions)))


@pytest.mark.parametrize("layer, first_seen", [(0, 7), (2, 7), (3, 0), (7, 0)])
def test_a_query_sees_its_window_or_all(layer, first_seen):
    x = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    attend(layer, x)[0, 11].sum().backward()
    seen = x.grad[0].abs().amax(-1) > 0
    assert seen.tolist() == [key >= first_seen for key in range(12)]


@pytest.mark.parametrize("layer, is_rotated", [(2, True), (3, False)])
def test_a_layer_without_rope_knows_no_order(layer, is_rotated):
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    swapped = x[:, [2, 1, 0, 3, 4]]
    difference = (attend(layer, x) - attend(layer, swapped))[0, 4].abs().max()
    assert difference > 1e-2 if is_rotated else difference < 1e-5


def test_queries_and_keys_are_normalised_without_a_scale():
    names = [name for name, _ in build(SMALL).layers[0].attention.named_parameters()]
    assert sorted(names) == [f"{name}.weight" for name in ("o_gate", "wk", "wo", "wq", "wv")]
    x = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(0))
    model = build(SMALL)
    expected = attend(0, x, model)
    with torch.no_grad():
        model.layers[0].attention.wq.weight.mul_(30.0)
        model.layers[0].attention.wk.weight.mul_(7.0)
    # The length of queries and keys is gone; what is left of it is eps, 1e-5 against a mean square of about 3.
    torch.testing.assert_close(attend(0, x, model), expected, rtol=1e-3, atol=1e-3)


def test_queries_have_the_factor_of_the_description_and_the_usual_one():
    scales = {layer.attention.inner.scale for layer in muse_glimmer_30b().components().layers}
    assert len(scales) == 1
    assert scales.pop() == pytest.approx(43.7840518911 / math.sqrt(128) / math.sqrt(128), rel=1e-12)
    normed = muse_glimmer_30b().components().layers[0].attention.q_norm.build()(torch.full((1, 128), 5.0))
    # Norm, factor and the usual factor together: a query of equal elements scores 43.784 with a key of ones.
    torch.testing.assert_close((normed * torch.ones(128)).sum() * 43.7840518911 / 128, torch.tensor(43.7840518911))


def test_a_gate_of_zeros_halves_what_attention_gives():
    x = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(0))
    model, open_model = build(SMALL), build(SMALL)
    with torch.no_grad():
        model.layers[0].attention.o_gate.weight.zero_()
    open_model.layers[0].attention.o_gate = None
    torch.testing.assert_close(attend(0, x, model), attend(0, x, open_model) / 2)


def test_norms_are_centred_and_those_after_sub_blocks_have_their_eps():
    model = muse_glimmer_30b().components().build()
    plan = init_plan(model)
    norms = [name for name in plan if "norm" in name]
    assert len(norms) == 52 * 4 + 1
    assert all(plan[name] == Zeros() for name in norms)
    assert {name: init for name, init in plan.items() if name not in norms and init != Normal(0.02)} == {}
    assert model.norm.centre == 0.0
    x = torch.full((1, 32), 1e-3)
    layer = build(SMALL).layers[0]
    for name, eps in (
        ("attention_norm", 1e-5),
        ("attention_post_norm", 1e-8),
        ("feed_forward_norm", 1e-5),
        ("feed_forward_post_norm", 1e-8),
    ):
        norm = getattr(layer, name)
        torch.testing.assert_close(norm(x), 1e-3 / math.sqrt(1e-6 + eps) * (norm.weight + 1).unsqueeze(0))


def test_the_residual_stream_begins_normalised():
    model, inputs = build(SMALL), batch()
    seen = []
    model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    for scale in (1.0, 100.0):
        with torch.no_grad():
            model.embedding.weight.mul_(scale)
        logits_of(model, inputs)
    torch.testing.assert_close(seen[0].square().mean(-1), torch.ones(2, 24), rtol=1e-3, atol=0)
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-3, atol=0)
    assert not list(model.embedding_norm.parameters())


def test_the_head_is_capped_in_float32_and_has_its_own_weight():
    head = muse_glimmer_30b().components().head
    assert (head.scale, head.soft_cap) == (0.19611613513, 20.0)
    model, inputs = build(SMALL, torch.bfloat16), batch()
    assert model.head.weight is not model.embedding.weight
    hidden = model.hidden(inputs["tokens_BT"], inputs["positions_BT"], inputs["segment_ids_BT"])
    logits = logits_of(model, inputs)
    assert hidden.dtype == torch.bfloat16 and logits.dtype == torch.float32
    products = (hidden @ model.head.weight.T).double()
    torch.testing.assert_close(logits.double(), 20 * torch.tanh(products * SMALL.logit_scale / 20), rtol=1e-5, atol=0)
    with torch.no_grad():
        model.head.weight.mul_(100.0)
    assert 19.9 < logits_of(model, inputs).abs().max() <= 20


def test_logits_begin_at_exactly_zero_and_the_final_norm_learns_first():
    model, inputs = SMALL.components().build(), batch()
    plan = init_plan(model)
    assert set(plan.values()) == {Normal(0.02), Zeros()}
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(parameter.shape, generator=generator) * (0.02 if plan[name] == Normal(0.02) else 0.0)
        for name, parameter in model.named_parameters()
    }
    model.load_state_dict(weights, assign=True)
    assert torch.equal(logits_of(model, inputs), torch.zeros(2, 24, VOCAB_SIZE))
    loss = model.loss(**inputs)
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(48 * math.log(VOCAB_SIZE)))
    assert [name for name, parameter in model.named_parameters() if parameter.grad.abs().max() > 0] == ["norm.weight"]


def test_flops_are_those_that_pytorch_counts():
    model, inputs = build(SMALL), batch(length=24)
    with FlopCounterMode(display=False) as counter:
        model.loss(**inputs).backward()
    # PyTorch counts all keys in every layer. Half of the square is 12 a token; half of the band of 5 within it, 24 * 5
    # less half of the corner of 5 x 5 that is cut off, is 4.479.
    surplus = 2 * (24 - 12) + 6 * (24 - (24 * 5 - 12.5) / 24)
    counted = counter.get_total_flops() / (2 * 24) - 6 * 2 * SMALL.num_heads * SMALL.head_dim * surplus
    assert counted == pytest.approx(SMALL.flops_per_token(24), rel=1e-12)


def test_flops_of_the_published_size():
    config = muse_glimmer_30b()
    assert config.flops_per_token(0) == 6 * (27_854_780_928 - 202048 * 6656 - (4 * 52 + 1) * 6656)
    # A window that is not shorter than the sequence takes nothing away.
    assert config.flops_per_token(2048) == dataclasses.replace(config, window=10**6).flops_per_token(2048)
    attention = config.flops_per_token(16384) - config.flops_per_token(0)
    assert attention == 6 * 2 * 4096 * (13 * 8192 + 39 * (2048 - 2048**2 / 32768))


def test_the_config_imports_no_torch():
    paths = [path for path in sys.path if path]
    script = f"""
import sys
sys.path[:0] = {paths!r}
import titan.models.muse_glimmer.config
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_kv_heads": 3}, "--model.num_kv_heads: 3 does not divide model.num_heads=4; give a divisor of it"),
        ({"head_dim": 5}, "--model.head_dim: a head of 5 elements cannot be split into the pairs that RoPE "),
        ({"num_layers": 6}, "--model.num_layers: 6 layers are no multiple of the pattern of model.global_interval=4; "),
        ({"logit_soft_cap": 0.0}, "--model.logit_soft_cap: 0 would make every score or logit the same; give "),
    ],
)
def test_contradictory_flags_are_named(changes, message):
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(SMALL, **changes).validate()
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_padding_changes_nothing():
    model, inputs = build(SMALL), batch()
    padded = {name: torch.nn.functional.pad(tensor, (0, 5)) for name, tensor in inputs.items()}
    padded["labels_BT"][:, -5:] = -100
    weights = dict(model.named_parameters())
    results = (loss_and_gradients(model, weights, which) for which in (padded, inputs))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_weights_give_bfloat16_activations_and_a_float32_loss():
    model, inputs = build(SMALL, torch.bfloat16), batch()
    dtypes = set()
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))
    loss = model.loss(**inputs)
    assert dtypes == {torch.bfloat16} and loss.dtype == torch.float32
    torch.testing.assert_close(loss, build(SMALL).loss(**inputs), rtol=2e-2, atol=0)


def test_captures_as_one_functional_graph_that_gives_the_same_bits():
    model, inputs = build(dataclasses.replace(SMALL, num_layers=2, global_interval=2)), batch()
    weights = dict(model.named_parameters())
    graph = make_fx(lambda *args: loss_and_gradients(model, *args), tracing_mode="fake")(weights, inputs)
    operators = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert not [node for node in graph.graph.nodes if node.op == "get_attr"]  # no lifted constant
    assert not [operator for operator in operators if operator._schema.is_mutable]
    for got, want in zip(graph(weights, inputs), loss_and_gradients(model, weights, inputs), strict=True):
        assert torch.equal(got, want)
