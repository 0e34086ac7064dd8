"""The encoders of a release, against Diffusers and transformers on a small release with random weights."""

import dataclasses
import hashlib
import json
import re
import shutil

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from titan.core.config.validate import ConfigError
from titan.core.data import file_stamp
from titan.models.flux.config import FluxConfig
from titan.train.images.release_encoders import ReleaseEncoders

WORDS = ["<pad>", "</s>", "<s>", "a", "red", "blue", "house", "<unk>"]
MODEL = FluxConfig(text_dim=16, pooled_dim=12, in_channels=64, text_length=6)


def _tokenizer(folder, template):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 2), ("</s>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    folder = tmp_path_factory.mktemp("release")
    torch.manual_seed(0)
    t5 = T5EncoderModel(T5Config(vocab_size=8, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4))
    clip = CLIPTextModel(
        CLIPTextConfig(
            **{"vocab_size": 8, "hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "max_position_embeddings": 5},
            **{"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
        )
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=16,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=0.3611,
        shift_factor=0.1159,
    )
    for name, part in (("text_encoder_2", t5), ("text_encoder", clip), ("vae", vae)):
        part.save_pretrained(folder / name)
    _tokenizer(folder / "tokenizer_2", "$A </s>")
    _tokenizer(folder / "tokenizer", "<s> $A </s>")
    return folder, t5.eval(), clip.eval(), vae.eval()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def _encoders(folder, model=MODEL):
    return ReleaseEncoders(str(folder), model, cache_folder="cache")


def test_captions_are_those_of_transformers_without_padding(release):
    folder, t5, clip, _ = release
    short, long = _encoders(folder).encode_captions(["a red house", "blue house " * 9])
    with torch.no_grad():
        expected = t5(torch.tensor([[3, 4, 6, 1, 0, 0]]), attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0]]))[0][0, :4]
        pooled = clip(torch.tensor([[2, 3, 4, 6, 1]])).pooler_output[0]
        cut = t5(torch.tensor([[5, 6, 5, 6, 5, 1]]))[0][0]
        cut_pooled = clip(torch.tensor([[2, 5, 6, 5, 1]])).pooler_output[0]
    # The padded form adds masked terms of exactly 0; the rest is rounding.
    np.testing.assert_allclose(short.tokens, expected.numpy(), atol=1e-5)
    np.testing.assert_allclose(short.pooled, pooled.numpy(), atol=1e-5)
    np.testing.assert_allclose(long.tokens, cut.numpy(), atol=1e-5)
    np.testing.assert_allclose(long.pooled, cut_pooled.numpy(), atol=1e-5)


def test_images_are_those_of_diffusers(release):
    from diffusers.pipelines.flux.pipeline_flux import FluxPipeline

    folder, _, _, vae = release
    pixels = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    encoders = _encoders(folder)
    tokens = encoders.encode_image(pixels)
    with torch.no_grad():
        signal = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 127.5 - 1
        latents = (vae.encode(signal).latent_dist.mode() - 0.1159) * 0.3611
        expected = FluxPipeline._pack_latents(latents, 1, 16, 4, 6)[0]
        decoded = vae.decode(latents / 0.3611 + 0.1159).sample[0].permute(1, 2, 0)
    np.testing.assert_allclose(tokens, expected.numpy(), atol=1e-5)
    got = encoders.decode_image(tokens, rows=2, columns=3).astype(int)
    assert np.abs(got - ((decoded.clamp(-1, 1) + 1) * 127.5).numpy()).max() <= 0.51  # rounded to whole numbers


def test_a_wrong_folder_is_one_line(release, tmp_path):
    folder, *_ = release

    def message(path, model=MODEL):
        with pytest.raises(ConfigError) as error:
            _encoders(path, model)
        return str(error.value)

    cure = "give the folder of a FLUX.1 release in Diffusers' layout"
    assert message(tmp_path) == f"--data.encoders: {tmp_path} has no folder tokenizer; {cure}"
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert message(copy, dataclasses.replace(MODEL, text_dim=4096)) == (
        f"--model.text_dim: 4096 is not the width 16 of the T5 in {copy}; give --model.text_dim=16"
    )
    config = copy / "text_encoder_2/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "bert"}))
    assert message(copy) == f"--data.encoders: {config} describes no T5, but a 'bert'; {cure}"
    config.unlink()
    assert message(copy).startswith(f"--data.encoders: {config} cannot be read (")
    shutil.copytree(folder / "text_encoder_2", copy / "text_encoder_2", dirs_exist_ok=True)
    (copy / "vae/config.json").unlink()
    assert message(copy).startswith("--data.encoders: ")


@pytest.mark.parametrize("name", ["text_encoder", "text_encoder_2"])
@pytest.mark.parametrize("kind", ["missing", "unexpected", "mismatched", "cut off"])
def test_weights_that_are_not_the_text_encoders_are_refused(release, tmp_path, name, kind):
    folder, *_ = release
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    file = copy / name / "model.safetensors"
    weights = load_file(file)
    key = next(key for key in weights if key.endswith(".weight"))
    if kind == "missing":
        del weights[key]
    elif kind == "unexpected":
        weights["other.weight"] = torch.ones(2)
    else:
        weights[key] = torch.ones(3, 5, 7)
    save_file(weights, file, metadata={"format": "pt"})
    if kind == "cut off":
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError) as error:
        _encoders(copy).encode_captions(["a"])
    said = (
        f"has not the weights of its model: .*weight is {kind}; give the"
        if kind in ("missing", "unexpected")
        else "cannot"
    )
    assert re.fullmatch(f"--data.encoders: {copy / name} {said}.*", str(error.value))


def test_the_fingerprint_follows_the_weights(release, tmp_path):
    folder, *_ = release
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    first = _encoders(folder).fingerprint
    assert _encoders(copy).fingerprint == first
    assert _encoders(copy, dataclasses.replace(MODEL, text_length=5)).fingerprint != first
    file = copy / "text_encoder_2/model.safetensors"
    changed = bytearray(file.read_bytes())
    changed[len(changed) // 2] ^= 1
    file.write_bytes(changed)
    assert _encoders(copy).fingerprint != first


def test_weights_are_read_once_for_the_fingerprint(release, monkeypatch):
    folder, *_ = release
    monkeypatch.setattr(file_stamp, "_CLOCK_TICK_NANOSECONDS", 0)
    first = _encoders(folder).fingerprint
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    assert _encoders(folder).fingerprint == first
