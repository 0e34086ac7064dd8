"""Muse Glimmer's folders: weights bit for bit in both directions, hyperparameters, and what is refused."""

import dataclasses
import json

import pytest
import torch
from safetensors import safe_open

from titan.models.decoder_for_test import build
from titan.models.hf.folder import HfCheckpointError
from titan.models.muse_glimmer import hf
from titan.models.muse_glimmer.config import MUSE_GLIMMER_SIZES, MuseGlimmerConfig

SMALL = MuseGlimmerConfig(
    vocab_size=97, dim=32, num_layers=4, num_heads=4, num_kv_heads=1, head_dim=12, ffn_dim=48, query_scale=3.0
)


def state_dict() -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in build(SMALL, torch.bfloat16).named_parameters()}


@pytest.mark.parametrize("max_shard_bytes", [1 << 40, 10_000], ids=["one_shard", "shards"])
def test_export_and_reimport_is_bit_identical(max_shard_bytes, tmp_path):
    hf.save_hf(state_dict(), SMALL, str(tmp_path), max_shard_bytes=max_shard_bytes)
    loaded = hf.load_hf(str(tmp_path), SMALL)
    assert list(loaded) == list(state_dict())
    for fqn, tensor in state_dict().items():
        assert loaded[fqn].dtype == torch.bfloat16
        assert torch.equal(loaded[fqn].view(torch.int16), tensor.view(torch.int16)), fqn
    assert hf.config_from_hf(str(tmp_path)) == SMALL
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_bytes == 10_000)


@pytest.mark.parametrize("size", MUSE_GLIMMER_SIZES)
def test_config_json_holds_all_that_belongs_to_the_weights(size, tmp_path):
    config = MUSE_GLIMMER_SIZES[size]()
    (tmp_path / "config.json").write_text(json.dumps(hf.to_hf_config(config)))
    assert hf.config_from_hf(str(tmp_path)).weight_fields() == config.weight_fields()


def test_tensors_have_names_of_their_own_in_the_file(tmp_path):
    hf.save_hf(state_dict(), SMALL, str(tmp_path))
    (file,) = tmp_path.glob("*.safetensors")
    with safe_open(file, framework="pt") as tensors:
        names = set(tensors.keys())
    assert {name for name in names if ".layers." not in name} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    }
    assert {name.removeprefix("model.layers.3.") for name in names if ".layers.3." in name} == {
        *(f"self_attn.{name}_proj.weight" for name in ("q", "k", "v", "o", "o_gate")),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        "input_layernorm.weight",
        "attention_output_layernorm.weight",
        "post_attention_layernorm.weight",
        "mlp_output_layernorm.weight",
    }


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("model_type", "llama", "model_type is 'llama', a Muse Glimmer has 'muse_glimmer'; give a Muse Glimmer folder"),
        ("tie_word_embeddings", True, "tie_word_embeddings is True, a Muse Glimmer has False"),
        ("rope_interleave", False, "rope_interleave is False, a Muse Glimmer has True"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "RoPE scaling 'yarn' is not supported"),
        ("sliding_window", None, "the key 'sliding_window' is missing"),
    ],
)
def test_a_config_of_another_model_is_refused(key, value, message, tmp_path):
    hf.save_hf(state_dict(), SMALL, str(tmp_path))
    path = tmp_path / "config.json"
    content = {**json.loads(path.read_text()), key: value}
    if value is None:
        del content[key]
    path.write_text(json.dumps(content))
    with pytest.raises(HfCheckpointError, match=f"{path}: {message}") as error:
        hf.config_from_hf(str(tmp_path))
    assert "\n" not in str(error.value)


def test_weights_of_another_shape_are_refused(tmp_path):
    hf.save_hf(state_dict(), SMALL, str(tmp_path))
    with pytest.raises(HfCheckpointError, match=r"o_gate_proj.weight|[qkvo]_proj.weight has shape"):
        hf.load_hf(str(tmp_path), dataclasses.replace(SMALL, head_dim=14))
