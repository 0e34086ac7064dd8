"""Fused linear cross-entropy against its float64 reference, in all implementations."""

import dataclasses
import functools

import jax
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan.kernels.fused_linear_cross_entropy.api import fused_linear_cross_entropy
from titan.kernels.fused_linear_cross_entropy.arg_specs import SMALL, by_token_tiles, by_vocabulary_tiles, unfused
from titan.kernels.fused_linear_cross_entropy.reference import reference_linear_cross_entropy
from titan.kernels.fused_linear_cross_entropy.tiles import LinearCrossEntropyTiles
from titan.kernels.fused_linear_cross_entropy.vocab_shard import VocabShard
from titan.kernels.fused_linear_cross_entropy.xla import logits_statistics

WAYS = [
    {"gradients": "forward"},
    {"gradients": "backward", "implementation": "xla"},
    {"gradients": "backward", "implementation": "mosaic"},
]
TILES = LinearCrossEntropyTiles(token_tile=128, vocab_tile=128, block_tokens=128, block_vocab=128)
GRAD_OUT = 0.37

all_ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way.values()))


@dataclasses.dataclass(frozen=True)
class Case:
    num_tokens: int
    embed_dim: int
    vocab: int
    dtype: torch.dtype = torch.float32
    ignored: float = 0.0
    weighted: bool = False
    scale: float = 1.0
    soft_cap: float = 0.0
    z_loss: float = 0.0

    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        random = torch.Generator().manual_seed(0)
        hidden = torch.randn(self.num_tokens, self.embed_dim, generator=random)
        weight = 2.0 * torch.randn(self.vocab, self.embed_dim, generator=random) / self.embed_dim**0.5
        labels = torch.randint(self.vocab, (self.num_tokens,), generator=random)
        labels[torch.rand(self.num_tokens, generator=random) < self.ignored] = -100
        weights = torch.rand(self.num_tokens, generator=random) if self.weighted else None
        return hidden.to(self.dtype), weight.to(self.dtype), labels, weights

    @property
    def options(self) -> dict[str, float]:
        return {"scale": self.scale, "soft_cap": self.soft_cap, "z_loss": self.z_loss}


cases = st.builds(
    Case,
    num_tokens=st.integers(1, 300),
    embed_dim=st.integers(1, 70),
    vocab=st.integers(1, 400),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    ignored=st.sampled_from([0.0, 0.3]),
    weighted=st.booleans(),
    scale=st.sampled_from([1.0, 0.3, -2.0]),
    soft_cap=st.sampled_from([0.0, 1.5]),
    z_loss=st.sampled_from([0.0, 1e-2]),
)


