"""Hyperparameters of Qwen3, dense and mixture of experts, as flags, and the published sizes.

The file imports no torch, so that flags are parsed and checked before torch is loaded.
"""

import dataclasses
from typing import ClassVar

from titan.core.config.tree import option
from titan.core.config.validate import ConfigError
from titan.models.decoder_family import DecoderFamily, attention_option
from titan.models.family import Experts


@dataclasses.dataclass(frozen=True)
class Qwen3CommonConfig(DecoderFamily):
    """The hyperparameters that dense and mixture-of-experts models share; the defaults are those of the debug sizes."""

    components_function: ClassVar[str] = "titan.models.qwen3.components:qwen3_components"
    hf_format: ClassVar[str] = "titan.models.qwen3.hf:HF"

    vocab_size: int = option(4096, "Number of token ids; at least the tokenizer's.", minimum=1)
    dim: int = option(256, "Model dim: width of the residual stream.", minimum=1)
    num_layers: int = option(4, "Number of transformer blocks.", minimum=1)
    num_heads: int = option(4, "Number of query heads.", minimum=1)
    num_kv_heads: int = option(2, "Number of key/value heads; divides num_heads.", minimum=1)
    head_dim: int = option(64, "Size of one head; even. Need not be dim / num_heads.", minimum=2)
    norm_eps: float = option(1e-6, "Added to the mean square in RMSNorm.", minimum=0.0)
    rope_theta: float = option(1_000_000.0, "Base of the rotary embedding's wavelengths.", minimum=1.0)
    max_sequence_length: int = option(40960, "The longest sequence the model is meant for, in tokens.", minimum=1)
    tie_embeddings: bool = option(False, "Whether the embedding's table is the head's weight too.")
    attention: str = attention_option()

    def _flops_per_token(self, sequence_length: int, feed_forward_weights: int) -> float:
        """Model FLOPs per trained token, given the weights of one layer's feed-forward that a token meets."""
        q_dim, kv_dim = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer_weights = self.dim * (2 * q_dim + 2 * kv_dim) + feed_forward_weights
        weights = self.num_layers * layer_weights + self.dim * self.vocab_size
        causal_attention = self.num_layers * q_dim * sequence_length  # multiply-adds: q k and p v, each half of T q_dim
        return 6.0 * (weights + causal_attention)


@dataclasses.dataclass(frozen=True)
class Qwen3Config(Qwen3CommonConfig):
    """Hyperparameters of a dense Qwen3."""

    ffn_dim: int = option(768, "Inner dim of the feed-forward block.", minimum=1)

    def flops_per_token(self, sequence_length: int) -> float:
        """Model FLOPs per trained token: the matrix products of forward and backward, two FLOPs per multiply-add.

        Backward counts twice the forward. Attention counts half of the full square (causal; a pack of several
        documents needs less, which is not deducted). The embedding lookup, element-wise work and recompute are not
        counted.
        """
        return self._flops_per_token(sequence_length, 3 * self.dim * self.ffn_dim)


@dataclasses.dataclass(frozen=True)
class Qwen3MoeConfig(Qwen3CommonConfig):
    """Hyperparameters of a Qwen3 with a mixture of experts in every layer."""

    inner_dim: ClassVar[str] = "expert_ffn_dim"
    not_of_weights: ClassVar[tuple[str, ...]] = (*DecoderFamily.not_of_weights, "capacity_factor")

    num_experts: int = option(8, "Experts of one layer.", minimum=1)
    num_active_experts: int = option(2, "Experts that each token is given to; at most num_experts.", minimum=1)
    expert_ffn_dim: int = option(128, "Inner dim of one expert.", minimum=1)
    normalize_expert_weights: bool = option(True, "Whether the weights of a token's experts are made to sum to 1.")
    capacity_factor: float = option(
        0.0,
        "The most tokens that an expert takes, as a multiple of an equal share of a device's tokens; those after them "
        "do without it. 0: no limit, no token is dropped.",
        minimum=0.0,
    )

    def validate(self) -> None:
        """Raises ConfigError where hyperparameters that are each admitted contradict one another."""
        super().validate()
        if self.num_active_experts > self.num_experts:
            raise ConfigError(
                "model.num_active_experts",
                f"{self.num_active_experts} are more than model.num_experts={self.num_experts}",
                "give fewer, or more experts",
            )

    def experts(self) -> Experts:
        """Every layer has a mixture."""
        return Experts(self.num_layers, self.num_experts, self.num_active_experts)

    def flops_per_token(self, sequence_length: int) -> float:
        """Model FLOPs per trained token as for the dense model; of the experts, those that a token is given to."""
        experts = self.num_active_experts * 3 * self.dim * self.expert_ffn_dim
        return self._flops_per_token(sequence_length, experts + self.dim * self.num_experts)


