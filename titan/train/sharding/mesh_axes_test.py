"""Which process reads which share of a batch, whatever the order in which a mesh takes the devices of processes."""

import pytest

from titan.core.config.validate import ConfigError
from titan.parallel.mesh import MeshSpec
from titan.train.sharding.mesh_axes import data_share

_TENSOR = MeshSpec(("dp_shard", "tp"), (2, 4))


@pytest.mark.parametrize(
    ("mesh", "processes", "shares"),
    [
        (MeshSpec((), ()), [0], [0]),
        (MeshSpec(("dp_shard",), (4,)), [0, 0, 1, 1], [0, 1]),
        (MeshSpec(("dp_shard",), (4,)), [1, 0, 1, 0], [1, 0]),  # the first has the second and the last sequence
        (_TENSOR, [0, 0, 0, 0, 1, 1, 1, 1], [0, 1]),
        (_TENSOR, [0, 0, 2, 2, 1, 1, 3, 3], [0, 1, 0, 1]),  # the first and the third process share sequences
        (_TENSOR, [0, 1, 0, 1, 0, 1, 0, 1], [0, 0]),
        (MeshSpec(("dp_replicate", "ep", "cp"), (2, 2, 2)), [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 3]),
    ],
)
def test_processes_with_the_same_sequences_read_the_same_share(mesh, processes, shares):
    found = [data_share(mesh, processes, process) for process in range(max(processes) + 1)]
    assert found == [(share, max(shares) + 1) for share in shares]


def test_sequences_that_are_shared_in_part_are_refused():
    mesh = MeshSpec(("dp_shard", "tp"), (4, 3))
    with pytest.raises(ConfigError, match="^--parallelism: of the 3 processes .* some share a part"):
        data_share(mesh, [0] * 4 + [1] * 4 + [2] * 4, 0)
    with pytest.raises(ConfigError, match="some share a part"):
        data_share(MeshSpec(("dp_shard",), (4,)), [0, 0, 0, 1], 0)  # no equal shares
