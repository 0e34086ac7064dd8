"""Rotary embedding (Su et al., 2021, arXiv:2104.09864) of queries or keys, together with their split into heads.

Shape suffixes: B batch, T tokens, F = N D columns of a projection, N heads, D head dim, H = D / 2.

XLA:TPU makes several fusions of the rotation, since the halves of a head do not fill registers, and copies its result
into the layout that attention kernels take; the kernel is one pass. Figures are in docs/kernels.md.
"""

import torch
from torch import Tensor

from titan.kernels.rope.op import rotate_heads_op
from titan.kernels.rope.pallas_tpu import LANES

_DTYPES = (torch.float32, torch.bfloat16)


def rotate_heads(
    x_BTF: Tensor, cos_BTH: Tensor, sin_BTH: Tensor, *, adjacent_pairs: bool = False, implementation: str = "auto"
) -> Tensor:
    """Splits columns into heads and rotates each pair of a head; differentiable in x_BTF.

    out[b, n, t, i] = x[i] cos[i] - x[i + H] sin[i], out[b, n, t, i + H] = x[i + H] cos[i] + x[i] sin[i], where x is
    x_BTF[b, t, n D : (n + 1) D] in float32. With adjacent pairs, 2i and 2i + 1 stand in the places of i and i + H.

    Args:
      x_BTF: result of the projection, float32 or bfloat16.
      cos_BTH, sin_BTH: cosines and sines of the angles, float32; constants.
      adjacent_pairs: pairs are (2i, 2i + 1) rather than (i, i + H).
      implementation: "mosaic", the Pallas kernel, whose D is a multiple of 128, or "xla". "auto": "mosaic" on TPU for
        such D.

    Returns:
      [B, N, T, D] in the dtype of x_BTF.

    Raises:
      ValueError: shapes or dtypes do not go together, or no such implementation.
      NotImplementedError: a dtype that is not listed, or a head dim that the kernel does not take.
    """
    if cos_BTH.ndim != 3 or cos_BTH.shape != sin_BTH.shape or {cos_BTH.dtype, sin_BTH.dtype} != {torch.float32}:
        raise ValueError(
            f"cos is {cos_BTH.dtype}{list(cos_BTH.shape)} and sin {sin_BTH.dtype}{list(sin_BTH.shape)}: "
            "both must be float32 [B, T, H]"
        )
    head_dim = 2 * cos_BTH.shape[2]
    if x_BTF.ndim != 3 or x_BTF.shape[:2] != cos_BTH.shape[:2] or not head_dim or x_BTF.shape[2] % head_dim:
        raise ValueError(
            f"x is {list(x_BTF.shape)}: cos {list(cos_BTH.shape)} asks for [{cos_BTH.shape[0]}, {cos_BTH.shape[1]}, "
            f"a multiple of {head_dim}]"
        )
    if not x_BTF.numel():
        raise ValueError(f"x is {list(x_BTF.shape)}: it is empty, give at least one element")
    if x_BTF.dtype not in _DTYPES:
        raise NotImplementedError(f"x is {x_BTF.dtype}: convert it to float32 or bfloat16")
    if head_dim % LANES:
        if implementation == "mosaic":
            raise NotImplementedError(f"the kernel takes head dims that are multiples of {LANES}, not {head_dim}")
        implementation = "xla" if implementation == "auto" else implementation
    return rotate_heads_op(x_BTF, cos_BTH, sin_BTH, adjacent_pairs=adjacent_pairs, implementation=implementation)
