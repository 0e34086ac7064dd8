"""TensorLayout: shapes of shards and the axes of each dim."""

import pytest
import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec

_MESH = MeshSpec(("replicate", "shard"), (2, 4))


def _layout(shape: tuple[int, ...], *placements: Placement) -> TensorLayout:
    return TensorLayout(shape, torch.float32, placements)


@pytest.mark.parametrize(
    ("layout", "local_shape", "axes"),
    [
        (_layout((16, 3), Replicate(), Shard(0)), (4, 3), (("shard",), ())),
        (_layout((16, 6), Shard(1), Shard(0)), (4, 3), (("shard",), ("replicate",))),
        (_layout((16, 3), Shard(0), Shard(0)), (2, 3), (("replicate", "shard"), ())),
        (_layout((16, 3), Shard(0), Replicate()), (8, 3), (("replicate",), ())),
        (_layout((), Replicate(), Replicate()), (), ()),
        (_layout((0, 4), Shard(0), Replicate()), (0, 4), (("replicate",), ())),
    ],
)
def test_local_shape_and_axes(layout: TensorLayout, local_shape: tuple[int, ...], axes) -> None:
    assert layout.local_shape(_MESH) == local_shape
    assert layout.axes_by_dim(_MESH) == axes


def test_a_mesh_without_axes_needs_no_placements() -> None:
    layout = TensorLayout((5, 7), torch.int32)
    assert layout.local_shape(MeshSpec((), ())) == (5, 7)
    assert layout.axes_by_dim(MeshSpec((), ())) == ((), ())


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (_layout((6, 8), Replicate(), Shard(0)), r"dim 0 of shape \(6, 8\) is not divisible by its mesh axes shard=4"),
        (_layout((4, 8), Shard(0), Shard(0)), r"dim 0 of shape \(4, 8\) .* replicate=2 x shard=4"),
        (_layout((8, 8), Shard(0)), "1 placements for the mesh replicate=2 x shard=4"),
        (_layout((8, 8), Replicate(), Shard(2)), r"axis shard shards dim 2 of a tensor of shape \(8, 8\)"),
        (_layout((8, 8), Replicate(), Shard(-1)), "axis shard shards dim -1"),
        (_layout((8, 8), Replicate(), Partial()), "sharded or replicated, not Partial"),
    ],
)
def test_placements_that_do_not_fit(layout: TensorLayout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout.local_shape(_MESH)


@pytest.mark.parametrize("placements", [(Replicate(), Shard(0)), (Shard(1), Shard(0)), (Replicate(), Replicate())])
def test_a_stack_is_sharded_as_its_entries_are(placements: tuple[Placement, ...]) -> None:
    entry = _layout((16, 6), *placements)
    stack = entry.stacked(5)
    assert stack.local_shape(_MESH) == (5, *entry.local_shape(_MESH))
    assert stack.axes_by_dim(_MESH) == ((), *entry.axes_by_dim(_MESH))
    assert stack.unstacked() == entry


def test_a_stack_that_is_sharded_along_its_entries_has_no_layout_of_one() -> None:
    with pytest.raises(ValueError, match="the first dim of TensorLayout.* is sharded: no device has a whole entry"):
        _layout((8, 8), Shard(0), Replicate()).unstacked()
