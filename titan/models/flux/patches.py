"""Images' latents as the tokens that the transformer takes: patches of 2x2, row by row.

Shapes: B batch, c latent channels, R rows and S columns of patches, C = 4 c elements of a token.
"""

from torch import Tensor

PATCH = 2
"""Height and width of a patch, in latent pixels."""


def patchify(latents: Tensor) -> Tensor:
    """[B, c, 2 R, 2 S] to [B, R S, C]; a token's elements are ordered by channel, row, column.

    Raises:
      ValueError: the latents' height or width is odd.
    """
    height, width = latents.shape[-2:]
    if height % PATCH or width % PATCH:
        raise ValueError(f"latents of {height}x{width} pixels cannot be cut into 2x2 patches; give even sizes")
    patches = latents.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))  # [B, c, R, 2, S, 2]
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpatchify(tokens_BIC: Tensor, *, rows: int, columns: int) -> Tensor:
    """[B, R S, C] to [B, c, 2 R, 2 S], the inverse of `patchify`."""
    patches = tokens_BIC.unflatten(2, (-1, PATCH, PATCH)).unflatten(1, (rows, columns))  # [B, R, S, c, 2, 2]
    return patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
