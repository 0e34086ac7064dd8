"""Hyperparameters of Muse Glimmer (the text model), as flags, and the published size.

The file imports no torch, so that flags are parsed and checked before torch is loaded.
"""

import dataclasses
from typing import ClassVar

from titan.core.config.tree import option
from titan.core.config.validate import ConfigError
from titan.models.decoder_family import DecoderFamily, attention_option


@dataclasses.dataclass(frozen=True)
class MuseGlimmerConfig(DecoderFamily):
    """Hyperparameters of a Muse Glimmer; the defaults are those of the debug size."""

    components_function: ClassVar[str] = "titan.models.muse_glimmer.components:muse_glimmer_components"
    hf_format: ClassVar[str] = "titan.models.muse_glimmer.hf:HF"
    tie_embeddings: ClassVar[bool] = False
    """The head has a weight of its own in every size."""

    vocab_size: int = option(4096, "Number of token ids; at least the tokenizer's.", minimum=1)
    dim: int = option(128, "Model dim: width of the residual stream.", minimum=1)
    num_layers: int = option(8, "Number of transformer blocks; a multiple of global_interval.", minimum=1)
    num_heads: int = option(4, "Number of query heads.", minimum=1)
    num_kv_heads: int = option(2, "Number of key/value heads; divides num_heads.", minimum=1)
    head_dim: int = option(32, "Size of one head; even. Need not be dim / num_heads.", minimum=2)
    ffn_dim: int = option(384, "Inner dim of the feed-forward block.", minimum=1)
    window: int = option(
        64, "Tokens that a query sees in a layer with a window: itself and those right before it.", minimum=1
    )
    global_interval: int = option(
        4, "The last of so many layers is global, without a window and without RoPE; the others have both.", minimum=1
    )
    query_scale: float = option(
        43.7840518911 / 128**0.5, "Factor of normalised queries, on top of head_dim ** -0.5.", minimum=0.0
    )
    norm_eps: float = option(1e-5, "Added to the mean square in RMSNorm, but for post norms.", minimum=0.0)
    post_norm_eps: float = option(1e-8, "The same in the norms of what attention and feed-forward give.", minimum=0.0)
    rope_theta: float = option(500_000.0, "Base of the rotary embedding's wavelengths.", minimum=1.0)
    logit_scale: float = option(
        (256 / 128) ** 0.5, "Factor of the head's products; (256 / dim) ** 0.5 in both named sizes.", minimum=0.0
    )
    logit_soft_cap: float = option(20.0, "Bound of the logits, by tanh; above 0.", minimum=0.0)
    max_sequence_length: int = option(16384, "The longest sequence the model is meant for, in tokens.", minimum=1)
    attention: str = attention_option()

    def validate(self) -> None:
        """Raises ConfigError where hyperparameters that are each admitted contradict one another, or say nothing."""
        super().validate()
        if self.num_layers % self.global_interval:
            raise ConfigError(
                "model.num_layers",
                f"{self.num_layers} layers are no multiple of the pattern of model.global_interval="
                f"{self.global_interval}",
                "give a multiple, or another interval",
            )
        for name in ("query_scale", "logit_scale", "logit_soft_cap"):
            if getattr(self, name) == 0:
                raise ConfigError(
                    f"model.{name}", "0 would make every score or logit the same", "give a number above 0"
                )

    def is_global(self, layer: int) -> bool:
        """Whether a layer, by its index, sees all earlier tokens and skips RoPE: the last of each `global_interval`."""
        return (layer + 1) % self.global_interval == 0

    def flops_per_token(self, sequence_length: int) -> float:
        """Model FLOPs per trained token: the matrix products of forward and backward, two FLOPs per multiply-add.

        Backward counts twice the forward. Attention of a global layer counts half of the full square of T x T scores,
        that of a layer with a window half of the band |t - s| < window within it, which is min(window, T) (1 -
        min(window, T) / 2T) keys a token; a pack of several documents needs less, which is not deducted. The embedding
        lookup, element-wise work and recompute are not counted.
        """
        q_dim, kv_dim = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer_weights = self.dim * (3 * q_dim + 2 * kv_dim + 3 * self.ffn_dim)  # wq, o_gate, wo; wk, wv; feed-forward
        weights = self.num_layers * layer_weights + self.dim * self.vocab_size
        window = min(self.window, sequence_length)
        windowed_keys = window - window * window / (2 * sequence_length) if sequence_length else 0.0
        keys = sum(sequence_length / 2 if self.is_global(layer) else windowed_keys for layer in range(self.num_layers))
        return 6.0 * (weights + 2 * q_dim * keys)  # multiply-adds of each key: q k and p v


def muse_glimmer_debug() -> MuseGlimmerConfig:
    """2.8M parameters in two periods of layers, for tests and trial runs on CPUs."""
    return MuseGlimmerConfig()


def muse_glimmer_30b() -> MuseGlimmerConfig:
    """The text model of Muse Glimmer 30B: 27.85B parameters."""
    return MuseGlimmerConfig(
        vocab_size=202048,
        dim=6656,
        num_layers=52,
        num_heads=32,
        num_kv_heads=2,
        head_dim=128,
        ffn_dim=19968,
        window=2048,
        logit_scale=0.19611613513,
    )


MUSE_GLIMMER_SIZES = {"debug": muse_glimmer_debug, "30b": muse_glimmer_30b}
"""The named sizes, each a function that returns its configuration."""
