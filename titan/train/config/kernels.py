"""The sections of the configuration that swap a part of the model for a kernel. Imports neither torch nor jax.

Block sizes are checked when flags are, by the kernel's own type: no compile begins with a size that no kernel takes.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

from titan.core.config.tree import option
from titan.core.config.validate import ConfigError

_TABLE = "from the tuned table for the shape and TPU, else a default."
_TUNED = f"0: {_TABLE}"


@dataclasses.dataclass(frozen=True)
class KernelSection:
    """Base of the sections that switch a kernel on."""

    enable: bool = option(False, "Use the kernel.")

    def undeclared_flops(self, attention_matmul: float) -> dict[str, float]:
        """FLOPs of one call of each kernel that declares no cost to the compiler, by how the kernel's name begins.

        Args:
          attention_matmul: FLOPs of one of the matrix products of one layer's attention, on one device.
        """
        return {}


@dataclasses.dataclass(frozen=True)
class SplashAttentionKernelConfig(KernelSection):
    """Splash attention in place of the model's own attention maths. Block sizes are multiples of 128."""

    enable: bool = option(
        False, "Attention by the splash kernel: no [T, T] scores in memory, masked blocks are skipped."
    )
    implementation: str = option(
        "auto",
        "auto: jax on TPU, xla elsewhere. jax and tokamax are Pallas kernels (interpreted, slowly, off TPU), xla is "
        "blockwise attention in plain XLA.",
        choices=("auto", "jax", "tokamax", "xla"),
    )
    sa_block_q: int = option(0, f"Forward: queries in a block. {_TUNED}", minimum=0)
    sa_block_kv: int = option(0, f"Forward: keys fetched at a time. {_TUNED}", minimum=0)
    sa_block_kv_compute: int = option(
        0, f"Forward: keys multiplied at a time; divides sa_block_kv. {_TUNED}", minimum=0
    )
    sa_block_q_dkv: int = option(0, f"Gradient of keys and values: queries in a block. {_TUNED}", minimum=0)
    sa_block_kv_dkv: int = option(0, f"Gradient of keys and values: keys fetched at a time. {_TUNED}", minimum=0)
    sa_block_kv_dkv_compute: int = option(
        0, f"Gradient of keys and values: keys multiplied at a time; divides sa_block_kv_dkv. {_TUNED}", minimum=0
    )
    sa_block_q_dq: int = option(0, f"Gradient of queries: queries in a block. {_TUNED}", minimum=0)
    sa_block_kv_dq: int = option(0, f"Gradient of queries: keys in a block. {_TUNED}", minimum=0)
    sa_use_fused_bwd_kernel: bool = option(
        False,
        "One kernel for all gradients: fewer matmuls, and a temporary copy of the queries' gradient per key block.",
    )
    sa_dq_reduction_steps: int = option(
        0,
        "implementation=tokamax: 3 sums the gradient of queries in three buffers of their dtype, 0 keeps one for each "
        "block of keys.",
        minimum=0,
        maximum=3,
    )

    def validate(self) -> None:
        """Raises ConfigError for blocks that no kernel takes, and for what the chosen kernel does not have."""
        if not self.enable:
            return
        if self.sa_dq_reduction_steps and self.implementation != "tokamax":
            raise ConfigError(
                "splash_attention_kernel.sa_dq_reduction_steps",
                "only the tokamax kernel has it",
                "leave it out, or give --splash_attention_kernel.implementation=tokamax",
            )
        if self.sa_use_fused_bwd_kernel and self.implementation == "tokamax":
            raise ConfigError(
                "splash_attention_kernel.sa_use_fused_bwd_kernel",
                "the backward of the tokamax kernel is always fused",
                "leave it out, or give --splash_attention_kernel.implementation=jax",
            )
        from titan.kernels.splash_attention.tiles import SplashTiles

        with _kernel_errors("splash_attention_kernel"):
            SplashTiles(**self.tiles())

    def tiles(self) -> dict[str, int | bool]:
        """The fields of `SplashTiles`."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name.startswith("sa_")}

    def undeclared_flops(self, attention_matmul: float) -> dict[str, float]:
        """See `KernelSection`: the kernels of JAX and tokamax declare no cost."""
        from titan.kernels.splash_attention.tiles import matmuls_by_kernel

        matmuls = matmuls_by_kernel(self.sa_use_fused_bwd_kernel)
        return {prefix: number * attention_matmul for prefix, number in matmuls.items()}


@dataclasses.dataclass(frozen=True)
class FusedLinearCrossEntropyConfig(KernelSection):
    """The head's matmul and the loss as one op, which never holds the logits of all tokens and words at once."""

    enable: bool = option(False, "Compute head and loss tile by tile.")
    gradients: str = option(
        "backward",
        "backward: a tile of words at a time, four matmuls, least memory. forward: a tile of tokens at a time, three "
        "matmuls, and a float32 copy of the head's gradient.",
        choices=("backward", "forward"),
    )
    implementation: str = option(
        "auto",
        "auto: the better one for the platform. mosaic is a Pallas kernel (interpreted, slowly, off TPU), xla is plain "
        "XLA.",
        choices=("auto", "mosaic", "xla"),
    )
    z_loss: float = option(
        0.0, "Weight of the squared log-sum-exp of the logits in the loss; keeps it near 0.", minimum=0
    )
    token_tile: int = option(0, f"gradients=forward: tokens in a tile, a multiple of 128. {_TUNED}", minimum=0)
    vocab_tile: int = option(0, f"gradients=backward: words in a tile, a multiple of 128. {_TUNED}", minimum=0)

    def validate(self) -> None:
        """Raises ConfigError for tiles that no kernel takes, and for settings of what is not in use."""
        if self.z_loss and not self.enable:
            raise ConfigError(
                "fused_linear_cross_entropy.z_loss",
                "only the fused loss has a z-loss, and it is off",
                "add --fused_linear_cross_entropy.enable, or leave it out",
            )
        if self.gradients == "forward" and self.implementation == "mosaic":
            raise ConfigError(
                "fused_linear_cross_entropy.implementation",
                "mosaic computes gradients in the backward pass only",
                "leave it out, or give --fused_linear_cross_entropy.gradients=backward",
            )
        unused = "vocab_tile" if self.gradients == "forward" else "token_tile"
        if getattr(self, unused):
            raise ConfigError(
                f"fused_linear_cross_entropy.{unused}",
                f"with gradients={self.gradients} nothing is cut that way",
                "leave it out, or give the other --fused_linear_cross_entropy.gradients",
            )
        if self.enable:
            from titan.kernels.fused_linear_cross_entropy.tiles import LinearCrossEntropyTiles

            with _kernel_errors("fused_linear_cross_entropy"):
                LinearCrossEntropyTiles(**self.tiles())

    def tiles(self) -> dict[str, int]:
        """The fields of `LinearCrossEntropyTiles` that have a flag."""
        return {"token_tile": self.token_tile, "vocab_tile": self.vocab_tile}


