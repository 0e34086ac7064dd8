"""The axes of a run's mesh, and what each is for."""

import math

import torch

from titan.parallel.mesh import MeshSpec
from titan.parallel.simple_fsdp import ShardingPolicy
from titan.train.parallelism_config import ParallelismConfig

_FLAGS = {
    "dp_replicate": "data_parallel_replicate",
    "dp_shard": "data_parallel_shard",
    "ep": "expert_parallel",
    "cp": "context_parallel",
    "tp": "tensor_parallel",
}
"""Axis, outermost first, to the flag of its size. Those further in communicate more; those of a batch are outermost, so
that a process that reads data has neighbouring rows of it."""

BATCH_AXES = ("dp_replicate", "dp_shard", "ep")
"""Axes whose devices have different sequences."""

SEQUENCE_AXIS = "cp"
"""The axis whose devices have different tokens of the same sequences."""

TENSOR_AXIS = "tp"
"""The axis whose devices share the work of each layer on the same sequences."""


def mesh_spec(parallelism: ParallelismConfig) -> MeshSpec:
    """The mesh of a resolved configuration."""
    return MeshSpec(tuple(_FLAGS), tuple(getattr(parallelism, flag) for flag in _FLAGS.values())).without_trivial_axes()


def data_share(mesh: MeshSpec, process_index: int, process_count: int) -> tuple[int, int]:
    """Which share of a batch's sequences a process reads, and how many shares there are.

    Processes have neighbouring devices of the mesh; those among which no batch axis runs read the same sequences.

    Args:
      mesh: of the run.
      process_index, process_count: this process among those of the run.
    """
    per_process = mesh.num_devices // process_count
    with_same_rows = mesh.num_devices // math.prod(map(mesh.size, BATCH_AXES))
    readers = max(with_same_rows // per_process, 1)
    return process_index // readers, process_count // readers


def sharding_policy(parallelism: ParallelismConfig) -> ShardingPolicy:
    """Axes and dtypes of SimpleFSDP. Gradients are not averaged: the loss is divided by the global number of tokens."""
    dtype = {"": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    return ShardingPolicy(
        shard_axes=("dp_shard", "ep", SEQUENCE_AXIS),
        gather_dtype=dtype[parallelism.gather_dtype],
        reduce_dtype=dtype[parallelism.reduce_dtype],
    )
