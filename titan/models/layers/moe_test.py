"""Mixture of experts: routing, against each token by itself, and what static shapes must not break."""

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from titan.core.init import Normal, Zeros, init_plan
from titan.models.layers.experts import LoopExpertsConfig
from titan.models.layers.moe import MoEConfig
from titan.models.layers.routed_rows import RowsByExpert, count_rows
from titan.models.layers.router import RouterConfig
from titan.models.layers.routing_tally import RoutingTally

DIM, FFN_DIM, NUM_EXPERTS = 12, 10, 7


def config(num_active_experts=3, normalize_weights=True, capacity_factor=0.0):
    return MoEConfig(
        router=RouterConfig(DIM, NUM_EXPERTS, num_active_experts, normalize_weights),
        experts=LoopExpertsConfig(NUM_EXPERTS, DIM, FFN_DIM),
        capacity_factor=capacity_factor,
    )


def build(moe_config, dtype=torch.float32):
    module = moe_config.build()
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(p.shape, generator=generator) * 0.5 for name, p in module.named_parameters()}
    module.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, assign=True)
    return module


def tokens(num_tokens=11, dtype=torch.float32):
    return torch.randn(1, num_tokens, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)


def reference(module, x, moe_config, bias=None):
    """Each token and each of its experts by itself, in float64; an expert that has had its capacity takes no more."""
    gate, w1, w2, w3 = (
        weight.double() for weight in (module.router.weight, module.experts.w1, module.experts.w2, module.experts.w3)
    )
    out, num_taken = [], dict.fromkeys(range(NUM_EXPERTS), 0)
    num_active, rows = moe_config.router.num_active_experts, x.flatten(0, -2).double()
    share = moe_config.capacity_factor * len(rows) * num_active / NUM_EXPERTS
    for token in rows:
        scores = (gate @ token).softmax(0)
        chosen = (scores if bias is None else scores + bias).argsort(descending=True)[:num_active]
        weights = scores[chosen] / (scores[chosen].sum() if moe_config.router.normalize_weights else 1)
        result = torch.zeros(DIM, dtype=torch.float64)
        for weight, expert in zip(weights, chosen.tolist(), strict=True):
            if not share or num_taken[expert] < share:
                num_taken[expert] += 1
                mapped = (torch.nn.functional.silu(token @ w1[expert]) * (token @ w3[expert])) @ w2[expert]
                result = result + weight * mapped
        out.append(result)
    return torch.stack(out).view(x.shape)


def assert_equal_with_gradients(module, moe_config, out, expected, x):
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    inputs = [x, *module.parameters()]
    grads = torch.autograd.grad(out, inputs, cotangent)
    for grad, expected_grad in zip(grads, torch.autograd.grad(expected, inputs, cotangent.double()), strict=True):
        torch.testing.assert_close(grad, expected_grad.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_active_experts", [1, 3, NUM_EXPERTS])
@pytest.mark.parametrize("normalize_weights", [True, False])
def test_equals_each_token_by_itself(num_active_experts, normalize_weights):
    moe_config = config(num_active_experts, normalize_weights)
    module, x = build(moe_config), tokens().requires_grad_()
    assert_equal_with_gradients(module, moe_config, module(x), reference(module, x, moe_config), x)


@pytest.mark.parametrize("capacity_factor", [0.5, 1.0, 1.2])
def test_with_a_capacity_an_expert_takes_its_first_tokens_alone(capacity_factor):
    moe_config = config(capacity_factor=capacity_factor)
    module, x = build(moe_config), tokens(23).requires_grad_()
    out, tally = module(x, RoutingTally.start(1, NUM_EXPERTS))
    assert_equal_with_gradients(module, moe_config, out, reference(module, x, moe_config), x)
    capacity = math.ceil(capacity_factor * 23 * 3 / NUM_EXPERTS)
    assert 0 < tally.dropped == (tally.chosen_LX - capacity).clamp(min=0).sum()


def test_a_bias_changes_the_choice_and_not_the_weights():
    moe_config, bias = config(), torch.linspace(0.6, 0.0, NUM_EXPERTS)
    module, x = build(moe_config), tokens().requires_grad_()
    table = torch.stack([torch.zeros(NUM_EXPERTS), bias])
    tally = RoutingTally.start(2, NUM_EXPERTS)
    unbiased, tally = module(x, tally, table)
    assert torch.equal(unbiased, module(x))
    out, tally = module(x, tally, table)
    assert_equal_with_gradients(module, moe_config, out, reference(module, x, moe_config, bias.double()), x)
    assert (tally.chosen_LX[0] != tally.chosen_LX[1]).any()


def test_the_tally_is_what_the_routers_did():
    module = build(config())
    batches = [tokens(11), tokens(22)[:, 11:]]
    tally = RoutingTally.start(2, NUM_EXPERTS)
    for x in batches:
        _, tally = module(x, tally)
    scores, _, experts = zip(*(module.router(x[0]) for x in batches), strict=True)
    assert tally.mixture == 2 and tally.dropped == 0
    assert tally.chosen_LX.tolist() == [[int((chosen == x).sum()) for x in range(NUM_EXPERTS)] for chosen in experts]
    entropy = sum(torch.distributions.Categorical(probs=s).entropy().sum() for s in scores)
    torch.testing.assert_close(tally.entropy, entropy)
    torch.testing.assert_close(tally.probabilities_X, sum(s.sum(0) for s in scores))
    assert not tally.entropy.requires_grad
    tally.probabilities_X[0].backward()
    assert module.router.weight.grad.abs().max() > 0


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
    rows = RowsByExpert.of(experts, NUM_EXPERTS, max_rows=100)
    assert rows.group_sizes_X.tolist() == [2, 0, 2, 0, 3, 0, 1] and rows.group_sizes_X.dtype == torch.int32
    assert rows.choices.spread(experts.flatten().float()).tolist() == [0, 0, 2, 2, 4, 4, 4, 6]
    assert rows.tokens.spread(torch.arange(4.0)).tolist() == [0, 2, 2, 3, 0, 1, 3, 1]  # in the tokens' order
    assert rows.tokens.collect(torch.arange(8.0), torch.float32).tolist() == [0 + 4, 5 + 7, 1 + 2, 3 + 6]


def test_a_choice_of_nobody_has_no_row():
    experts = torch.tensor([[7, 0], [7, 6], [7, 7], [2, 4]])
    rows = RowsByExpert.of(experts, NUM_EXPERTS, max_rows=5)
    assert rows.group_sizes_X.tolist() == [1, 0, 1, 0, 1, 0, 1]
    copies = torch.tensor([1.0, 2.0, 4.0, 8.0, 0.0])  # the fifth row is nobody's
    assert rows.tokens.collect(copies, torch.float32).tolist() == [1, 8, 0, 2 + 4]
    sources = torch.arange(1.0, 5.0, requires_grad=True)
    spread = rows.tokens.spread(sources)
    assert spread[:4].tolist() == [1, 4, 4, 2]
    (grad,) = torch.autograd.grad(spread, sources, copies)
    assert grad.tolist() == [1, 8, 0, 2 + 4]


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
