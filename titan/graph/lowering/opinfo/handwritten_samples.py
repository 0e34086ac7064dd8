"""Calls that no OpInfo sample reaches: overloads that only functionalisation or optimizers emit, and unusual values."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from titan.graph.lowering.opinfo.opinfo_samples import RecordedCall
from titan.graph.lowering.table import overload_name

_FLOATS = (torch.float32, torch.bfloat16)
_ATEN = torch.ops.aten


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal floats, integers of both signs, or bools."""
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    values = torch.randn(shape)
    return values.to(dtype) if dtype.is_floating_point else (values * 5).to(dtype)


def handwritten_calls() -> Iterator[RecordedCall]:
    """Every handwritten call with the result that torch gives."""
    torch.manual_seed(0)
    for target, args, kwargs in itertools.chain(_pointwise(), _foreach(), _shapes(), _layers(), _unusual_values()):
        yield RecordedCall(overload_name(target), target, args, kwargs, target(*args, **kwargs))


Sample = tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]


def _pointwise() -> Iterator[Sample]:
    for dtype in (*_FLOATS, torch.int64):
        x, y = _random(3, 4, dtype=dtype), _random(4, dtype=dtype)
        nonzero = torch.where(y == 0, torch.ones_like(y), y)
        for mode in (None, "floor", "trunc"):
            yield _ATEN.div.Scalar_mode, (x, 3), {"rounding_mode": mode}
            yield _ATEN.div.Tensor_mode, (x, nonzero), {"rounding_mode": mode}
        yield _ATEN.fmod.Scalar, (x, 3), {}
        yield _ATEN.remainder.Scalar_Tensor, (7, nonzero), {}
        yield _ATEN.fill.Tensor, (x, y[0]), {}
        yield _ATEN.zero.default, (x,), {}
        yield _ATEN.clamp_max.default, (x, 1), {}
        yield _ATEN.copysign.Scalar, (x, -1.5), {}
        yield _ATEN.xlogy.Scalar_Other, (x, 2.5), {}
        yield _ATEN.xlogy.Scalar_Self, (2, x.abs()), {}
    for dtype in (torch.int32, torch.int64):
        x, shift = _random(3, 4, dtype=dtype), _random(4, dtype=dtype).abs()
        for op in (_ATEN.bitwise_and, _ATEN.bitwise_or, _ATEN.bitwise_xor):
            yield op.Scalar, (x, 6), {}
        for op in (_ATEN.bitwise_left_shift, _ATEN.bitwise_right_shift):
            yield op.Tensor_Scalar, (x, 2), {}
        for op in (_ATEN.__lshift__, _ATEN.__rshift__):
            yield op.Tensor, (x, shift), {}
            yield op.Scalar, (x, 2), {}
    mask = _random(3, 4, dtype=torch.bool)
    for op in (_ATEN.bitwise_and, _ATEN.bitwise_or, _ATEN.bitwise_xor):
        yield op.Scalar, (mask, True), {}
    x = _random(3, 4)
    for order in (0, 1, 2, 3, torch.inf, -torch.inf):
        yield _ATEN.norm.Scalar, (x, order), {}
        yield _ATEN.norm.ScalarOpt_dtype, (x.bfloat16(), order), {"dtype": torch.float32}
        yield _ATEN.norm.ScalarOpt_dim_dtype, (x.bfloat16(), order, [1], True), {"dtype": torch.float32}
    yield _ATEN.complex.default, (_random(3, 4), _random(3, 4)), {}


