"""MeshSpec, the fake world, and the op that gives a rank's coordinate."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from titan.parallel.axis_index import axis_index
from titan.parallel.mesh import MeshSpec, fake_world

_HSDP = MeshSpec(("dp_replicate", "dp_shard"), (2, 4))


@pytest.mark.parametrize(
    ("names", "sizes", "message"),
    [
        (("a",), (2, 2), "1 axis names for 2 axis sizes"),
        (("a", "a"), (2, 2), "must differ"),
        (("a", "b"), (2, 0), "at least 1: {'a': 2, 'b': 0}"),
    ],
)
def test_impossible_meshes(names: tuple[str, ...], sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MeshSpec(names, sizes)


def test_sizes_and_trivial_axes() -> None:
    mesh = MeshSpec(("a", "b", "c"), (2, 1, 3))
    assert mesh.num_devices == 6 and mesh.size("c") == 3 and mesh.size("unknown") == 1
    assert mesh.without_trivial_axes() == MeshSpec(("a", "c"), (2, 3))
    assert str(mesh) == "a=2 x b=1 x c=3"
    single = MeshSpec(("a",), (1,)).without_trivial_axes()
    assert single == MeshSpec((), ()) and single.num_devices == 1 and str(single) == "one device"


def test_a_fake_world_leaves_the_process_as_it_was() -> None:
    def excepthook(*_) -> None:
        raise AssertionError

    before, sys.excepthook = sys.excepthook, excepthook
    try:
        for rank in (0, 5):
            with fake_world(_HSDP, rank) as mesh:
                assert mesh.mesh_dim_names == _HSDP.axis_names and tuple(mesh.shape) == _HSDP.axis_sizes
                assert dist.get_rank() == rank and tuple(mesh.get_coordinate()) == (rank // 4, rank % 4)
            assert not dist.is_initialized() and sys.excepthook is excepthook
        with pytest.raises(KeyError), fake_world(_HSDP):
            raise KeyError
        assert not dist.is_initialized() and sys.excepthook is excepthook
    finally:
        sys.excepthook = before


def test_fake_worlds_share_nothing() -> None:
    """DTensor's memory of earlier results names process groups; those of an earlier world are gone."""
    for _ in range(3):
        with fake_world(_HSDP) as mesh:
            sharded = DTensor.from_local(torch.ones(2, 8), mesh, [Replicate(), Shard(0)], run_check=False)
            product = (sharded @ sharded.t()).redistribute(placements=[Replicate(), Replicate()])
            assert product.device_mesh is mesh
            assert product.shape == (8, 8)


def test_a_running_process_group_is_an_error_and_survives() -> None:
    with fake_world(_HSDP):
        with pytest.raises(RuntimeError, match="destroy the running one first"), fake_world(_HSDP):
            pass
        assert dist.get_world_size() == 8
        with fake_world(MeshSpec((), ())) as mesh:
            assert mesh is None


def test_a_rank_must_be_in_the_mesh() -> None:
    for spec, rank in ((_HSDP, 8), (_HSDP, -1), (MeshSpec((), ()), 1)):
        message = f"has the ranks 0 to {spec.num_devices - 1}, not {rank}"
        with pytest.raises(ValueError, match=message), fake_world(spec, rank):
            pass
        assert not dist.is_initialized()


def test_a_device_mesh_must_fit_the_process_group() -> None:
    with fake_world(_HSDP):
        with pytest.raises(ValueError, match="the mesh has 4 devices, the process group 8"):
            MeshSpec(("a",), (4,)).device_mesh("cpu")
        with pytest.raises(ValueError, match="without axes"):
            MeshSpec((), ()).device_mesh("cpu")


def test_axis_index_stays_an_op_under_capture() -> None:
    with fake_world(_HSDP, rank=5) as mesh:
        graph = make_fx(lambda x: x + axis_index(mesh, "dp_shard"), tracing_mode="fake")(torch.ones(2)).graph
        (node,) = graph.find_nodes(op="call_function", target=torch.ops.titan.axis_index.default)
        assert node.args == (mesh.get_group("dp_shard").group_name,)
        assert node.meta["val"].dtype is torch.int32 and node.meta["val"].shape == ()
        assert not graph.find_nodes(op="get_attr")
        assert [int(axis_index(mesh, name)) for name in _HSDP.axis_names] == [1, 1]  # rank 5 of 2 x 4