def qwen3_debug() -> Qwen3Config:
    """5.2M parameters, for tests and trial runs on CPUs."""
    return Qwen3Config()


def qwen3_0_6b() -> Qwen3Config:
    """Qwen3 0.6B: 0.60B parameters, tied embeddings."""
    return _published(dim=1024, num_layers=28, num_heads=16, ffn_dim=3072, tie_embeddings=True)


def qwen3_1_7b() -> Qwen3Config:
    """Qwen3 1.7B: 1.72B parameters, tied embeddings."""
    return _published(dim=2048, num_layers=28, num_heads=16, ffn_dim=6144, tie_embeddings=True)


def qwen3_4b() -> Qwen3Config:
    """Qwen3 4B: 4.02B parameters, tied embeddings."""
    return _published(dim=2560, num_layers=36, num_heads=32, ffn_dim=9728, tie_embeddings=True)


def qwen3_8b() -> Qwen3Config:
    """Qwen3 8B: 8.19B parameters."""
    return _published(dim=4096, num_layers=36, num_heads=32, ffn_dim=12288)


def qwen3_14b() -> Qwen3Config:
    """Qwen3 14B: 14.77B parameters."""
    return _published(dim=5120, num_layers=40, num_heads=40, ffn_dim=17408)


def qwen3_32b() -> Qwen3Config:
    """Qwen3 32B: 32.76B parameters."""
    return _published(dim=5120, num_layers=64, num_heads=64, ffn_dim=25600)


def qwen3_moe_debug() -> Qwen3MoeConfig:
    """6.0M parameters, 3.7M of them active, for tests and trial runs on CPUs."""
    return Qwen3MoeConfig()


def qwen3_30b_a3b() -> Qwen3MoeConfig:
    """Qwen3 30B-A3B: 30.53B parameters, 3.35B of them active."""
    return _published_moe(dim=2048, num_layers=48, num_heads=32, expert_ffn_dim=768)


def qwen3_235b_a22b() -> Qwen3MoeConfig:
    """Qwen3 235B-A22B: 235.09B parameters, 22.19B of them active."""
    return _published_moe(dim=4096, num_layers=94, num_heads=64, expert_ffn_dim=1536)


_PUBLISHED = {"vocab_size": 151936, "head_dim": 128}


def _published(*, dim: int, num_layers: int, num_heads: int, ffn_dim: int, tie_embeddings: bool = False) -> Qwen3Config:
    return Qwen3Config(
        **_PUBLISHED,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        ffn_dim=ffn_dim,
        tie_embeddings=tie_embeddings,
    )


def _published_moe(*, dim: int, num_layers: int, num_heads: int, expert_ffn_dim: int) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        **_PUBLISHED,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=4,
        num_experts=128,
        num_active_experts=8,
        expert_ffn_dim=expert_ffn_dim,
    )


QWEN3_SIZES = {
    "debug": qwen3_debug,
    "0.6b": qwen3_0_6b,
    "1.7b": qwen3_1_7b,
    "4b": qwen3_4b,
    "8b": qwen3_8b,
    "14b": qwen3_14b,
    "32b": qwen3_32b,
    "moe_debug": qwen3_moe_debug,
    "30b_a3b": qwen3_30b_a3b,
    "235b_a22b": qwen3_235b_a22b,
}
"""The named sizes, each a function that returns its configuration."""
