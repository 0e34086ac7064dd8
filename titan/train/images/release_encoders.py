"""The encoders of a FLUX.1 release: its autoencoder, CLIP and T5, out of a folder in Diffusers' layout."""

import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from titan.core.config.validate import ConfigError
from titan.core.data.file_stamp import stamp_of
from titan.core.data.images.encoders import EncodedCaption, Encoders
from titan.models.family import ImageModel
from titan.models.flux.autoencoder import hf
from titan.models.flux.patches import patchify, unpatchify
from titan.models.hf.folder import HfCheckpointError

_FLAG = "data.encoders"
_DOWNSCALE = 8
_CURE = "give the folder of a FLUX.1 release in Diffusers' layout"
# Subfolder -> what its config.json must say, of which kind it then is, and the key of its width with the model's flag.
_TEXT_ENCODERS = {
    "text_encoder": ("clip_text_model", "CLIP text model", "hidden_size", "pooled_dim"),
    "text_encoder_2": ("t5", "T5", "d_model", "text_dim"),
}


class ReleaseEncoders(Encoders):
    """Autoencoder, CLIP and T5 of a release; weights are loaded when they are first used, in the files' dtype.

    Padding tokens are neither attended by T5 nor among what it gives; Diffusers' pipeline attends them.
    """

    patch_pixels = 2 * _DOWNSCALE

    def __init__(self, folder: str, model: ImageModel, *, cache_folder: str):
        """Checks the folder against the model; loads no weights, but reads them the first time, for the fingerprint.

        Args:
          folder: holds vae, text_encoder, text_encoder_2, tokenizer, tokenizer_2.
          model: what reads the embeddings.
          cache_folder: remembers what the files contain.

        Raises:
          ConfigError: a part is missing or of another kind, or its width is not the model's.
        """
        self._folder = pathlib.Path(folder).expanduser()
        self._model = model
        for name in ("tokenizer", "tokenizer_2"):
            if not (self._folder / name).is_dir():
                raise ConfigError(_FLAG, f"{folder} has no folder {name}", _CURE)
        for name, (kind, words, key, field) in _TEXT_ENCODERS.items():
            path = self._folder / name / "config.json"
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ConfigError(_FLAG, f"{path} cannot be read ({error})", _CURE) from error
            if content.get("model_type") != kind:
                raise ConfigError(_FLAG, f"{path} describes no {words}, but a {content.get('model_type')!r}", _CURE)
            if content.get(key) != getattr(model, field):
                problem = f"{getattr(model, field)} is not the width {content.get(key)} of the {words} in {folder}"
                raise ConfigError(f"model.{field}", problem, f"give --model.{field}={content.get(key)}")
        try:
            self._autoencoder_config = hf.config_from_hf(str(self._folder / "vae"))
        except HfCheckpointError as error:
            raise ConfigError(_FLAG, str(error), _CURE) from error
        if (
            4 * self._autoencoder_config.latent_channels != model.in_channels
            or self._autoencoder_config.downscale != _DOWNSCALE
        ):
            problem = (
                f"the vae in {folder} has {self._autoencoder_config.latent_channels} channels for "
                f"{self._autoencoder_config.downscale}x{self._autoencoder_config.downscale} pixels, not "
                f"model.in_channels={model.in_channels} / 4 for 8x8"
            )
            raise ConfigError(_FLAG, problem, _CURE)
        self.fingerprint = _fingerprint(self._folder, model.text_length, cache_folder)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def encode_image(self, pixels: np.ndarray) -> np.ndarray:
        """See `Encoders.encode_image`; of the autoencoder's distribution, the mean."""
        signal = torch.from_numpy(pixels.astype(np.float32) / 127.5 - 1.0).permute(2, 0, 1)[None].to(self._device)
        with torch.no_grad():
            return patchify(self._autoencoder.encode(signal).float())[0].cpu().numpy()

    def decode_image(self, tokens: np.ndarray, *, rows: int, columns: int) -> np.ndarray:
        """See `Encoders.decode_image`."""
        latents = unpatchify(torch.from_numpy(tokens)[None].float().to(self._device), rows=rows, columns=columns)
        with torch.no_grad():
            signal = self._autoencoder.decode(latents)[0].float().permute(1, 2, 0)
        return ((signal.clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8).cpu().numpy()

    def encode_captions(self, captions: Sequence[str]) -> list[EncodedCaption]:
        """See `Encoders.encode_captions`; T5 takes `model.text_length` tokens, CLIP as many as it was trained for."""
        return [self._encode_caption(caption) for caption in captions]

    def _encode_caption(self, caption: str) -> EncodedCaption:
        (tokenizer, t5), (clip_tokenizer, clip) = self._t5, self._clip
        length = min(self._model.text_length, clip.config.max_position_embeddings)
        with torch.no_grad():
            ids = tokenizer(caption, truncation=True, max_length=self._model.text_length, return_tensors="pt").input_ids
            tokens = t5(input_ids=ids.to(self._device)).last_hidden_state[0]
            ids = clip_tokenizer(caption, truncation=True, max_length=length, return_tensors="pt").input_ids
            pooled = clip(input_ids=ids.to(self._device)).pooler_output[0]
        return EncodedCaption(tokens.float().cpu().numpy(), pooled.float().cpu().numpy())

    @functools.cached_property
    def _autoencoder(self) -> torch.nn.Module:
        try:
            weights = hf.load_hf(str(self._folder / "vae"), self._autoencoder_config)
        except HfCheckpointError as error:
            raise ConfigError(_FLAG, str(error), _CURE) from error
        autoencoder = self._autoencoder_config.build()
        autoencoder.load_state_dict({name: weight.float() for name, weight in weights.items()}, assign=True)
        return autoencoder.to(self._device).eval()

    @functools.cached_property
    def _t5(self) -> tuple[Any, Any]:
        from transformers import AutoTokenizer, T5EncoderModel

        return self._load(AutoTokenizer, "tokenizer_2"), self._load_model(T5EncoderModel, "text_encoder_2")

    @functools.cached_property
    def _clip(self) -> tuple[Any, Any]:
        from transformers import AutoTokenizer, CLIPTextModel

        return self._load(AutoTokenizer, "tokenizer"), self._load_model(CLIPTextModel, "text_encoder")

    def _load_model(self, model_class: Any, name: str) -> Any:
        model, loaded = self._load(model_class, name, dtype="auto", output_loading_info=True)
        # What a file lacks transformers fills with random weights.
        for kind in ("missing", "mismatched", "unexpected"):
            for key in sorted(map(str, loaded.get(f"{kind}_keys", ()))):
                problem = f"{self._folder / name} has not the weights of its model: {key} is {kind}"
                raise ConfigError(_FLAG, problem, _CURE)
        return model.to(self._device).eval()

    def _load(self, loaded_class: Any, name: str, **arguments: Any) -> Any:
        path = self._folder / name
        try:
            return loaded_class.from_pretrained(os.fspath(path), local_files_only=True, **arguments)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise ConfigError(_FLAG, f"{path} cannot be loaded ({error})", _CURE) from error


def _fingerprint(folder: pathlib.Path, text_length: int, cache_folder: str) -> str:
    """Of names and content of all files used, and of what computes with them."""
    parts = ("vae", *_TEXT_ENCODERS, "tokenizer", "tokenizer_2")
    try:
        files = [path for part in parts for path in sorted((folder / part).rglob("*")) if path.is_file()]

        def read() -> str:
            digest = hashlib.blake2b(digest_size=16)
            for path in files:
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, hashlib.blake2b).hexdigest()
                digest.update(repr((os.fspath(path.relative_to(folder)), content)).encode())
            return digest.hexdigest()

        content = stamp_of(files, reading=("encoders", 1)).remembered(cache_folder, read)
    except OSError as error:
        raise ConfigError(_FLAG, f"{folder} cannot be read ({error})", _CURE) from error
    version = importlib.metadata.version("transformers")
    return hashlib.blake2b(repr(("release", 2, content, version, text_length)).encode(), digest_size=16).hexdigest()
