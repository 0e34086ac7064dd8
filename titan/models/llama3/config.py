"""Hyperparameters of Llama 3, as flags, and the published sizes.

The file imports no torch, so that flags are parsed and checked before torch is loaded.
"""

import dataclasses
from typing import ClassVar

from titan.core.config.tree import option
from titan.core.config.validate import ConfigError
from titan.models.decoder_family import DecoderFamily, attention_option


@dataclasses.dataclass(frozen=True)
class Llama3Config(DecoderFamily):
    """Hyperparameters of a Llama 3; the defaults are those of the debug size."""

    components_function: ClassVar[str] = "titan.models.llama3.components:llama3_components"
    hf_format: ClassVar[str] = "titan.models.llama3.hf:HF"

    vocab_size: int = option(4096, "Number of token ids; at least the tokenizer's.", minimum=1)
    dim: int = option(256, "Model dim: width of the residual stream.", minimum=1)
    num_layers: int = option(4, "Number of transformer blocks.", minimum=1)
    num_heads: int = option(4, "Number of query heads.", minimum=1)
    num_kv_heads: int = option(2, "Number of key/value heads; divides num_heads.", minimum=1)
    head_dim: int = option(0, "Size of one head; even. 0: dim / num_heads.", minimum=0)
    ffn_dim: int = option(1024, "Inner dim of the feed-forward block.", minimum=1)
    norm_eps: float = option(1e-5, "Added to the mean square in RMSNorm.", minimum=0.0)
    rope_theta: float = option(500_000.0, "Base of the rotary embedding's wavelengths.", minimum=1.0)
    rope_scaling: str = option(
        "none", "Frequency scaling of the rotary embedding; llama3 is that of Llama 3.1.", choices=("none", "llama3")
    )
    rope_scaling_factor: float = option(8.0, "llama3 scaling: stretch of the longest wavelengths.", minimum=1.0)
    rope_low_frequency_factor: float = option(
        1.0, "llama3 scaling: wavelengths above rope_original_max_length / this are stretched in full.", minimum=0.0
    )
    rope_high_frequency_factor: float = option(
        4.0, "llama3 scaling: wavelengths below rope_original_max_length / this are kept.", minimum=0.0
    )
    rope_original_max_length: int = option(
        8192, "llama3 scaling: context length before the extension, in tokens.", minimum=1
    )
    max_sequence_length: int = option(8192, "The longest sequence the model is meant for, in tokens.", minimum=1)
    tie_embeddings: bool = option(False, "Whether the embedding's table is the head's weight too.")
    attention: str = attention_option()

    @property
    def resolved_head_dim(self) -> int:
        """`head_dim`, or what it is when left at 0."""
        return self.head_dim or self.dim // self.num_heads

    def validate(self) -> None:
        """Raises ConfigError where hyperparameters that are each admitted contradict one another."""
        if self.head_dim == 0 and self.dim % self.num_heads:
            raise ConfigError(
                "model.head_dim",
                f"0 means dim / num_heads, but {self.num_heads} heads do not divide model.dim={self.dim}",
                "give the size of a head, or another number of heads",
            )
        super().validate()
        if self.rope_scaling == "llama3" and self.rope_high_frequency_factor <= self.rope_low_frequency_factor:
            raise ConfigError(
                "model.rope_high_frequency_factor",
                f"{self.rope_high_frequency_factor:g} is not above "
                f"model.rope_low_frequency_factor={self.rope_low_frequency_factor:g}",
                "give a larger one (4 in Llama 3.1)",
            )

    def flops_per_token(self, sequence_length: int) -> float:
        """Model FLOPs per trained token: the matrix products of forward and backward, two FLOPs per multiply-add.

        Backward counts twice the forward. Attention counts half of the full square (causal; a pack of several
        documents needs less, which is not deducted). The embedding lookup, element-wise work and recompute are not
        counted.
        """
        q_dim, kv_dim = self.num_heads * self.resolved_head_dim, self.num_kv_heads * self.resolved_head_dim
        layer_weights = self.dim * (2 * q_dim + 2 * kv_dim + 3 * self.ffn_dim)
        weights = self.num_layers * layer_weights + self.dim * self.vocab_size
        causal_attention = self.num_layers * q_dim * sequence_length  # multiply-adds: q k and p v, each half of T q_dim
        return 6.0 * (weights + causal_attention)


def llama3_debug() -> Llama3Config:
    """6.0M parameters, for tests and trial runs on CPUs."""
    return Llama3Config()


def llama3_8b() -> Llama3Config:
    """Llama 3.1 8B: 8.03B parameters."""
    return _published(dim=4096, num_layers=32, num_heads=32, ffn_dim=14336)


def llama3_70b() -> Llama3Config:
    """Llama 3.1 70B: 70.55B parameters."""
    return _published(dim=8192, num_layers=80, num_heads=64, ffn_dim=28672)


def llama3_405b() -> Llama3Config:
    """Llama 3.1 405B: 405.85B parameters."""
    return _published(dim=16384, num_layers=126, num_heads=128, ffn_dim=53248)


def _published(*, dim: int, num_layers: int, num_heads: int, ffn_dim: int) -> Llama3Config:
    return Llama3Config(
        vocab_size=128256,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        ffn_dim=ffn_dim,
        rope_scaling="llama3",
        max_sequence_length=131072,
    )


LLAMA3_SIZES = {"debug": llama3_debug, "8b": llama3_8b, "70b": llama3_70b, "405b": llama3_405b}
"""The named sizes, each a function that returns its configuration."""