def _foreach() -> Iterator[Sample]:
    shapes = ((3, 4), (5,), ())
    for dtype in _FLOATS:
        xs, ys, zs = ([_random(*shape, dtype=dtype) for shape in shapes] for _ in range(3))
        positive = [x.abs() + 0.5 for x in xs]
        scalars = [0.5, 2.0, -1.5]
        for name in ("abs", "exp", "log", "neg", "reciprocal", "rsqrt", "sigmoid", "sign", "sqrt"):
            yield getattr(_ATEN, f"_foreach_{name}").default, (positive,), {}
        for name in ("add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max"):
            op = getattr(_ATEN, f"_foreach_{name}")
            yield op.Scalar, (xs, 0.7), {}
            yield op.ScalarList, (xs, scalars), {}
            yield op.List, (xs, positive), {"alpha": 0.3} if name in ("add", "sub") else {}
        yield _ATEN._foreach_add.Tensor, (xs, ys[2]), {"alpha": 0.3}
        yield _ATEN._foreach_mul.Tensor, (xs, ys[2]), {}
        yield _ATEN._foreach_div.Tensor, (xs, ys[2]), {}
        yield _ATEN._foreach_pow.Scalar, (xs, 2), {}
        yield _ATEN._foreach_lerp.List, (xs, ys, [z.sigmoid() for z in zs]), {}
        yield _ATEN._foreach_lerp.Scalar, (xs, ys, 0.1), {}
        yield _ATEN._foreach_lerp.ScalarList, (xs, ys, [0.1, 0.6, 0.9]), {}
        for op in (_ATEN._foreach_addcmul, _ATEN._foreach_addcdiv):
            yield op.Scalar, (xs, ys, positive, -0.01), {}
            yield op.ScalarList, (xs, ys, positive, scalars), {}
        yield _ATEN._foreach_norm.Scalar, (xs, 2), {}
        yield _ATEN._foreach_norm.Scalar, (xs, 1), {}


def _shapes() -> Iterator[Sample]:
    for dtype in (*_FLOATS, torch.int64, torch.bool):
        x = _random(4, 6, dtype=dtype)
        yield _ATEN.lift_fresh_copy.default, (x,), {}
        yield _ATEN.copy.default, (x, _random(6)), {}
        for target_dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            yield torch.ops.prims.convert_element_type.default, (x, target_dtype), {}
        row, column = torch.tensor([2, -1, 0]), torch.tensor([1, 1, -6])
        yield _ATEN._unsafe_index.Tensor, (x, [row, None]), {}
        yield _ATEN._unsafe_index.Tensor, (x, [row, column]), {}
        yield _ATEN.argsort.stable, (x,), {"stable": True, "dim": 0, "descending": True}
    for dtype in _FLOATS:
        x = _random(4, 6, dtype=dtype)
        for accumulate in (False, True):
            yield _ATEN._unsafe_index_put.default, (x, [row, column], _random(3, dtype=dtype), accumulate), {}
            yield _ATEN._unsafe_index_put.default, (x, [None, row], _random(4, 3, dtype=dtype), accumulate), {}
        yield _ATEN.index_put.default, (x, [x > 0], torch.tensor(2.0, dtype=dtype)), {}
        for reduce in ("add", "multiply"):
            yield _ATEN.scatter.value_reduce, (x, 1, torch.tensor([[1], [0], [5]]), 1.5), {"reduce": reduce}
    iota = {"dtype": torch.int64, "device": torch.device("cpu"), "requires_grad": False}
    yield torch.ops.prims.iota.default, (7,), {"start": 3, "step": 2, **iota}
    x = _random(3, 4)
    for view in (torch.int32, torch.int16, torch.uint8):
        yield _ATEN.view.dtype, (x, view), {}
    yield _ATEN.view.dtype, (_random(3, 4, dtype=torch.bfloat16), torch.float32), {}
    yield _ATEN.view_as_complex.default, (_random(3, 4, 2),), {}
    yield _ATEN.view_as_real.default, (torch.complex(x, x + 1),), {}


