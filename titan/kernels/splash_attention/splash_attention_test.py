"""Every implementation against the float64 reference: forward and gradients."""

import dataclasses

import hypothesis
import jax
import pytest
import torch
from hypothesis import strategies

from titan.kernels.splash_attention.api import splash_attention, splash_attention_op
from titan.kernels.splash_attention.arg_specs import SMALL, SMALL_TILES, AttentionSpec, kernel_case
from titan.kernels.splash_attention.mask import PositionMask
from titan.kernels.splash_attention.reference import attention_reference
from titan.kernels.splash_attention.tiles import SplashTiles
from titan.kernels.splash_attention.xla import attention

FUSED = dataclasses.replace(SMALL_TILES, sa_use_fused_bwd_kernel=True)
THREE_STEPS = dataclasses.replace(SMALL_TILES, sa_dq_reduction_steps=3)


@dataclasses.dataclass
class Inputs:
    """Tensors of a spec, in float64, that bfloat16 represents exactly."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor
    segment_ids: torch.Tensor | None
    kv_segment_ids: torch.Tensor | None


def make_inputs(spec: AttentionSpec) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = (
        torch.randn(spec.batch_size, heads, spec.length, spec.head_dim, generator=generator).bfloat16().double()
        for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads, spec.num_heads)
    )
    segment_ids = kv_segment_ids = None
    if spec.segments != "none":
        # Documents of unequal lengths, other ones in each sequence of the batch.
        starts = torch.rand(spec.batch_size, spec.length, generator=generator) < 3 / spec.length
        segment_ids = starts.cumsum(dim=1) - 1
    if spec.segments == "own":
        first = segment_ids[:, :1]
        kv_segment_ids = torch.where(segment_ids == first, -7, segment_ids)
        kv_segment_ids[:, spec.length // 2 :] = first
    return Inputs(q, k, v, grad_out, segment_ids, kv_segment_ids)


def results(function, spec: AttentionSpec, inputs: Inputs, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Output and gradients of `function`, which takes the arguments of `splash_attention`."""
    leaves = [x.to(dtype).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = function(*leaves, inputs.segment_ids, inputs.kv_segment_ids, **spec.attributes)
    grads = torch.autograd.grad(out, leaves, inputs.grad_out.to(dtype))
    return dict(zip(("out", "grad_q", "grad_k", "grad_v"), (out.detach(), *grads), strict=True))


def oracle(spec: AttentionSpec, inputs: Inputs, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    return results(lambda *args, **kwargs: attention_reference(*args, **kwargs)[0], spec, inputs, dtype)


def largest_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the largest magnitude."""
    assert torch.isfinite(got).all()
    return ((got.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def check_float32(spec: AttentionSpec, **options) -> None:
    inputs = make_inputs(spec)
    expected = oracle(spec, inputs)
    got = results(lambda *args, **kwargs: splash_attention(*args, **kwargs, **options), spec, inputs, torch.float32)
    for name in expected:
        assert largest_error(got[name], expected[name]) < 1e-5, name


@hypothesis.settings(deadline=None, max_examples=5, derandomize=True, database=None)
@hypothesis.given(
    spec=strategies.builds(
        lambda group, **fields: AttentionSpec(num_heads=group * fields["num_kv_heads"], **fields),
        group=strategies.sampled_from((1, 3)),
        num_kv_heads=strategies.integers(1, 2),
        length=strategies.sampled_from((1, 7, 256, 300, 513)),
        head_dim=strategies.sampled_from((8, 40)),
        batch_size=strategies.integers(1, 2),
        causal=strategies.booleans(),
        window=strategies.sampled_from((0, 1, 45, 290, 1000)),
        soft_cap=strategies.sampled_from((0.0, 3.0)),
        segments=strategies.sampled_from(("none", "packed", "own")),
    )
)
def test_xla_equals_the_reference(spec):
    check_float32(spec, implementation="xla")


# The second has everything at once.
@pytest.mark.parametrize(
    "spec",
    [pytest.param(spec, id=spec.name, marks=[] if spec is SMALL[1] else pytest.mark.exhaustive) for spec in SMALL],
)
@pytest.mark.parametrize("implementation", ("jax", "tokamax"))
def test_kernels_equal_the_reference(implementation, spec):
    check_float32(spec, implementation=implementation, tiles=SMALL_TILES)


@pytest.mark.parametrize(("implementation", "tiles"), (("jax", FUSED), ("tokamax", THREE_STEPS)))
def test_other_backward_kernels_equal_the_reference(implementation, tiles):
    # Three blocks, for three steps of dq.
    spec = dataclasses.replace(SMALL[1], length=300, batch_size=1, num_heads=2, num_kv_heads=1, segments="packed")
    check_float32(spec, implementation=implementation, tiles=tiles)


@pytest.mark.parametrize("implementation", ("xla", "jax", "tokamax"))
def test_bfloat16_errs_at_most_twice_as_much_as_the_reference(implementation):
    spec = AttentionSpec(4, 2, 256, 128, soft_cap=5.0)
    inputs = make_inputs(spec)
    exact, coarse = oracle(spec, inputs), oracle(spec, inputs, torch.bfloat16)
    got = results(
        lambda *args, **kwargs: splash_attention(*args, **kwargs, tiles=SMALL_TILES, implementation=implementation),
        spec,
        inputs,
        torch.bfloat16,
    )
    for name in exact:
        assert got[name].dtype == torch.bfloat16
        assert largest_error(got[name], exact[name]) <= 2 * largest_error(coarse[name], exact[name]), name


@pytest.mark.parametrize("implementation", ("xla", "jax", "tokamax"))
def test_a_query_that_sees_no_key_yields_zero_and_no_gradient(implementation):
    spec = AttentionSpec(2, 1, 130, 16, segments="own")
    inputs = make_inputs(spec)
    inputs.segment_ids = torch.ones(1, 130, dtype=torch.int64)
    inputs.kv_segment_ids = torch.full((1, 130), 2)
    inputs.kv_segment_ids[:, 100:] = 1
    options = {"tiles": SMALL_TILES, "implementation": implementation}
    got = results(lambda *args, **kwargs: splash_attention(*args, **kwargs, **options), spec, inputs, torch.float32)
    expected = oracle(spec, inputs)
    assert not expected["out"][:, :, :100].any() and expected["out"][:, :, 100:].any()
    assert not got["out"][:, :, :100].any() and not got["grad_q"][:, :, :100].any()
    assert not got["grad_k"][:, :, :100].any() and not got["grad_v"][:, :, :100].any()
    for name in expected:
        assert largest_error(got[name], expected[name]) < 1e-5, name


@pytest.mark.parametrize("implementation", ("xla", "jax", "tokamax"))
def test_logsumexp(implementation):
    spec = SMALL[1]
    inputs = make_inputs(spec)
    arguments = inputs.q, inputs.k, inputs.v, inputs.segment_ids, inputs.kv_segment_ids
    _, expected = attention_reference(*arguments, **spec.attributes)
    arguments = [x.float() for x in arguments[:3]] + list(arguments[3:])
    got = splash_attention_op(
        *arguments, **spec.attributes, **dataclasses.asdict(SMALL_TILES), implementation=implementation
    ).logsumexp
    assert torch.isneginf(expected).any()
    torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-5)


def zigzag_starts(rank: int, num_ranks: int, chunk: int) -> torch.Tensor:
    return torch.tensor([rank * chunk, (2 * num_ranks - 1 - rank) * chunk], dtype=torch.int32)


CAUSAL = AttentionSpec(2, 1, 520, 16, segments="packed")
WINDOW = AttentionSpec(2, 1, 520, 16, window=90, soft_cap=3.0, segments="packed")


@pytest.mark.parametrize(
    ("implementation", "spec", "tiles"),
    (
        # More than one block of queries in a chunk.
        ("xla", dataclasses.replace(CAUSAL, length=1200, num_heads=4, num_kv_heads=2, batch_size=2), SMALL_TILES),
        ("xla", WINDOW, SMALL_TILES),
        ("xla", AttentionSpec(2, 1, 300, 16, causal=False), SMALL_TILES),
        ("jax", WINDOW, SMALL_TILES),
        pytest.param("jax", CAUSAL, SMALL_TILES, marks=pytest.mark.exhaustive),
        pytest.param("jax", AttentionSpec(2, 1, 300, 16, causal=False), SMALL_TILES, marks=pytest.mark.exhaustive),
        pytest.param("jax", dataclasses.replace(WINDOW, length=264), FUSED, marks=pytest.mark.exhaustive),
    ),
)
def test_queries_of_all_ranks_together_equal_all_queries(implementation, spec, tiles):
    """The queries in two chunks a rank: their rows of the whole, and gradients of keys and values that add up to it."""
    num_ranks = 2
    options = {"implementation": implementation, "tiles": tiles}
    inputs = make_inputs(spec)
    expected = oracle(spec, inputs)
    chunk = spec.length // (2 * num_ranks)
    got = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    for rank in range(num_ranks):
        starts = zigzag_starts(rank, num_ranks, chunk)
        rows = (starts[:, None] + torch.arange(chunk)).flatten()
        own = dataclasses.replace(inputs, q=inputs.q[:, :, rows], grad_out=inputs.grad_out[:, :, rows])
        if inputs.segment_ids is not None:
            own.segment_ids, own.kv_segment_ids = inputs.segment_ids[:, rows], inputs.segment_ids
        found = results(
            lambda *args, starts=starts, **kwargs: splash_attention(*args, starts, **kwargs, **options),
            spec,
            own,
            torch.float32,
        )
        for name in ("out", "grad_q"):
            got[name][:, :, rows] = found[name].double()
        for name in ("grad_k", "grad_v"):
            got[name] += found[name]
    for name in expected:
        assert largest_error(got[name], expected[name]) < 1e-5, name


def test_reference_of_chunks_is_rows_of_the_whole():
    spec = AttentionSpec(2, 1, 40, 8, window=9)
    inputs = make_inputs(spec)
    starts = zigzag_starts(1, 2, 10)
    rows = (starts[:, None] + torch.arange(10)).flatten()
    whole = attention_reference(inputs.q, inputs.k, inputs.v, **spec.attributes)
    got = attention_reference(inputs.q[:, :, rows], inputs.k, inputs.v, query_starts_C=starts, **spec.attributes)
    for part, expected in zip(got, whole, strict=True):
        torch.testing.assert_close(part, expected[:, :, rows], rtol=1e-12, atol=1e-12)


def test_memory_of_xla_grows_with_the_length_not_its_square():
    def temp_bytes(length: int) -> int:
        q = jax.ShapeDtypeStruct((1, 4, length, 16), "float32")
        function = jax.jit(lambda q: attention(q, q, q, None, None, causal=True, window=0, soft_cap=0.0, scale=1.0))
        return function.lower(q).compile().memory_analysis().temp_size_in_bytes

    assert 0 < temp_bytes(4096) < 3 * temp_bytes(2048) < 0.2 * 4 * 4 * 4096**2


@pytest.mark.parametrize(
    "mask", (PositionMask(True, 0), PositionMask(True, 5), PositionMask(False, 0), PositionMask(False, 4))
)
def test_counts_of_a_mask_are_those_of_its_array(mask):
    index = torch.arange(11)
    visible = mask.visible(index[:, None], index)
    visible = torch.ones(11, 11, dtype=torch.bool) if visible is None else visible
    assert mask.num_visible(11) == visible.sum()
    assert mask.within(11) == mask and mask.within(4).window == 0
    for begin, end in ((0, 3), (4, 8), (9, 11)):
        seen = visible[begin:end].any(dim=0).nonzero().flatten()
        assert mask.key_range(begin, end, 11) == (seen[0], seen[-1] + 1)


def test_declared_flops():
    case = kernel_case(AttentionSpec(4, 2, 64, 128), "v6e")
    assert case.flops == 3 * 4 * 4 * 128 * (64 * 65 // 2)


def tensor(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


Q, K, IDS = tensor(1, 4, 8, 16), tensor(1, 2, 8, 16), tensor(1, 8, dtype=torch.int32)
STARTS = tensor(3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("error", "message", "arguments", "options"),
    (
        (ValueError, "must be \\[batch, heads, tokens, head dim\\]", (Q[0], K, K), {}),
        (
            ValueError,
            "q \\[1, 4, 0, 16\\] or k \\[1, 2, 0, 16\\] is empty",
            (Q[:, :, :0], K[:, :, :0], K[:, :, :0]),
            {},
        ),
        (ValueError, "k and v must have the batch, tokens and head dim of q", (Q, K, K[..., :8]), {}),
        (ValueError, "must be a multiple of the 3", (Q, tensor(1, 3, 8, 16), tensor(1, 3, 8, 16)), {}),
        (NotImplementedError, "all float32 or all bfloat16", (Q, K.bfloat16(), K), {}),
        (ValueError, "kv_segment_ids needs segment_ids", (Q, K, K, None, IDS), {}),
        (ValueError, "segment_ids must be \\[batch, tokens\\]", (Q, K, K, IDS[:, :4]), {}),
        (NotImplementedError, "segment_ids must be int32 or int64", (Q, K, K, IDS.float()), {}),
        (ValueError, "window=-1", (Q, K, K), {"window": -1}),
        (
            ValueError,
            "query_starts must be \\[chunks\\], which divide the 8 queries: it is \\[3\\]",
            (Q, K, K, None, None, STARTS),
            {},
        ),
        (ValueError, "need kv_segment_ids", (Q, K, K, IDS, None, STARTS[:2]), {}),
        (NotImplementedError, "tokamax's kernel", (Q, K, K, None, None, STARTS[:2]), {"implementation": "tokamax"}),
        (ValueError, "soft_cap=-1", (Q, K, K), {"soft_cap": -1.0}),
        (ValueError, "choose among auto, xla, jax, tokamax", (Q, K, K), {"implementation": "mosaic"}),
    ),
)
def test_wrong_arguments_are_refused(error, message, arguments, options):
    with pytest.raises(error, match=message):
        splash_attention(*arguments, scale=0.25, **options)


def test_tiles_reach_the_kernel():
    with pytest.raises(ValueError, match="sa_block_kv=1000 must be a multiple of 128: take 896 or 1024"):
        splash_attention(Q, K, K, scale=0.25, tiles=SplashTiles(sa_block_kv=1000))
