"""Every collective under shard_map on four virtual devices, against the same thing written in numpy."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.distributed._functional_collectives  # noqa: F401 (defines torch.ops._c10d_functional)
from jax.sharding import Mesh, PartitionSpec

from titan.graph.lowering.lower import lower
from titan.graph.lowering.ops import TABLE
from titan.graph.lowering.table import LoweringError, overload_name

_c10d = torch.ops._c10d_functional

_REDUCTIONS = {"sum": np.sum, "avg": np.mean, "max": np.max, "min": np.min, "product": np.prod}
_WORLD = {"shard": 4}
_GRID = {"replicate": 2, "shard": 2}

_LOCAL = np.random.default_rng(0).normal(size=(4, 8, 3)).astype(np.float32)  # (device, rows, width)


def _on_mesh(
    axis_sizes: dict[str, int], target: Any, args: tuple[Any, ...], out_rows: int, dtype=torch.float32
) -> np.ndarray:
    """One collective on `_LOCAL[i]` at device i; the devices' results, stacked."""
    is_list = "coalesced" in overload_name(target)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(_LOCAL.shape[1:], dtype=dtype, device="meta")
    node = graph.call_function(target, ([x] if is_list else x, *args))
    result = torch.empty((out_rows, _LOCAL.shape[2]), dtype=dtype, device="meta")
    node.meta["val"] = [result] if is_list else result
    graph.output((node,))
    run = lower(torch.fx.GraphModule(torch.nn.Module(), graph))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(*axis_sizes.values()), tuple(axis_sizes))
    spec = PartitionSpec(tuple(axis_sizes))

    def on_device(local: jax.Array) -> jax.Array:
        (result,) = run(local[0])
        return (result[0] if is_list else result)[None]

    with jax.numpy_dtype_promotion("strict"):
        mapped = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return np.asarray(jax.jit(mapped)(_LOCAL))


def _groups(axis_sizes: dict[str, int]) -> list[list[int]]:
    """The devices that talk to each other over the axis `shard`."""
    return np.arange(4).reshape(-1, axis_sizes["shard"]).tolist()


def _expect(axis_sizes: dict[str, int], of_group) -> np.ndarray:
    """`of_group(group's values)` gives the results of the group's devices; all devices in order."""
    return np.concatenate([of_group(_LOCAL[group]) for group in _groups(axis_sizes)])


