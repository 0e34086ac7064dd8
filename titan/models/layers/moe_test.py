"""Mixture of experts: routing, against each token by itself, and what static shapes must not break."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from titan.core.init import Normal, Zeros, init_plan
from titan.models.layers.moe import LoopExpertsConfig, MoEConfig, RouterConfig, RowOrder, count_rows

DIM, FFN_DIM, NUM_EXPERTS = 12, 10, 7


def config(num_active_experts=3, normalize_weights=True):
    return MoEConfig(
        router=RouterConfig(DIM, NUM_EXPERTS, num_active_experts, normalize_weights),
        experts=LoopExpertsConfig(NUM_EXPERTS, DIM, FFN_DIM),
    )


def build(moe_config, dtype=torch.float32):
    module = moe_config.build()
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(p.shape, generator=generator) * 0.5 for name, p in module.named_parameters()}
    module.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, assign=True)
    return module


def tokens(num_tokens=11, dtype=torch.float32):
    return torch.randn(1, num_tokens, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)


def reference(module, x, moe_config):
    """Each token and each of its experts by itself, in float64."""
    gate, w1, w2, w3 = (
        weight.double() for weight in (module.router.weight, module.experts.w1, module.experts.w2, module.experts.w3)
    )
    out = []
    for token in x.flatten(0, -2).double():
        scores = (gate @ token).softmax(0)
        chosen = scores.argsort(descending=True)[: moe_config.router.num_active_experts]
        weights = scores[chosen] / (scores[chosen].sum() if moe_config.router.normalize_weights else 1)
        mapped = [
            (torch.nn.functional.silu(token @ w1[expert]) * (token @ w3[expert])) @ w2[expert] for expert in chosen
        ]
        out.append(sum(weight * result for weight, result in zip(weights, mapped, strict=True)))
    return torch.stack(out).view(x.shape)


@pytest.mark.parametrize("num_active_experts", [1, 3, NUM_EXPERTS])
@pytest.mark.parametrize("normalize_weights", [True, False])
def test_equals_each_token_by_itself(num_active_experts, normalize_weights):
    moe_config = config(num_active_experts, normalize_weights)
    module, x = build(moe_config), tokens().requires_grad_()
    out, expected = module(x), reference(module, x, moe_config)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    inputs = [x, *module.parameters()]
    grads = torch.autograd.grad(out, inputs, cotangent)
    for grad, expected_grad in zip(grads, torch.autograd.grad(expected, inputs, cotangent.double()), strict=True):
        torch.testing.assert_close(grad, expected_grad.float(), rtol=1e-4, atol=1e-5)


def test_router_chooses_the_likeliest_and_its_weights_sum_to_one():
    router, x = build(config()).router, tokens(50).flatten(0, 1)
    scores, weights, experts = router(x)
    torch.testing.assert_close(scores, (x @ router.weight.T).softmax(-1))
    torch.testing.assert_close(weights.sum(-1), torch.ones(50))
    assert (weights[:, :-1] >= weights[:, 1:]).all() and (weights > 0).all()
    for token_scores, chosen in zip(scores, experts, strict=True):
        assert len(set(chosen.tolist())) == 3
        others = [expert for expert in range(NUM_EXPERTS) if expert not in chosen]
        assert token_scores[chosen].min() >= token_scores[others].max()


def test_scores_are_float32_whatever_the_dtypes():
    router, x = build(config(), torch.bfloat16).router, tokens(50, torch.bfloat16).flatten(0, 1)
    scores, weights, _ = router(x)
    assert scores.dtype == weights.dtype == torch.float32
    torch.testing.assert_close(scores, (x.double() @ router.weight.double().T).softmax(-1).float())


def test_rows_are_sorted_by_expert_and_come_back():
    experts = torch.tensor([[4, 0], [4, 6], [0, 2], [2, 4]])
    order = RowOrder.by_expert(experts)
    sizes = count_rows(experts, NUM_EXPERTS)
    assert sizes.tolist() == [2, 0, 2, 0, 3, 0, 1] and sizes.dtype == torch.int32
    sorted_experts = order.sort(experts.flatten())
    assert sorted_experts.tolist() == [0, 0, 2, 2, 4, 4, 4, 6]
    rows = torch.arange(8)
    assert order.sort(rows).tolist() == [1, 4, 5, 6, 0, 2, 7, 3]  # within an expert the tokens' order
    assert torch.equal(order.unsort(order.sort(rows)), rows)


def test_experts_without_a_token_have_gradients_of_zero():
    moe_config = config(num_active_experts=2)
    module, x = build(moe_config), tokens().abs()
    with torch.no_grad():
        module.router.weight[[0, 3, 6]] = -10.0  # x is positive, so that these are chosen by no token
    sizes = count_rows(module.router(x[0]).experts_Mk, NUM_EXPERTS)
    assert sizes[[0, 3, 6]].tolist() == [0, 0, 0] and sizes.sum() == 11 * 2
    out = module(x)
    torch.testing.assert_close(out, reference(module, x, moe_config).float(), rtol=1e-5, atol=1e-5)
    out.square().sum().backward()
    for weight in (module.experts.w1, module.experts.w2, module.experts.w3):
        assert torch.isfinite(weight.grad).all()
        assert weight.grad[[0, 3, 6]].count_nonzero() == 0 and weight.grad[[1, 2, 4, 5]].count_nonzero() > 0


def test_bfloat16_stays_near():
    moe_config = config()
    module, x = build(moe_config, torch.bfloat16), tokens(dtype=torch.bfloat16)
    out, expected = module(x), reference(module, x, moe_config)
    assert out.dtype == torch.bfloat16
    assert (out - expected).abs().max() < 0.02 * expected.abs().max()


def test_shapes_do_not_depend_on_what_the_router_chooses():
    module, x = build(config()), tokens()
    parameters = dict(module.named_parameters())

    def loss_and_gradients(weights, x):
        loss = torch.func.functional_call(module, weights, (x,)).square().sum()
        return [loss, *torch.autograd.grad(loss, list(weights.values()))]

    graph = make_fx(loss_and_gradients, tracing_mode="fake")(parameters, x)
    other = tokens(22)[:, 11:]
    for got, expected in zip(graph(parameters, other), loss_and_gradients(parameters, other), strict=True):
        assert torch.equal(got, expected)
    targets = {str(node.target) for node in graph.graph.nodes}
    # Rows travel by gathers alone, in both directions.
    assert not targets & {"aten.index_put.default", "aten.index_add.default", "aten._local_scalar_dense.default"}


def test_every_weight_has_its_initialiser():
    moe_config = MoEConfig(RouterConfig(4, 3, 1, weight_init=Zeros()), LoopExpertsConfig(3, 4, 5))
    module = moe_config.build()
    assert init_plan(module) == {
        "router.weight": Zeros(),
        "experts.w1": Normal(0.02),
        "experts.w2": Normal(0.02),
        "experts.w3": Normal(0.02),
    }
    assert {name: tuple(p.shape) for name, p in module.experts.named_parameters()} == {
        "w1": (3, 4, 5),
        "w2": (3, 5, 4),
        "w3": (3, 4, 5),
    }
