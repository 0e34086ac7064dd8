"""Router weights on the outputs of experts, with a backward that keeps no float32 copy of them.

Shape suffixes: M rows (token copies sorted by expert), E model dim.
"""

import torch

from titan.kernels.route_scores.op import apply_route_scores_op
from titan.kernels.route_scores.tiles import RouteScoreTiles

_DTYPES = (torch.float32, torch.bfloat16)
_AUTOMATIC = RouteScoreTiles()


def apply_route_scores(
    expert_out_ME: torch.Tensor,
    scores_M: torch.Tensor,
    *,
    tiles: RouteScoreTiles = _AUTOMATIC,
    implementation: str = "auto",
) -> torch.Tensor:
    """out_ME = expert_out_ME * scores_M[:, None], multiplied in float32; differentiable in both.

    Between forward and backward expert_out_ME and scores_M are kept as they are. Backward reads expert_out_ME and the
    gradient once, and sums each score's gradient in float32.

    Args:
      expert_out_ME: float32 or bfloat16.
      scores_M: a score for each row, float32 or bfloat16.
      tiles: block sizes of the TPU kernel.
      implementation: "auto" is "xla" everywhere: XLA:TPU makes one fusion of the backward too, which moves no more
        bytes than the kernel and takes in neighbouring operations. "mosaic": a Pallas TPU kernel for the backward.

    Returns:
      [M, E] in the dtype of expert_out_ME.

    Raises:
      ValueError: shapes do not go together, or no such implementation.
      NotImplementedError: a dtype that is not listed.
      VmemError: the blocks exceed a TPU's vector memory.
    """
    if expert_out_ME.ndim != 2 or 0 in expert_out_ME.shape:
        raise ValueError(f"expert_out_ME has shape {tuple(expert_out_ME.shape)}: give [M, E], not empty")
    if scores_M.shape != expert_out_ME.shape[:1]:
        raise ValueError(
            f"scores_M has shape {tuple(scores_M.shape)}: give a score for each of {len(expert_out_ME)} rows, [M]"
        )
    for name, tensor in (("expert_out_ME", expert_out_ME), ("scores_M", scores_M)):
        if tensor.dtype not in _DTYPES:
            raise NotImplementedError(f"{name} has dtype {tensor.dtype}: route scores take float32 or bfloat16")
    return apply_route_scores_op(
        expert_out_ME, scores_M, block_m=tiles.block_m, block_e=tiles.block_e, implementation=implementation
    )
