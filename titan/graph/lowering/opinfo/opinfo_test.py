"""Every lowered ATen overload against PyTorch, on calls that OpInfo's samples lead to and the handwritten ones.

The exhaustive part takes all samples of OpInfo.
"""

import collections
import inspect

import jax
import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

from titan.graph.lowering.opinfo.handwritten_samples import handwritten_calls
from titan.graph.lowering.opinfo.lowering_check import exclusion, failures
from titan.graph.lowering.opinfo.opinfo_samples import RecordedCall, record, spread
from titan.graph.lowering.ops import TABLE

_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)

# collectives_test.py holds these, which need a mesh, and control_flow_test.py those, which take a graph or a device
# with memory of its own. Both hold that they leave none out.
_HELD_ELSEWHERE = ("_c10d_functional.", "titan.", "higher_order.", "ao.")
_NAMES = sorted(name for name in TABLE if not name.startswith(_HELD_ELSEWHERE))


# jiterator compiles CUDA source and to_sparse makes tensors outside the dialect. The families after them are outside it
# too, but for vector_norm: what they decompose into are thousands of further views and products.
_FAMILIES_LEFT_OUT = ("jiterator", "to_sparse", "fft.", "linalg.", "masked.", "signal.", "sparse.", "special.")


def _is_sampled(info: OpInfo) -> bool:
    return not info.name.startswith(_FAMILIES_LEFT_OUT) or info.name == "linalg.vector_norm"


# Of each public function and dtype, and of each overload's distinct calls: OpInfo has up to some thousand samples of a
# function (of max_pool2d, with every combination of its arguments) whose views and products repeat one another.
_MOST_SAMPLES, _MOST_CALLS = 10, 32


def _calls_by_name(most_samples: int | None, most_calls: int | None) -> dict[str, list[RecordedCall]]:
    """The distinct calls of each overload that can be compared; the handwritten ones are never left out."""
    distinct: dict[str, RecordedCall] = {}
    for info in filter(_is_sampled, op_db):
        for dtype in _DTYPES:
            if dtype in info.dtypes:
                for call in record(info, dtype, _NAMES, most=most_samples):
                    distinct.setdefault(call.signature, call)
    sampled = collections.defaultdict(list)
    for call in distinct.values():
        if exclusion(call) is None:
            sampled[call.name].append(call)
    calls = collections.defaultdict(list, {name: spread(found, most_calls) for name, found in sampled.items()})
    for call in handwritten_calls():
        if exclusion(call) is None:
            calls[call.name].append(call)
    return calls


@pytest.fixture(scope="module")
def calls_by_name() -> dict[str, list[RecordedCall]]:
    return _calls_by_name(_MOST_SAMPLES, _MOST_CALLS)


@pytest.fixture(scope="module")
def all_calls_by_name() -> dict[str, list[RecordedCall]]:
    return _calls_by_name(None, None)


@pytest.mark.parametrize("name", _NAMES)
def test_lowering_computes_what_torch_computes(name: str, calls_by_name: dict[str, list[RecordedCall]]) -> None:
    _assert_equal(name, calls_by_name[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", _NAMES)
def test_lowering_computes_all_samples(name: str, all_calls_by_name: dict[str, list[RecordedCall]]) -> None:
    _assert_equal(name, all_calls_by_name[name])


def _assert_equal(name: str, calls: list[RecordedCall]) -> None:
    assert calls, f"no sample reaches {name}: add one to handwritten_samples.py"
    with jax.numpy_dtype_promotion("strict"):
        found = failures(calls)
    assert not found, f"{len(found)} of {len(calls)} calls:\n" + "\n".join(found[:10])


@pytest.mark.parametrize("name", [*_NAMES, *(name for name in TABLE if name.startswith("ao."))])
def test_lowering_takes_the_arguments_of_the_schema(name: str) -> None:
    namespace, op, overload = name.split(".")
    schema = getattr(getattr(getattr(torch.ops, namespace), op), overload)._schema
    assert not schema.is_mutable, "only functional ops are in the dialect"
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    keywords = {argument.name: None for argument in schema.arguments if argument.kwarg_only}
    signature = inspect.signature(TABLE[name])
    signature.bind(None, *positional, **keywords)
    assert list(signature.parameters)[1 : 1 + len(positional)] == positional[: len(signature.parameters) - 1]