def _layers() -> Iterator[Sample]:
    integers = torch.randint(-128, 128, (32, 16), dtype=torch.int8)
    yield _ATEN._int_mm.default, (integers, integers.t().contiguous()), {}
    for dtype in _FLOATS:
        weight, running = _random(3, dtype=dtype), _random(3, dtype=dtype)
        arguments = (_random(2, 3, 4, dtype=dtype), weight, weight, running, running.abs() + 0.1, 0.1, 1e-5)
        yield _ATEN._native_batch_norm_legit_no_training.default, arguments, {}
    # Attention: masks of both kinds, grouped key heads, a query that may look at no key, and unit-scale gradients.
    for dtype, num_key_heads, is_causal in itertools.product(_FLOATS, (4, 2), (False, True)):
        query, grad = (_random(2, 4, 6, 8, dtype=dtype) for _ in range(2))
        key, value = (_random(2, num_key_heads, 6, 8, dtype=dtype) for _ in range(2))
        mask = None if is_causal else torch.where(_random(2, 1, 6, 6, dtype=torch.bool), 0.0, -torch.inf).to(dtype)
        if mask is not None:
            mask[1, 0, 2] = -torch.inf
        options = {"attn_mask": mask, "scale": 0.3}
        forward = _ATEN._scaled_dot_product_flash_attention_for_cpu.default
        yield forward, (query, key, value, 0.0, is_causal), options
        if num_key_heads == 4:
            out, logsumexp = forward(query, key, value, 0.0, is_causal, **options)
            backward = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
            yield backward, (grad, query, key, value, out, logsumexp, 0.0, is_causal), options


def _unusual_values() -> Iterator[Sample]:
    """NaN, infinities, signed zeros and ties, which OpInfo's samples mostly leave out."""
    inf, nan = torch.inf, torch.nan
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 0.5, inf, -inf, nan, 1e30, -1e30, 1e-30])
    left, right = (grid.contiguous() for grid in torch.meshgrid(special, special, indexing="ij"))
    for dtype in _FLOATS:
        x = special.to(dtype)
        a, b = left.to(dtype), right.to(dtype)
        for name in ("abs", "ceil", "elu", "erf", "exp", "expm1", "floor", "gelu", "isinf", "isnan", "leaky_relu",
                     "log", "log1p", "logical_not", "nan_to_num", "neg", "reciprocal", "relu", "round", "rsqrt",
                     "sigmoid", "sign", "signbit", "silu", "softplus", "sqrt", "tanh", "trunc"):  # fmt: skip
            yield getattr(_ATEN, name).default, (x,), {}
        for name in ("maximum", "minimum", "fmax", "fmin", "logaddexp", "hypot", "logical_and"):
            yield getattr(_ATEN, name).default, (a, b), {}
        for name in ("eq", "ne", "lt", "le", "gt", "ge"):
            yield getattr(_ATEN, name).Tensor, (a, b), {}
        for name in ("add", "sub", "mul", "div"):
            yield getattr(_ATEN, name).Tensor, (a, b), {}
        for exponent in (-2, -0.5, 0, 0.5, 1, 2, 3, 1.5):
            yield _ATEN.pow.Tensor_Scalar, (x, exponent), {}
        yield _ATEN.pow.Tensor_Tensor, (a, b), {}
        yield _ATEN.clamp.default, (x, -1, 2), {}
        yield _ATEN.clamp.default, (x, 2, -1), {}
        yield _ATEN.where.self, (a > b, a, b), {}
        for dim in (0, 1):
            for name in ("amax", "amin"):
                yield getattr(_ATEN, name).default, (a, [dim]), {}
            for op in (_ATEN.max.dim, _ATEN.min.dim, _ATEN.argmax.default, _ATEN.argmin.default):
                yield op, (a, dim), {}
            yield _ATEN.sort.stable, (a,), {"stable": True, "dim": dim, "descending": dim == 0}
            yield _ATEN.logsumexp.default, (a[:, :9], [dim]), {}
            yield _ATEN._log_softmax.default, (a[:, :7], dim, False), {}
            yield _ATEN._softmax.default, (a, dim, False), {}
        yield _ATEN.sum.dim_IntList, (a, [0]), {}
        yield _ATEN.any.default, (x,), {}
        yield _ATEN.all.default, (x,), {}
