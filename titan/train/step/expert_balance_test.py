"""Balance of experts: auxiliary loss against Transformers, bias and reports against their definition, on any mesh."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from titan.models.layers.router import Routing
from titan.models.layers.routing_tally import RoutingTally
from titan.train.config.expert_balance import ExpertBalanceConfig
from titan.train.step.expert_balance import ExpertBalance
from titan.train.step.state import EXPERT_BIAS, LEARNING_RATE, PARAMS
from titan.train.testing.batches import batch
from titan.train.testing.case import HSDP, Case
from titan.train.testing.executed import evaluate_xla, initial_parameters, run_torch, run_xla
from titan.train.testing.models import model_components
from titan.train.testing.outcome import assert_same

NUM_MIXTURES, NUM_EXPERTS, NUM_ACTIVE = 3, 6, 2
BALANCED = ExpertBalanceConfig(bias=True, bias_rate=0.02, auxiliary_loss=0.3)
# float32 sums in another order, in units of a tensor's largest value.
TOLERANCE = 1e-5


def _balance(**changes) -> ExpertBalance:
    return ExpertBalance(NUM_MIXTURES, NUM_EXPERTS, NUM_ACTIVE, ExpertBalanceConfig(**changes))


def _tally(logits_LMX: torch.Tensor) -> RoutingTally:
    tally = _balance().start()
    for logits_MX in logits_LMX:
        scores_MX = logits_MX.softmax(dim=-1)
        routing = Routing(scores_MX, *scores_MX.topk(NUM_ACTIVE, dim=-1))
        tally = tally.add(routing, routing)
    return tally


def test_the_auxiliary_loss_of_all_devices_is_that_of_transformers():
    logits = torch.randn(NUM_MIXTURES, 40, NUM_EXPERTS, generator=torch.Generator().manual_seed(0), requires_grad=True)
    expected = load_balancing_loss_func(tuple(logits), NUM_EXPERTS, NUM_ACTIVE)
    # Four devices with ten tokens each.
    tallies = [_tally(logits[:, start : start + 10]) for start in range(0, 40, 10)]
    chosen = sum(tally.chosen_LX for tally in tallies)
    got = sum(_balance().auxiliary_loss(tally.probabilities_X, chosen) for tally in tallies)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    grads = [torch.autograd.grad(loss, logits)[0] for loss in (got, expected)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-8)


def test_the_bias_rises_where_there_are_few_tokens_and_falls_where_there_are_many():
    chosen = torch.tensor([[4, 4, 4], [0, 4, 8]], dtype=torch.int32)
    bias = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    balance = ExpertBalance(2, 3, 2, ExpertBalanceConfig(bias=True, bias_rate=0.25))
    assert balance.next_bias(bias, chosen).tolist() == [[1.0, 2.0, 3.0], [1.25, 2.0, 2.75]]


def test_what_is_reported():
    chosen = torch.tensor([[4, 4, 4], [0, 4, 8]], dtype=torch.int32)
    balance = ExpertBalance(2, 3, 2, ExpertBalanceConfig())
    got = balance.metrics(chosen, torch.tensor(6.0), torch.tensor(3.0))  # 6 tokens, twice
    assert {name: float(value) for name, value in got.items()} == {
        "expert_load_max": 1.5,
        "expert_load_worst": 2.0,
        "router_entropy": 0.25,
        "dropped_fraction": 0.25,
    }


def _initial_model() -> torch.nn.Module:
    model = model_components("qwen3_moe").build()
    parameters = {name: torch.from_numpy(array.copy()) for name, array in initial_parameters("qwen3_moe").items()}
    model.load_state_dict(parameters, assign=True)
    return model


def _inputs() -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array[0]) for name, array in batch().items() if name != LEARNING_RATE}


def test_a_step_adds_the_auxiliary_loss_of_transformers_to_its_own():
    balance = ExpertBalanceConfig(auxiliary_loss=0.3)
    got = run_torch(Case("qwen3_moe", balance=balance))
    model, inputs = _initial_model(), _inputs()
    logits: list[torch.Tensor] = []
    for layer in model.layers:
        layer.feed_forward.router.register_forward_hook(
            lambda module, args, routing: logits.append(routing.scores_MX.log())
        )
    loss = model.loss(*inputs.values()) / (inputs["labels"] != -100).sum()
    auxiliary = load_balancing_loss_func(tuple(logits), 8, 2)
    assert got.metrics[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert got.metrics[0]["auxiliary_loss"] == pytest.approx(auxiliary.item(), rel=1e-6)
    grads = torch.autograd.grad(loss + 0.3 * auxiliary, list(model.parameters()))
    norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    assert got.metrics[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
        expected = 0.1 * grad.numpy() * min(1.0, 1.0 / float(norm))
        np.testing.assert_allclose(got.gradients[name], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def test_replicas_shards_microbatches_and_loops_give_the_bias_of_one_device():
    case = Case("qwen3_moe", microbatches=2, balance=BALANCED)
    expected = run_xla(case)
    got = run_xla(dataclasses.replace(case, mesh=HSDP, scan=True, memory_policy="full"))
    assert_same(got, expected, TOLERANCE)
    assert got.expert_bias.shape == (2, 8) and np.array_equal(got.expert_bias, expected.expert_bias)
    assert np.abs(expected.expert_bias).max() > 0


def test_the_bias_evens_the_load():
    case = Case("qwen3_moe", balance=ExpertBalanceConfig(bias=True, bias_rate=0.002))
    expected = run_xla(case)
    assert run_torch(case).expert_bias.tolist() == expected.expert_bias.tolist()
    loads = [metrics["expert_load_max"] for metrics in expected.metrics]
    unbiased = run_xla(Case("qwen3_moe")).metrics
    assert loads[0] == unbiased[0]["expert_load_max"] and loads[2] < unbiased[2]["expert_load_max"]


def test_validation_chooses_with_the_bias():
    bias = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    routers_bias = iter(torch.from_numpy(bias))

    def choose_with_bias(module, args, routing):
        experts_Mk = (routing.scores_MX + next(routers_bias)).argsort(dim=-1, descending=True)[:, :2]
        weights_Mk = routing.scores_MX.gather(1, experts_Mk)
        return Routing(routing.scores_MX, weights_Mk / weights_Mk.sum(dim=-1, keepdim=True), experts_Mk)

    model = _initial_model()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".experts." in name:
                weight.copy_(10 * weight)  # the loss would else hardly depend on who is chosen
        unbiased = model.loss(*_inputs().values()).item()
        for layer in model.layers:
            layer.feed_forward.router.register_forward_hook(choose_with_bias)
        biased = model.loss(*_inputs().values()).item()
    assert abs(biased - unbiased) > 100 * TOLERANCE * biased
    state = {f"{PARAMS}{name}": weight.detach().numpy() for name, weight in model.named_parameters()}
    state[EXPERT_BIAS] = bias
    for case in (Case("qwen3_moe", balance=BALANCED), Case("qwen3_moe", HSDP, scan=True, balance=BALANCED)):
        assert evaluate_xla(case, state)["loss_sum"] == pytest.approx(biased, rel=TOLERANCE)


def test_dropped_tokens_are_reported():
    one = run_torch(Case("qwen3_moe_dropping"))
    assert 0.01 < one.metrics[0]["dropped_fraction"] < 0.5
    assert run_torch(Case("qwen3_moe")).metrics[0]["dropped_fraction"] == 0