@pytest.mark.parametrize("axis_sizes", [_WORLD, _GRID], ids=["1d", "2d"])
@pytest.mark.parametrize("reduce_op", _REDUCTIONS)
@pytest.mark.parametrize("coalesced", [False, True])
def test_reductions(axis_sizes: dict[str, int], reduce_op: str, coalesced: bool) -> None:
    size, reduce = axis_sizes["shard"], _REDUCTIONS[reduce_op]
    all_reduce = _c10d.all_reduce_coalesced.default if coalesced else _c10d.all_reduce.default
    ours = _on_mesh(axis_sizes, all_reduce, (reduce_op, "shard"), out_rows=8)
    expected = _expect(axis_sizes, lambda values: np.repeat(reduce(values, axis=0)[None], size, axis=0))
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6)

    reduce_scatter = _c10d.reduce_scatter_tensor_coalesced.default if coalesced else _c10d.reduce_scatter_tensor.default
    ours = _on_mesh(axis_sizes, reduce_scatter, (reduce_op, size, "shard"), out_rows=8 // size)
    expected = _expect(axis_sizes, lambda values: np.stack(np.split(reduce(values, axis=0), size)))
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axis_sizes", [_WORLD, _GRID], ids=["1d", "2d"])
def test_exchanges(axis_sizes: dict[str, int]) -> None:
    size = axis_sizes["shard"]

    gathered = _expect(axis_sizes, lambda values: np.repeat(values.reshape(1, -1, 3), size, axis=0))
    for target in (_c10d.all_gather_into_tensor.default, _c10d.all_gather_into_tensor_coalesced.default):
        np.testing.assert_array_equal(_on_mesh(axis_sizes, target, (size, "shard"), out_rows=8 * size), gathered)

    splits = [8 // size] * size
    exchanged = _expect(axis_sizes, lambda values: values.reshape(size, size, -1, 3).swapaxes(0, 1).reshape(size, 8, 3))
    np.testing.assert_array_equal(
        _on_mesh(axis_sizes, _c10d.all_to_all_single.default, (splits, splits, "shard"), 8), exchanged
    )

    sent = _expect(axis_sizes, lambda values: np.repeat(values[1:2], size, axis=0))
    np.testing.assert_array_equal(_on_mesh(axis_sizes, _c10d.broadcast.default, (1, "shard"), out_rows=8), sent)

    np.testing.assert_array_equal(_on_mesh(axis_sizes, _c10d.wait_tensor.default, (), out_rows=8), _LOCAL)


@pytest.mark.parametrize("axis_sizes", [_WORLD, _GRID], ids=["1d", "2d"])
def test_joining_and_cutting_along_another_dim(axis_sizes: dict[str, int]) -> None:
    size = axis_sizes["shard"]
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(*axis_sizes.values()), tuple(axis_sizes))
    spec = PartitionSpec(tuple(axis_sizes))
    values = np.swapaxes(_LOCAL, 1, 2)  # (device, width, rows)

    def on_mesh(name: str) -> np.ndarray:
        function = TABLE[f"titan.{name}.default"]
        mapped = jax.shard_map(
            lambda local: function(None, local[0], 1, size, "shard")[None],
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
        return np.asarray(jax.jit(mapped)(values))

    groups = _groups(axis_sizes)
    joined = [np.concatenate(list(values[group]), axis=1) for group in groups for _ in group]
    np.testing.assert_array_equal(on_mesh("all_gather_along"), np.stack(joined))
    slices = [part for group in groups for part in np.split(values[group].sum(0), size, axis=1)]
    np.testing.assert_allclose(on_mesh("reduce_scatter_along"), np.stack(slices), rtol=1e-6, atol=1e-6)


def test_axis_index_is_the_position_on_its_axis() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), tuple(_GRID))
    function = TABLE["titan.axis_index.default"]
    spec = PartitionSpec(tuple(_GRID))
    mapped = jax.shard_map(lambda: function(None, "shard")[None], mesh=mesh, in_specs=(), out_specs=spec)
    np.testing.assert_array_equal(jax.jit(mapped)(), [0, 1, 0, 1])


def test_unequal_splits_unknown_reductions_and_axes_are_errors() -> None:
    with pytest.raises(LoweringError, match="unequal splits"):
        _on_mesh(_WORLD, _c10d.all_to_all_single.default, ([5, 1, 1, 1], [5, 1, 1, 1], "shard"), out_rows=8)
    with pytest.raises(LoweringError, match="'xor'"):
        _on_mesh(_WORLD, _c10d.all_reduce.default, ("xor", "shard"), out_rows=8)
    with pytest.raises(LoweringError, match="expert"):
        _on_mesh(_WORLD, _c10d.all_reduce.default, ("sum", "expert"), out_rows=8)


def test_every_collective_is_tested_here() -> None:
    lists = {"all_gather_into_tensor_coalesced", "all_reduce_coalesced", "reduce_scatter_tensor_coalesced"}
    plain = {"all_gather_into_tensor", "all_reduce", "all_to_all_single", "broadcast", "reduce_scatter_tensor"}
    ours = {"all_gather_along", "axis_index", "reduce_scatter_along"}
    tested = {f"_c10d_functional.{name}.default" for name in lists | plain | {"wait_tensor"}}
    tested |= {f"titan.{name}.default" for name in ours}
    elsewhere = {"titan.barrier.default"}  # control_flow_test
    assert {name for name in TABLE if name.startswith(("_c10d_functional.", "titan."))} == tested | elsewhere