@dataclasses.dataclass(frozen=True)
class RopeKernelConfig(KernelSection):
    """Rotary embedding of queries and keys as a kernel."""

    enable: bool = option(
        False, "Rotate heads and move them in front of the tokens in one pass; XLA:TPU needs several."
    )
    implementation: str = option(
        "auto",
        "auto: mosaic on TPU where the head dim is a multiple of 128, xla elsewhere. mosaic is a Pallas kernel "
        "(interpreted, slowly, off TPU), xla is plain XLA.",
        choices=("auto", "mosaic", "xla"),
    )


@dataclasses.dataclass(frozen=True)
class GroupedMatmulConfig(KernelSection):
    """The experts of a mixture by grouped matmuls, each row with its own expert's weights, rather than by a loop."""

    enable: bool = option(False, "Compute experts by grouped matmuls.")
    paired: bool = option(False, "Gate and up projection as one kernel that reads the rows once.")
    implementation: str = option(
        "auto",
        "auto: on TPU Pallas kernels, elsewhere xla. xla: a loop over blocks of rows. mosaic: titan's Pallas kernels; "
        "megablox: JAX's; tokamax: tokamax' (on TPU alone); ragged_dot: XLA's own, good on TPU alone. The last three "
        "have no paired form.",
        choices=("auto", "mosaic", "megablox", "tokamax", "ragged_dot", "xla"),
    )
    forward_tiles: tuple[int, ...] = option((), f"Blocks of the product: rows, contracted, columns. Empty: {_TABLE}")
    dlhs_tiles: tuple[int, ...] = option((), f"Blocks of the gradient of the rows, in the same order. Empty: {_TABLE}")
    drhs_tiles: tuple[int, ...] = option(
        (), f"Blocks of the gradient of the weights, in the same order. Empty: {_TABLE}"
    )

    def validate(self) -> None:
        """Raises ConfigError for blocks that no kernel takes, and for settings of what is not in use."""
        if not self.enable:
            for name in ("paired", "forward_tiles", "dlhs_tiles", "drhs_tiles"):
                if getattr(self, name):
                    raise ConfigError(
                        f"grouped_matmul.{name}",
                        "grouped_matmul.enable is off",
                        "add --grouped_matmul, or leave it out",
                    )
        if self.paired and self.implementation not in ("auto", "mosaic", "xla"):
            raise ConfigError(
                "grouped_matmul.paired",
                f"implementation={self.implementation} multiplies one weight at a time",
                "leave one of the two out",
            )
        for name in ("forward_tiles", "dlhs_tiles", "drhs_tiles"):
            if len(getattr(self, name)) not in (0, 3):
                raise ConfigError(
                    f"grouped_matmul.{name}",
                    f"{','.join(map(str, getattr(self, name)))} are not three block sizes",
                    "give rows, contracted and columns, as 512,1024,1024",
                )
        if self.enable:
            from titan.kernels.grouped_matmul.tiles import GroupedMatmulTiles

            with _kernel_errors("grouped_matmul"):
                GroupedMatmulTiles(**self.tiles())

    def tiles(self) -> dict[str, tuple[int, ...]]:
        """The fields of `GroupedMatmulTiles`."""
        return {name: getattr(self, f"{name}_tiles") or (0, 0, 0) for name in ("forward", "dlhs", "drhs")}


@contextlib.contextmanager
def _kernel_errors(section: str) -> Iterator[None]:
    """Turns a kernel's refusal of a block size into one that names the section."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(section, str(error), "see --helpfull for what each size is") from error
