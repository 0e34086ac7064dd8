"""Which layers become one loop, and what the weights of a loop are called layer by layer."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from titan.models.llama3.config import Llama3Config
from titan.train.swaps.scan_layers import ScannedLayersConfig, repeats, stacked_parameters, with_scanned_layers


@pytest.mark.parametrize(
    ("forms", "expected"),
    [
        ("WWWG" * 13, [(52, 4)]),
        ("WWWG" * 13 + "WW", [(52, 4), (2, 1)]),
        ("D" * 3 + "M" * 58, [(3, 1), (58, 1)]),
        ("W" * 126, [(126, 1)]),
        ("ABCD", [(1, 1)] * 4),
        ("ABABA", [(4, 2), (1, 1)]),
        ("ABAABA", [(6, 3)]),
        ("AABBAABB", [(8, 4)]),
        ("XABAB", [(1, 1), (4, 2)]),
        ("A", [(1, 1)]),
        ("", []),
    ],
)
def test_repeats(forms: str, expected: list[tuple[int, int]]) -> None:
    assert [(len(run), period) for run, period in repeats(forms)] == expected


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(alphabet="AB", max_size=12))
def test_runs_cover_everything_in_order_and_repeat(forms: str) -> None:
    runs = list(repeats(forms))
    assert [index for run, _ in runs for index in run] == list(range(len(forms)))
    for run, period in runs:
        part = forms[run.start : run.stop]
        assert part == part[:period] * (len(run) // period)
        assert period == 1 or len(run) >= 2 * period
        # No run that begins there is longer.
        rest = forms[run.start :]
        for other in range(1, len(rest) // 2 + 1):
            times = next(n for n in range(len(rest) // other, 0, -1) if rest.startswith(rest[:other] * n))
            assert times == 1 or times * other <= len(run)


_CONFIG = Llama3Config(vocab_size=32, dim=16, num_heads=2, num_kv_heads=1, ffn_dim=24, num_layers=7)


def test_layers_that_differ_in_initial_values_alone_are_one_loop() -> None:
    tree = _CONFIG.components()
    assert len(set(tree.layers)) == 7
    scanned = with_scanned_layers(tree)
    assert scanned.layers == (ScannedLayersConfig(0, 7, tree.layers[:1]),)
    assert dataclasses.replace(scanned, layers=tree.layers) == tree
    with torch.device("meta"):
        model = scanned.build()
    stacks = stacked_parameters(model)
    expected = {name for name, _ in tree.build().named_parameters()}
    plain = {name for name, _ in model.named_parameters()} - stacks.keys()
    assert {part for parts in stacks.values() for part in parts} | plain == expected
    assert stacks["layers.0.*.attention.wq.weight"] == tuple(f"layers.{i}.attention.wq.weight" for i in range(7))


def test_a_pattern_is_a_turn_and_what_does_not_repeat_a_loop_of_one() -> None:
    wide, narrow = _CONFIG.components(), dataclasses.replace(_CONFIG, ffn_dim=8).components()
    layers = tuple((narrow if index in (1, 3, 6) else wide).layers[index] for index in range(7))  # W N W N W W N
    scanned = with_scanned_layers(dataclasses.replace(wide, layers=layers))
    loops = [(loop.first, loop.num_turns, len(loop.blocks)) for loop in scanned.layers]
    assert loops == [(0, 2, 2), (4, 2, 1), (6, 1, 1)]
    with torch.device("meta"):
        stacks = stacked_parameters(scanned.build())
    w1 = {name: parts for name, parts in stacks.items() if name.endswith("w1.weight")}
    assert {tuple(int(part.split(".")[1]) for part in parts) for parts in w1.values()} == {(0, 2), (1, 3), (4, 5), (6,)}
    names = [name.split(".")[2] for name in w1]
    assert names == ["0+2i", "1+2i", "4+1i", "6+1i"]


def test_a_loop_runs_its_layers_one_after_the_other() -> None:
    """Outside of a capture, against the layers themselves."""
    tree = dataclasses.replace(_CONFIG, num_layers=3).components()
    generator = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(p.shape, generator=generator) * 0.3 for n, p in tree.build().named_parameters()}
    tokens = torch.randint(0, 32, (2, 8), generator=generator)
    arguments = (tokens, torch.arange(8).repeat(2, 1), torch.ones(2, 8, dtype=torch.int32))
    model = with_scanned_layers(tree).build()
    stacks = stacked_parameters(model)
    stacked = {
        name: torch.stack([weights[part] for part in stacks[name]]) if name in stacks else weights[name]
        for name, _ in model.named_parameters()
    }
    expected = torch.func.functional_call(tree.build(), weights, arguments)
    assert expected.std() > 0.1
    assert torch.equal(torch.func.functional_call(model, stacked, arguments), expected)
