"""All-gather and reduce-scatter along any dim, as ops.

PyTorch's functional collectives join and cut along the first dim, so that another dim takes a copy of the whole tensor
besides. XLA's take any dim: as one op each, these are lowered to that.
"""

import torch
from torch import Tensor

_OPS = torch.ops._c10d_functional


@torch.library.custom_op("titan::all_gather_along", mutates_args=())
def all_gather_along(x: Tensor, dim: int, group_size: int, group_name: str) -> Tensor:
    """The tensors of a group's ranks joined along a dim, in the ranks' order.

    Args:
      x: of one shape on all ranks.
      dim: from 0 on.
      group_size, group_name: of the process group.
    """
    joined = _OPS.wait_tensor(_OPS.all_gather_into_tensor(x.contiguous(), group_size, group_name))
    return joined.unflatten(0, (group_size, x.shape[0])).movedim(0, dim).flatten(dim, dim + 1).contiguous()


@all_gather_along.register_fake
def _(x: Tensor, dim: int, group_size: int, group_name: str) -> Tensor:
    return x.new_empty([size * group_size if index == dim else size for index, size in enumerate(x.shape)])


@torch.library.custom_op("titan::reduce_scatter_along", mutates_args=())
def reduce_scatter_along(x: Tensor, dim: int, group_size: int, group_name: str) -> Tensor:
    """This rank's slice along a dim of the sum over a group's ranks; arguments as in `all_gather_along`."""
    parts = x.unflatten(dim, (group_size, x.shape[dim] // group_size)).movedim(dim, 0).flatten(0, 1)
    return _OPS.wait_tensor(_OPS.reduce_scatter_tensor(parts.contiguous(), "sum", group_size, group_name))


@reduce_scatter_along.register_fake
def _(x: Tensor, dim: int, group_size: int, group_name: str) -> Tensor:
    return x.new_empty([size // group_size if index == dim else size for index, size in enumerate(x.shape)])
