"""What a grouped matmul is: a loop over the groups, in any float dtype, differentiable by PyTorch."""

import torch


def grouped_matmul_reference(lhs_MK: torch.Tensor, rhs_GKN: torch.Tensor, group_sizes_G: torch.Tensor) -> torch.Tensor:
    """Rows of group g times rhs_GKN[g]; rows after the last group give zeros.

    Args:
      lhs_MK: rows, sorted by group.
      rhs_GKN: one matrix for each group.
      group_sizes_G: rows of each group, adding up to at most M.

    Returns:
      [M, N] in lhs_MK's dtype.
    """
    sizes = group_sizes_G.tolist()
    unowned = len(lhs_MK) - sum(sizes)
    *groups, tail = lhs_MK.split([*sizes, unowned])
    products = [rows @ rhs for rows, rhs in zip(groups, rhs_GKN, strict=True)]
    return torch.cat([*products, tail.new_zeros(unowned, rhs_GKN.shape[2])])


def paired_grouped_matmul_reference(
    lhs_MK: torch.Tensor, gate_GKN: torch.Tensor, up_GKN: torch.Tensor, group_sizes_G: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two grouped matmuls of the same rows: with the gate and with the up weights."""
    return (
        grouped_matmul_reference(lhs_MK, gate_GKN, group_sizes_G),
        grouped_matmul_reference(lhs_MK, up_GKN, group_sizes_G),
    )