def run(function, hidden: Tensor, weight: Tensor, *args: Tensor | None, **options) -> list[Tensor]:
    """Loss and gradients in float64, of a loss that is scaled before its backward."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = function(hidden, weight, *args, **options)
    (loss * GRAD_OUT).backward()
    assert hidden.grad.dtype == hidden.dtype and weight.grad.dtype == weight.dtype
    return [tensor.detach().double() for tensor in (loss, hidden.grad, weight.grad)]


def check(case: Case, way: dict[str, str]) -> None:
    hidden, weight, labels, weights = case.arrays()
    got = run(fused_linear_cross_entropy, hidden, weight, labels, weights, tiles=TILES, **case.options, **way)
    right = run(reference_linear_cross_entropy, hidden.double(), weight.double(), labels, weights, **case.options)
    plain = run(reference_linear_cross_entropy, hidden, weight, labels, weights, **case.options)
    for name, value, expected, unfused_value in zip(("loss", "hidden", "weight"), got, right, plain, strict=True):
        assert torch.isfinite(value).all()
        bound = 1e-5 * expected.abs().max()
        if case.dtype is torch.bfloat16 and name != "loss":
            # The floor is one rounding: the reference's own error is 0 where every gradient happens to be.
            bound = max(2 * (unfused_value - expected).abs().max(), 2**-8 * expected.abs().max())
        assert (value - expected).abs().max() <= bound, name


@all_ways
@given(case=cases)
@settings(deadline=None, max_examples=4, derandomize=True, phases=[Phase.generate])  # each try compiles: no shrinking
def test_loss_and_gradients_equal_the_reference(way: dict[str, str], case: Case) -> None:
    check(case, way)


@all_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_tiles_with_everything_at_once(way: dict[str, str], dtype: torch.dtype) -> None:
    check(Case(301, 256, 528, dtype, 0.2, True, 0.5, 4.0, 1e-3), way)


@all_ways
def test_tokens_that_are_all_ignored_give_zero(way: dict[str, str]) -> None:
    hidden, weight, labels, _ = Case(130, 16, 200, ignored=1.0).arrays()
    for value in run(fused_linear_cross_entropy, hidden, weight, labels, z_loss=1e-2, tiles=TILES, **way):
        assert (value == 0.0).all()


@all_ways
def test_an_ignored_label_may_be_an_entry_of_the_vocabulary(way: dict[str, str]) -> None:
    hidden, weight, labels, _ = Case(20, 16, 3).arrays()
    got = run(fused_linear_cross_entropy, hidden, weight, labels, ignore_index=1, **way)
    right = run(reference_linear_cross_entropy, hidden.double(), weight.double(), labels, ignore_index=1)
    for value, expected in zip(got, right, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


@all_ways
@pytest.mark.parametrize("label", [-1, 200, 201, 255])
def test_a_label_out_of_range_makes_everything_nan(way: dict[str, str], label: int) -> None:
    hidden, weight, labels, _ = Case(10, 16, 200).arrays()
    labels[3] = label
    loss, hidden_gradient, weight_gradient = run(fused_linear_cross_entropy, hidden, weight, labels, **way)
    assert loss.isnan()
    assert hidden_gradient.isnan().any(1).tolist() == [token == 3 for token in range(10)]
    assert weight_gradient.isnan().all()


def test_leading_dims_are_flattened() -> None:
    hidden, weight, labels, weights = Case(24, 16, 50, weighted=True).arrays()
    flat = run(fused_linear_cross_entropy, hidden, weight, labels, weights)
    deep = run(
        fused_linear_cross_entropy, hidden.view(2, 3, 4, 16), weight, labels.view(2, 3, 4).int(), weights.view(2, 3, 4)
    )
    assert flat[0] == deep[0] and torch.equal(flat[1].view(2, 3, 4, 16), deep[1]) and torch.equal(flat[2], deep[2])


class _TitanOps(TorchDispatchMode):
    """Records names and implementations of the kernels that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.implementations: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "titan":
            self.names.append(func._schema.name)
            self.implementations.append((kwargs or {}).get("implementation", "auto"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("gradients", ["forward", "backward"])
def test_without_gradients_only_the_statistics_are_computed(gradients: str) -> None:
    hidden, weight, labels, _ = Case(20, 16, 50).arrays()
    right = reference_linear_cross_entropy(hidden, weight, labels)
    with _TitanOps() as constants:
        loss = fused_linear_cross_entropy(hidden, weight, labels, gradients=gradients)
    with _TitanOps() as evaluation, torch.no_grad():
        fused_linear_cross_entropy(hidden.clone().requires_grad_(), weight, labels, gradients=gradients)
    assert constants.names == evaluation.names == ["titan::linear_cross_entropy_statistics"]
    torch.testing.assert_close(loss, right, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(("embed_dim", "implementation"), [(96, "xla"), (128, "auto")])
def test_the_automatic_choice_heeds_the_embedding_dim(embed_dim: int, implementation: str) -> None:
    hidden, weight, labels, _ = Case(4, embed_dim, 9).arrays()
    with _TitanOps() as ops:
        fused_linear_cross_entropy(hidden, weight, labels)
    assert ops.implementations == [implementation]


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_statistics_of_vocabulary_shards_combine(implementation: str) -> None:
    hidden, weight, labels, _ = Case(40, 16, 200).arrays()
    options = {"scale": 1.0, "soft_cap": 2.0, "implementation": implementation}
    weight.requires_grad_()
    whole = logits_statistics(hidden, weight, labels, **options)
    shards = [logits_statistics(hidden, weight[i : i + 70], labels - i, **options) for i in range(0, 200, 70)]
    logsumexp = torch.stack([shard.logsumexp_M for shard in shards]).logsumexp(0)
    label_logit = torch.stack([shard.label_logit_M for shard in shards]).sum(0)
    torch.testing.assert_close(logsumexp, whole.logsumexp_M)
    torch.testing.assert_close(label_logit, whole.label_logit_M)
    (right,) = torch.autograd.grad((whole.logsumexp_M - whole.label_logit_M).sum(), weight)
    (got,) = torch.autograd.grad((logsumexp - label_logit).sum(), weight)
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-6)


class _OtherShards:
    """Puts a shard's statistics together with those of the others, constants here, as an all-reduce would."""

    def __init__(self, others: list[tuple[Tensor, Tensor]]):
        self.others = others

    def __call__(self, logsumexp_M: Tensor, label_logit_M: Tensor) -> tuple[Tensor, Tensor]:
        logsumexps = [logsumexp_M, *(logsumexp for logsumexp, _ in self.others)]
        return torch.stack(logsumexps).logsumexp(0), label_logit_M + sum(logit for _, logit in self.others)


def _float64_statistics(case: Case, start: int, end: int) -> tuple[Tensor, Tensor]:
    hidden, weight, labels, _ = case.arrays()
    logits_MV = case.scale * hidden.double() @ weight.double()[start:end].T
    logits_MV = case.soft_cap * torch.tanh(logits_MV / case.soft_cap) if case.soft_cap else logits_MV
    hit_MV = (labels - start).unsqueeze(1) == torch.arange(end - start)
    return logits_MV.logsumexp(1), torch.where(hit_MV, logits_MV, 0.0).sum(1)


@pytest.mark.parametrize("way", [*WAYS[1:], None], ids=["xla", "mosaic", "reference"])
def test_shards_of_the_vocabulary_give_the_whole_loss_and_their_part_of_the_gradients(way: dict[str, str] | None):
    case = Case(70, 48, 400, ignored=0.2, weighted=True, scale=0.5, soft_cap=4.0, z_loss=1e-2)
    hidden, weight, labels, weights = case.arrays()
    right = run(reference_linear_cross_entropy, hidden.double(), weight.double(), labels, weights, **case.options)
    bounds = [(0, 150), (150, 151), (151, 400)]
    statistics = [_float64_statistics(case, *bound) for bound in bounds]
    parts = []
    for index, (start, end) in enumerate(bounds):
        others = [pair for other, pair in enumerate(statistics) if other != index]
        if way is None:
            shard = VocabShard(start, case.vocab, _OtherShards(others))
            function, arguments = reference_linear_cross_entropy, (hidden.double(), weight[start:end].double())
        else:
            others = [tuple(tensor.float() for tensor in pair) for pair in others]
            shard = VocabShard(torch.tensor(start), case.vocab, _OtherShards(others))
            function = functools.partial(fused_linear_cross_entropy, tiles=TILES, **way)
            arguments = (hidden, weight[start:end])
        parts.append(run(function, *arguments, labels, weights, shard=shard, **case.options))
    # float32 sums of at most 400 terms in another order.
    for loss, _, _ in parts:
        torch.testing.assert_close(loss, right[0], rtol=1e-5, atol=0.0)
    for name, value, expected in (
        ("hidden", sum(hidden for _, hidden, _ in parts), right[1]),
        ("weight", torch.cat([weight for _, _, weight in parts]), right[2]),
    ):
        assert (value - expected).abs().max() <= 1e-5 * expected.abs().max(), name


@pytest.mark.parametrize("fused", [by_vocabulary_tiles, by_token_tiles])
def test_no_buffer_is_as_large_as_the_logits(fused) -> None:
    def temp_bytes(function, **tiles: int) -> int:
        compiled = jax.jit(functools.partial(function, SMALL, **tiles)).lower(*SMALL.args("float32")).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    tile = {"vocab_tile": 256} if fused is by_vocabulary_tiles else {"token_tile": 128}
    assert temp_bytes(unfused) >= SMALL.logits_bytes
    assert temp_bytes(fused, **tile) < SMALL.logits_bytes / 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden_ME": torch.zeros(4)}, ValueError, r"hidden is \[4\] and weight \[9, 8\]: they must be \[\.\.\., E\]"),
        ({"hidden_ME": torch.zeros(4, 7)}, ValueError, r"hidden is \[4, 7\] and weight \[9, 8\]"),
        ({"hidden_ME": torch.zeros(0, 8), "labels_M": torch.zeros(0).long()}, ValueError, "is empty"),
        (
            {"labels_M": torch.zeros(5).long()},
            ValueError,
            r"labels is \[5\]: it must have hidden's leading dims, \[4\]",
        ),
        ({"token_weights_M": torch.zeros(4, 1)}, ValueError, r"token_weights is \[4, 1\]"),
        ({"labels_M": torch.zeros(4)}, ValueError, "labels is torch.float32: convert it to torch.int64"),
        ({"weight_VE": torch.zeros(9, 8).bfloat16()}, ValueError, "convert one to the other's dtype"),
        ({"scale": 0.0}, ValueError, "scale is 0.0"),
        ({"soft_cap": -1.0}, ValueError, "soft_cap is -1.0: it must be at least 0"),
        ({"z_loss": float("nan")}, ValueError, "z_loss is nan"),
        ({"gradients": "later"}, ValueError, "'later' is not a valid Gradients"),
        ({"implementation": "cuda"}, ValueError, "no implementation 'cuda': choose among auto, xla, mosaic"),
        ({"gradients": "forward", "implementation": "mosaic"}, NotImplementedError, "has no implementation 'mosaic'"),
        (
            {"gradients": "forward", "shard": VocabShard(0, 18, lambda *statistics: statistics)},
            NotImplementedError,
            "needs the whole vocabulary",
        ),
    ],
)
def test_wrong_arguments_are_refused(change, error, message) -> None:
    arguments = {"hidden_ME": torch.zeros(4, 8), "weight_VE": torch.zeros(9, 8), "labels_M": torch.zeros(4).long()}
    with pytest.raises(error, match=message):
        fused_linear_cross_entropy(**{**arguments, **change})


def test_float64_is_refused() -> None:
    hidden, weight, labels, _ = Case(4, 8, 9, torch.float64).arrays()
    with pytest.raises(NotImplementedError, match="float64: convert them to float32 or bfloat16"):
        fused_linear_cross_entropy(hidden, weight, labels)
