"""Inner attentions against a loop over heads and tokens; the loss node against its definition."""

import pytest
import torch

from titan.core.config.tree import leaves
from titan.models.layers.attention import (
    INNER_ATTENTION,
    MathAttentionConfig,
    SdpaAttentionConfig,
    causal_segment_mask,
)
from titan.models.layers.cross_entropy import CrossEntropyConfig
from titan.models.llama3.config import Llama3Config

SEGMENT_IDS = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 0, 0], [1, 1, 2, 2, 3, 3, 3, 3, 3]], dtype=torch.int32)


def inputs(dtype=torch.float32, num_heads=6, num_kv_heads=2, head_dim=8):
    generator = torch.Generator().manual_seed(0)
    batch, length = SEGMENT_IDS.shape
    shapes = [(batch, heads, length, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def reference(q, k, v, scale, window=0):
    """Each query by itself, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for row, head, query in torch.cartesian_prod(*(torch.arange(size) for size in q.shape[:3])).tolist():
        first = max(0, query - window + 1) if window else 0
        keys = [key for key in range(first, query + 1) if SEGMENT_IDS[row, key] == SEGMENT_IDS[row, query]]
        scores = (k[row, head // group, keys].double() @ q[row, head, query].double()) * scale
        out[row, head, query] = scores.softmax(0) @ v[row, head // group, keys].double()
    return out


@pytest.mark.parametrize("config", [MathAttentionConfig, SdpaAttentionConfig], ids=["math", "sdpa"])
@pytest.mark.parametrize("num_kv_heads, window", [(1, 0), (2, 0), (6, 0), (2, 1), (2, 3), (2, 9)])
def test_equals_each_query_by_itself(config, num_kv_heads, window):
    q, k, v = inputs(num_kv_heads=num_kv_heads)
    out = config(0.3, window).build()(q, k, v, causal_segment_mask(SEGMENT_IDS))
    expected = reference(q, k, v, 0.3, window)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-6)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out, (q, k, v), cotangent)
    expected_grads = torch.autograd.grad(expected, (q, k, v), cotangent.double())
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        # Where a query sees one key its gradient is 0, computed as a difference of numbers up to about 10 in float32.
        torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=3e-6)


@pytest.mark.parametrize("config", [MathAttentionConfig(0.3), SdpaAttentionConfig(0.3)], ids=["math", "sdpa"])
def test_bfloat16_stays_near(config):
    q, k, v = inputs(torch.bfloat16)
    out = config.build()(q, k, v, causal_segment_mask(SEGMENT_IDS))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), reference(q, k, v, 0.3), rtol=2e-2, atol=2e-2)


def test_loss_is_the_sum_over_labelled_tokens():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 5, 8, generator=generator), torch.randn(11, 8, generator=generator)
    labels = torch.randint(0, 11, (2, 5), generator=generator, dtype=torch.int32)
    labels[0, 1:4] = -100
    loss_node = CrossEntropyConfig().build()
    loss = loss_node(hidden, lambda x: x @ weight.T, labels)
    probabilities = (hidden.double() @ weight.double().T).softmax(-1)
    expected = -sum(
        probabilities[row, token, labels[row, token]].log()
        for row in range(2)
        for token in range(5)
        if labels[row, token] != -100
    )
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    assert loss_node(hidden, lambda x: x.bfloat16() @ weight.bfloat16().T, labels).dtype == torch.float32
    assert loss_node(hidden, lambda x: x @ weight.T, torch.full((2, 5), -100)) == 0  # no label at all: 0, not NaN


def test_the_flag_offers_what_there_is():
    config = Llama3Config()
    (choices,) = (leaf.choices for leaf in leaves(config) if leaf.path == "attention")
    assert choices == tuple(INNER_ATTENTION)
