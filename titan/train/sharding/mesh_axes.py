"""The axes of a run's mesh, and what each is for."""

import dataclasses
import math
from collections.abc import Sequence

import torch

from titan.core.config.validate import ConfigError
from titan.parallel.mesh import MeshSpec
from titan.parallel.simple_fsdp import ShardingPolicy
from titan.train.config.parallelism import ParallelismConfig


@dataclasses.dataclass(frozen=True)
class MeshAxis:
    """One axis of the mesh.

    Attributes:
      name: as layouts and reports call it.
      flag: the leaf of the section `parallelism` that holds its size.
      meaning: what its devices have in common, and what they do not.
    """

    name: str
    flag: str
    meaning: str


MESH_AXES = (
    MeshAxis("dp_replicate", "data_parallel_replicate", "other sequences and the same weights; gradients are summed"),
    MeshAxis("dp_shard", "data_parallel_shard", "other sequences, shards of the weights (FSDP)"),
    MeshAxis("ep", "expert_parallel", "other sequences and other experts, shards of all other weights"),
    MeshAxis("cp", "context_parallel", "other tokens of the same sequences, shards of the weights"),
    MeshAxis("tp", "tensor_parallel", "the same tokens, each device with a part of every layer"),
)
"""The axes, outermost first. Those further in communicate more; those of a batch are outermost, so that a process that
reads data has neighbouring rows of it."""

BATCH_AXES = ("dp_replicate", "dp_shard", "ep")
"""Axes whose devices have different sequences."""

SEQUENCE_AXIS = "cp"
"""The axis whose devices have different tokens of the same sequences."""

EXPERT_AXIS = "ep"
"""The axis over which the experts of a mixture are spread."""

TENSOR_AXIS = "tp"
"""The axis whose devices share the work of each layer on the same sequences."""


def mesh_spec(parallelism: ParallelismConfig) -> MeshSpec:
    """The mesh of a resolved configuration."""
    sizes = tuple(getattr(parallelism, axis.flag) for axis in MESH_AXES)
    return MeshSpec(tuple(axis.name for axis in MESH_AXES), sizes).without_trivial_axes()


def data_share(mesh: MeshSpec, processes: Sequence[int], process_index: int) -> tuple[int, int]:
    """Which share of a batch's sequences a process reads, and how many shares there are.

    Processes whose devices have the same sequences read the same share.

    Args:
      mesh: of the run.
      processes: the process of each device of the mesh, in the mesh's order, which need not be that of processes.
      process_index: this process.

    Raises:
      ConfigError: some of one process's sequences, and not all, are another's too, so that there are no equal shares.
    """
    num_with_same = mesh.num_devices // math.prod(map(mesh.size, BATCH_AXES))
    groups: dict[int, set[int]] = {}
    for position, process in enumerate(processes):
        groups.setdefault(process, set()).add(position // num_with_same)
    shares = sorted({tuple(sorted(group)) for group in groups.values()})
    if len({len(share) for share in shares}) > 1 or sum(map(len, shares)) > len({i for share in shares for i in share}):
        raise ConfigError(
            "parallelism",
            f"of the {len(groups)} processes that the mesh {mesh} lies over some share a part of their sequences",
            "choose tensor_parallel x context_parallel to divide the devices of a process, or as a multiple of them",
        )
    return shares.index(tuple(sorted(groups[process_index]))), len(shares)


def sharding_policy(parallelism: ParallelismConfig) -> ShardingPolicy:
    """Axes and dtypes of SimpleFSDP. Gradients are not averaged: the loss is divided by the global number of tokens."""
    dtype = {"": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    return ShardingPolicy(
        shard_axes=("dp_shard", "ep", SEQUENCE_AXIS),
        gather_dtype=dtype[parallelism.gather_dtype],
        reduce_dtype=dtype[parallelism.reduce_dtype],
    )
