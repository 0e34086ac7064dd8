"""Grouped matmuls for mixture-of-experts layers: every row is multiplied by the weights of the group that owns it.

Shape suffixes: M rows (token copies sorted by expert), K their columns, N columns of the result, G groups (experts).

Rows of a group follow each other: group g owns the group_sizes_G[g] rows after those of group g - 1. The sizes are
known only at run time and may be zero. They add up to at most M (it is not checked, because that would wait for the
device); rows after the last group give zeros and get zero gradients, whatever they hold. Sums are taken in float32.
"""

import torch

from titan.kernels.grouped_matmul.op import Pair, grouped_matmul_op, paired_grouped_matmul_op
from titan.kernels.grouped_matmul.tiles import GroupedMatmulTiles

_DTYPES = (torch.float32, torch.bfloat16)
_AUTOMATIC = GroupedMatmulTiles()


def grouped_matmul(
    lhs_MK: torch.Tensor,
    rhs_GKN: torch.Tensor,
    group_sizes_G: torch.Tensor,
    *,
    tiles: GroupedMatmulTiles = _AUTOMATIC,
    implementation: str = "auto",
) -> torch.Tensor:
    """out[m] = lhs_MK[m] @ rhs_GKN[g] for the rows m of each group g; differentiable in lhs_MK and rhs_GKN.

    Args:
      lhs_MK: rows, sorted by group; float32 or bfloat16.
      rhs_GKN: one matrix for each group, of the same dtype.
      group_sizes_G: int32 or int64, rows of each group.
      tiles: block sizes of the TPU kernels.
      implementation: "auto" is "megablox" on TPU and "xla" elsewhere. "xla": loops over groups and row tiles;
        "ragged_dot": XLA's own, good only on TPU; "megablox": JAX's kernels; "tokamax": tokamax'; "mosaic": titan's.

    Returns:
      out_MN in the dtype of lhs_MK.

    Raises:
      ValueError: shapes or dtypes do not go together, or no such implementation.
      NotImplementedError: a dtype that no kernel takes, or "tokamax" where the target is no TPU.
      VmemError: the blocks exceed a TPU's vector memory.
    """
    _check(lhs_MK, {"rhs_GKN": rhs_GKN}, group_sizes_G)
    return grouped_matmul_op(
        lhs_MK,
        rhs_GKN,
        group_sizes_G,
        forward_tiles=tiles.forward,
        dlhs_tiles=tiles.dlhs,
        drhs_tiles=tiles.drhs,
        implementation=implementation,
    )


def paired_grouped_matmul(
    lhs_MK: torch.Tensor,
    gate_GKN: torch.Tensor,
    up_GKN: torch.Tensor,
    group_sizes_G: torch.Tensor,
    *,
    tiles: GroupedMatmulTiles = _AUTOMATIC,
    implementation: str = "auto",
) -> Pair:
    """Two grouped matmuls of the same rows, as a gated FFN has them, which read the rows once.

    Backward reads the rows once for both weight gradients too, and adds both products of their own gradient up in
    float32.

    Args:
      lhs_MK: rows, sorted by group; float32 or bfloat16.
      gate_GKN, up_GKN: two matrices for each group, of the same shape and dtype.
      group_sizes_G: int32 or int64, rows of each group.
      tiles: block sizes of the TPU kernels.
      implementation: "auto" is "mosaic" on TPU, titan's own kernels, and "xla" elsewhere.

    Returns:
      Pair(gate, up), [M, N] each, in the dtype of lhs_MK.

    Raises:
      ValueError, NotImplementedError, VmemError: as `grouped_matmul`.
    """
    _check(lhs_MK, {"gate_GKN": gate_GKN, "up_GKN": up_GKN}, group_sizes_G)
    if gate_GKN.shape != up_GKN.shape:
        raise ValueError(f"gate_GKN is {tuple(gate_GKN.shape)} and up_GKN {tuple(up_GKN.shape)}: give equal shapes")
    return paired_grouped_matmul_op(
        lhs_MK,
        gate_GKN,
        up_GKN,
        group_sizes_G,
        forward_tiles=tiles.forward,
        dlhs_tiles=tiles.dlhs,
        drhs_tiles=tiles.drhs,
        implementation=implementation,
    )


def _check(lhs: torch.Tensor, weights: dict[str, torch.Tensor], group_sizes: torch.Tensor) -> None:
    if lhs.ndim != 2:
        raise ValueError(f"lhs_MK has shape {tuple(lhs.shape)}: give rows by columns, [M, K]")
    if lhs.dtype not in _DTYPES:
        raise NotImplementedError(f"lhs_MK has dtype {lhs.dtype}: grouped matmuls take float32 or bfloat16")
    if group_sizes.ndim != 1 or group_sizes.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"group_sizes_G is {group_sizes.dtype} of shape {tuple(group_sizes.shape)}: give int32 or int64, [G]"
        )
    for name, weight in weights.items():
        num_groups, num_k = len(group_sizes), lhs.shape[1]
        if weight.ndim != 3 or weight.shape[:2] != (num_groups, num_k):
            raise ValueError(
                f"{name} has shape {tuple(weight.shape)}: lhs_MK and group_sizes_G ask for [{num_groups}, {num_k}, N]"
            )
        if weight.dtype != lhs.dtype:
            raise ValueError(f"{name} is {weight.dtype} and lhs_MK {lhs.dtype}: cast one to the other's dtype")
        if 0 in (*lhs.shape, *weight.shape):
            raise ValueError(
                f"lhs_MK {tuple(lhs.shape)} or {name} {tuple(weight.shape)} is empty: give at least one element"
            )
