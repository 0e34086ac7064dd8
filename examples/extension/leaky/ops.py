"""The op `leaky::leaky_sum` that titan does not have: y[t] = decay * y[t - 1] + x[t] within each document."""

import torch
from torch import Tensor


@torch.library.custom_op("leaky::leaky_sum", mutates_args=())
def leaky_sum(x_BTE: Tensor, decay_E: Tensor, is_start_BT: Tensor, backward: bool = False) -> Tensor:
    """The sums, each in the dtype of x.

    Args:
      x_BTE: what is summed.
      decay_E: what a channel keeps from token to token.
      is_start_BT: bool, whether a document begins at the token; its sum begins anew.
      backward: sums from the end of each document to its start.
    """
    keeps_BT1 = torch.logical_not(is_start_BT).to(x_BTE.dtype)[..., None]
    factors_BTE = keeps_BT1 * decay_E.to(x_BTE.dtype)
    steps = range(x_BTE.shape[1])
    total_BE, totals = torch.zeros_like(x_BTE[:, 0]), []
    for t in reversed(steps) if backward else steps:
        if backward and t + 1 < len(steps):
            total_BE = total_BE * factors_BTE[:, t + 1]
        elif not backward:
            total_BE = total_BE * factors_BTE[:, t]
        total_BE = total_BE + x_BTE[:, t]
        totals.append(total_BE)
    return torch.stack(totals[::-1] if backward else totals, dim=1)


@leaky_sum.register_fake
def _(x_BTE: Tensor, decay_E: Tensor, is_start_BT: Tensor, backward: bool = False) -> Tensor:
    return torch.empty_like(x_BTE)


def _save(ctx, inputs, output) -> None:
    _, decay_E, is_start_BT, ctx.is_backward = inputs
    ctx.save_for_backward(decay_E, is_start_BT)


def _gradients(ctx, grad_BTE: Tensor):
    # The decays are constants; the transposition of a causal sum runs the other way.
    return leaky_sum(grad_BTE, *ctx.saved_tensors, not ctx.is_backward), None, None, None


leaky_sum.register_autograd(_gradients, setup_context=_save)
