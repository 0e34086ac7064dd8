"""What applying route scores is, in any float dtype, differentiable by PyTorch."""

import torch


def apply_route_scores_reference(expert_out_ME: torch.Tensor, scores_M: torch.Tensor) -> torch.Tensor:
    """Each row times its score, in expert_out_ME's dtype."""
    return (expert_out_ME * scores_M.unsqueeze(1)).to(expert_out_ME.dtype)
