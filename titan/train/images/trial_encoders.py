"""Stand-ins for an autoencoder and text encoders, for trial runs: they need no files and no network.

The autoencoder is a fixed linear map, so that what a model samples can be looked at: of each 8x8 block of pixels it
keeps the lowest frequencies of the discrete cosine transform, those of brightness before those of colour. The text
encoders are a T5 and a CLIP with random weights over the bytes of a caption: different captions get different
embeddings, and like ones like embeddings.
"""

import functools
import hashlib
import importlib.metadata
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from titan.core.config.validate import ConfigError
from titan.core.data.images.encoders import EncodedCaption, Encoders
from titan.models.family import ImageModel
from titan.models.flux.patches import patchify, unpatchify

_BLOCK = 8
_PATCH_CHANNELS = 4
_MOST_CHANNELS = 3 * _BLOCK * _BLOCK
# As ByT5 (Xue et al., 2022, arXiv:2105.13626) numbers bytes.
_PAD, _END, _FIRST_BYTE = 0, 1, 3
_VOCABULARY = _FIRST_BYTE + 256
_SEED = 0


class TrialEncoders(Encoders):
    """The stand-ins for a model of given widths."""

    patch_pixels = 2 * _BLOCK

    def __init__(self, model: ImageModel):
        """Initializes the instance.

        Args:
          model: what reads the embeddings.

        Raises:
          ConfigError: there are not so many latent channels.
        """
        if model.in_channels % _PATCH_CHANNELS or model.in_channels > _PATCH_CHANNELS * _MOST_CHANNELS:
            raise ConfigError(
                "model.in_channels",
                f"{model.in_channels} is no multiple of {_PATCH_CHANNELS} up to {_PATCH_CHANNELS * _MOST_CHANNELS}, as "
                "the stand-in for an autoencoder gives",
                "give one, or --data.encoders",
            )
        versions = [importlib.metadata.version(package) for package in ("torch", "transformers")]
        widths = (model.in_channels, model.text_dim, model.pooled_dim, model.text_length)
        self.fingerprint = hashlib.blake2b(repr(("trial", 1, versions, widths)).encode(), digest_size=16).hexdigest()
        self._model = model
        self._basis = _basis(model.in_channels // _PATCH_CHANNELS)

    def encode_image(self, pixels: np.ndarray) -> np.ndarray:
        """See `Encoders.encode_image`."""
        signal = torch.from_numpy(pixels.astype(np.float32) / 127.5 - 1.0)
        blocks = signal.unflatten(1, (-1, _BLOCK)).unflatten(0, (-1, _BLOCK))  # [rows, 8, columns, 8, 3]
        latents = torch.einsum("rycxk,nyxk->nrc", blocks, self._basis)
        return patchify(latents[None])[0].numpy()

    def decode_image(self, tokens: np.ndarray, *, rows: int, columns: int) -> np.ndarray:
        """See `Encoders.decode_image`."""
        latents = unpatchify(torch.from_numpy(tokens)[None].float(), rows=rows, columns=columns)[0]
        inverse = self._basis / self._basis.square().sum((1, 2, 3), keepdim=True)
        blocks = torch.einsum("nrc,nyxk->rycxk", latents, inverse)
        signal = blocks.flatten(2, 3).flatten(0, 1)
        return ((signal.clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8).numpy()

    def encode_captions(self, captions: Sequence[str]) -> list[EncodedCaption]:
        """See `Encoders.encode_captions`; a token is a byte, and the last one the end."""
        encoded = {caption: self._encode_caption(caption) for caption in dict.fromkeys(captions)}
        return [encoded[caption] for caption in captions]

    def _encode_caption(self, caption: str) -> EncodedCaption:
        content = caption.encode()[: self._model.text_length - 1]
        ids = torch.tensor([[*(_FIRST_BYTE + byte for byte in content), _END]])
        with torch.no_grad():
            tokens = self._t5(input_ids=ids).last_hidden_state[0]
            pooled = self._clip(input_ids=ids).pooler_output[0]
        return EncodedCaption(tokens.numpy(), pooled.numpy())

    @functools.cached_property
    def _t5(self) -> Any:
        from transformers import T5Config, T5EncoderModel

        dim = self._model.text_dim
        config = T5Config(
            vocab_size=_VOCABULARY, d_model=dim, d_kv=16, d_ff=2 * dim, num_layers=2, num_heads=4, pad_token_id=_PAD
        )
        return _random(T5EncoderModel, config)

    @functools.cached_property
    def _clip(self) -> Any:
        from transformers import CLIPTextConfig, CLIPTextModel

        dim = self._model.pooled_dim
        config = CLIPTextConfig(
            vocab_size=_VOCABULARY,
            hidden_size=dim,
            intermediate_size=2 * dim,
            num_hidden_layers=2,
            num_attention_heads=1,
            max_position_embeddings=self._model.text_length,
            pad_token_id=_PAD,
            bos_token_id=None,
            eos_token_id=_END,
        )
        return _random(CLIPTextModel, config)


def _random(model_class: Any, config: Any) -> Any:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(_SEED)
        return model_class(config).eval()


def _basis(num_channels: int) -> torch.Tensor:
    """The patterns [channels, 8, 8, 3] whose products with a block are its latents, orthogonal to one another."""
    index = np.arange(_BLOCK)
    waves = np.cos(np.pi / _BLOCK * (index[None] + 0.5) * index[:, None]) * np.sqrt(2 / _BLOCK)  # [frequency, pixel]
    waves[0] /= np.sqrt(2)
    # Brightness, blue against yellow, red against green: orthonormal.
    colours = np.array([[1, 1, 1], [1, 1, -2], [1, -1, 0]]) / np.sqrt([[3], [6], [2]])
    # A colour's pattern comes where brightness has those of three times its frequency.
    ranked = sorted(
        (max(u, v) * (1 if colour == 0 else 3) + (colour > 0), u + v, colour, u, v)
        for colour in range(3)
        for u in range(_BLOCK)
        for v in range(_BLOCK)
    )[:num_channels]
    patterns = []
    for _, _, colour, u, v in ranked:
        pattern = waves[u][:, None, None] * waves[v][None, :, None] * colours[colour]
        # Of images, amplitudes fall about as the inverse of the frequency, and colour has a quarter of brightness's.
        deviation = (8.0 if colour == 0 else 2.0) / (1.0 + 3.0 * np.hypot(u, v))
        patterns.append(pattern / deviation)
    return torch.from_numpy(np.stack(patterns).astype(np.float32))
