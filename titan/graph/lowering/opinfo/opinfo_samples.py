"""Test data for the lowerings: every call of a lowered overload that PyTorch's own OpInfo samples lead to.

An OpInfo sample calls a public function such as `torch.nn.functional.layer_norm`; a dispatch mode below autograd sees
which ATen overloads that ends in, with the concrete arguments and results. For float32 the gradient is taken as well,
which records the backward overloads.
"""

import dataclasses
import unittest.mock
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.testing._internal import common_utils
from torch.testing._internal.opinfo import core
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from titan.graph.lowering.table import overload_name


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """One call of an ATen overload: its arguments as they were, and what torch returned."""

    name: str
    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def signature(self) -> str:
        """Overload, shapes, dtypes and plain values of the arguments: calls that agree in it are the same program."""
        described = tree_map_only(torch.Tensor, lambda t: f"{t.dtype}{list(t.shape)}", (self.args, self.kwargs))
        return f"{self.name}{described}"


class CallRecorder(TorchDispatchMode):
    """Records the calls of the named overloads made while it is active, below autograd and above the kernels."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self.calls: list[RecordedCall] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = overload_name(func)
        if name not in self._names:
            return func(*args, **kwargs)
        saved_args, saved_kwargs = tree_map_only(torch.Tensor, _snapshot, (args, kwargs))
        result = func(*args, **kwargs)
        if all(_is_plain(t) for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)):
            saved_result = tree_map_only(torch.Tensor, _snapshot, result)
            self.calls.append(RecordedCall(name, func, saved_args, saved_kwargs, saved_result))
        return result


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided and not tensor.is_complex() and not tensor.is_quantized and not tensor.is_nested
    )


def _snapshot(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone() if _is_plain(tensor) else tensor


def record(
    info: core.OpInfo, dtype: torch.dtype, names: Iterable[str], *, most: int | None = None
) -> Iterator[RecordedCall]:
    """The distinct calls of `names` that one OpInfo's samples of one dtype lead to; the gradient's too for float32.

    Args:
        info: of a public function.
        dtype: of its tensors.
        names: overloads whose calls are recorded.
        most: how many samples are run, spread evenly over those that there are; None for all.
    """
    requires_grad = dtype is torch.float32 and info.supports_autograd
    recorder = CallRecorder(names)
    # OpInfo seeds before each sample, and torch.manual_seed formats the stack for each of three devices that there are
    # not; and it looks through the stack for a test of PyTorch's own. Both together took most of the time.
    seed = unittest.mock.patch.object(torch, "manual_seed", torch.default_generator.manual_seed)
    no_search = unittest.mock.patch.object(common_utils, "extract_test_fn", lambda: None)
    with warnings.catch_warnings(), seed, no_search:
        warnings.simplefilter("ignore")  # deprecations inside PyTorch's own sample functions
        torch.manual_seed(0)
        for sample in spread([*info.sample_inputs("cpu", dtype, requires_grad=requires_grad)], most):
            with recorder:
                result = info.op(sample.input, *sample.args, **sample.kwargs)
                outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
                if outputs:
                    torch.autograd.backward(outputs, [torch.randn_like(t) for t in outputs])
    seen = set()
    for call in recorder.calls:
        if call.signature not in seen:
            seen.add(call.signature)
            yield call


def spread(items: list[Any], most: int | None) -> list[Any]:
    """At most so many of the items, evenly over the list and the first among them; None for all."""
    if most is None or len(items) <= most:
        return items
    return [items[index * len(items) // most] for index in range(most)]
