"""The kernels' plain-XLA implementations on CPU against PyTorch's own ops, called alike, as torch ops with autograd.

    ./bazelw run //tools/bench:kernels_cpu -- [--rounds=5] [--cases=attention,...]

attention: `splash_attention`, causal, 4096 tokens, against `scaled_dot_product_attention`.
cross_entropy: `fused_linear_cross_entropy`, 8192 tokens, dim 1024, 32768 words, against `linear` and `cross_entropy`.
grouped_matmul, paired_grouped_matmul: against a loop over the experts with one matmul each (two for the pair).
route_scores: `apply_route_scores` against the multiplication of float32 copies.

Contenders are processes that take turns, in shuffled order, with the same inputs. Numbers are the median over rounds
of ours / PyTorch's in the same round: `time` of forward and backward together, `forward_time` without gradients, and
`peak`, the most memory that a forward and backward took above what the process held (inputs and gradients buffers of
the round before are part of that).
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from typing import Any

from tools.bench.worker import Turn, Worker, set_environment

_WARMUP_ROUNDS = 1


class _Case:
    """Forward, and forward with backward, of one function of tensors that were made beforehand."""

    def __init__(self, make: Callable[[bool], tuple[Callable[[], Any], tuple[Any, ...]]], ours: bool):
        import torch

        torch.manual_seed(0)
        self._call, self._leaves = make(ours)

    def step(self, with_gradients: bool) -> float:
        """One turn; returns the sum of the results, by which contenders are held against each other."""
        import torch

        if not with_gradients:
            with torch.no_grad():
                return self._call().item()
        out = self._call()
        gradients = torch.autograd.grad(out, self._leaves)
        return out.item() + sum(gradient.float().abs().sum().item() for gradient in gradients)


def _attention(ours: bool):
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from titan.kernels.splash_attention.api import splash_attention

    q, k, v = (torch.randn(1, heads, 4096, 128, requires_grad=True) for heads in (8, 2, 2))
    if ours:
        return (lambda: splash_attention(q, k, v, causal=True, scale=128**-0.5).square().mean()), (q, k, v)
    return (lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).square().mean()), (q, k, v)


def _cross_entropy(ours: bool):
    import torch
    import torch.nn.functional as F  # noqa: N812

    from titan.kernels.fused_linear_cross_entropy.api import fused_linear_cross_entropy

    hidden = torch.randn(8192, 1024, requires_grad=True)
    weight = (torch.randn(32768, 1024) * 1024**-0.5).requires_grad_()
    labels = torch.randint(0, 32768, (8192,))
    if ours:
        return (lambda: fused_linear_cross_entropy(hidden, weight, labels) / 8192), (hidden, weight)
    return (lambda: F.cross_entropy(F.linear(hidden, weight), labels)), (hidden, weight)


def _experts():
    import torch

    rows, dim, ffn_dim, num_experts = 8192, 512, 512, 32
    lhs = torch.randn(rows, dim, requires_grad=True)
    gate, up = ((torch.randn(num_experts, dim, ffn_dim) * dim**-0.5).requires_grad_() for _ in range(2))
    sizes = torch.multinomial(torch.rand(num_experts), rows, replacement=True).bincount(minlength=num_experts)
    return lhs, gate, up, sizes


def _loop(lhs, weight, sizes):
    import torch

    return torch.cat([rows @ expert for rows, expert in zip(lhs.split(sizes.tolist()), weight.unbind(), strict=True)])


def _grouped_matmul(ours: bool):
    from titan.kernels.grouped_matmul.api import grouped_matmul

    lhs, gate, _, sizes = _experts()
    product = grouped_matmul if ours else _loop
    return (lambda: product(lhs, gate, sizes).square().mean()), (lhs, gate)


def _paired_grouped_matmul(ours: bool):
    from titan.kernels.grouped_matmul.api import paired_grouped_matmul

    lhs, gate, up, sizes = _experts()

    def call():
        pair = paired_grouped_matmul(lhs, gate, up, sizes) if ours else (_loop(lhs, gate, sizes), _loop(lhs, up, sizes))
        return (pair[0] * pair[1]).mean()

    return call, (lhs, gate, up)


def _route_scores(ours: bool):
    import torch

    from titan.kernels.route_scores.api import apply_route_scores

    rows = torch.randn(32768, 1024, dtype=torch.bfloat16, requires_grad=True)
    scores = torch.rand(32768, requires_grad=True)
    if ours:
        return (lambda: apply_route_scores(rows, scores).float().sum()), (rows, scores)
    return (lambda: (rows.float() * scores[:, None]).to(rows.dtype).float().sum()), (rows, scores)


CASES = {
    "attention": _attention,
    "cross_entropy": _cross_entropy,
    "grouped_matmul": _grouped_matmul,
    "paired_grouped_matmul": _paired_grouped_matmul,
    "route_scores": _route_scores,
}


def measure(name: str, rounds: int) -> dict[str, float]:
    """The ratios of one case.

    Raises:
      RuntimeError: the two disagree by more than 1e-3, and so did not compute the same.
    """
    workers = {ours: Worker(_Case, CASES[name], ours) for ours in (True, False)}
    order = random.Random(0)
    pairs: dict[bool, list[tuple[Turn, Turn]]] = {True: [], False: []}
    try:
        for index in range(rounds + _WARMUP_ROUNDS):
            for with_gradients in (False, True):
                turns = {ours: workers[ours].step(with_gradients) for ours in order.sample((True, False), 2)}
                ours, theirs = turns[True].result, turns[False].result
                if not abs(ours - theirs) <= 1e-3 * abs(theirs):
                    raise RuntimeError(f"{name}: ours gives {ours}, PyTorch {theirs}; they must be equal")
                if index >= _WARMUP_ROUNDS:
                    pairs[with_gradients].append((turns[True], turns[False]))
    finally:
        for worker in workers.values():
            worker.close()
    return {
        f"{name}_time": statistics.median(ours.seconds / theirs.seconds for ours, theirs in pairs[True]),
        f"{name}_forward_time": statistics.median(ours.seconds / theirs.seconds for ours, theirs in pairs[False]),
        f"{name}_peak": statistics.median(ours.peak_bytes / theirs.peak_bytes for ours, theirs in pairs[True]),
        f"{name}_peak_mib": statistics.median(ours.peak_bytes for ours, _ in pairs[True]) / 2**20,
        f"{name}_torch_peak_mib": statistics.median(theirs.peak_bytes for _, theirs in pairs[True]) / 2**20,
        f"{name}_seconds": statistics.median(ours.seconds for ours, _ in pairs[True]),
    }


def main() -> int:
    """Runs the program on the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="Timed rounds of each case, after one for warm-up.")
    parser.add_argument("--cases", default=",".join(CASES), help="Cases, separated by commas.")
    arguments = parser.parse_args()
    names = arguments.cases.split(",")
    if arguments.rounds < 1:
        parser.error(f"--rounds: {arguments.rounds} is no number of rounds; give at least 1")
    for name in names:
        if name not in CASES:
            parser.error(f"--cases: {name!r} is unknown; give some of {', '.join(CASES)}")
    set_environment()
    numbers: dict[str, float] = {}
    for name in names:
        ratios = measure(name, arguments.rounds)
        print("  ".join(f"{key} {value:.3f}" for key, value in ratios.items()), flush=True)
        numbers |= ratios
    print("RESULT " + json.dumps({key: round(value, 4) for key, value in numbers.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
