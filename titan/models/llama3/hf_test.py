"""The Llama 3 of titan against that of transformers: logits, gradients, and folders in both directions."""

import dataclasses
import json
import os

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from titan.models.hf.decoder import hf_tensors
from titan.models.hf.folder import HfCheckpointError
from titan.models.llama3 import hf
from titan.models.llama3.config import Llama3Config

PLAIN = Llama3Config(
    vocab_size=97, dim=64, num_layers=3, num_heads=8, num_kv_heads=2, ffn_dim=96, max_sequence_length=128
)
# The original length is short, so that in 48 tokens all three kinds of wavelength occur: kept, stretched, in between.
SCALED = dataclasses.replace(
    PLAIN, rope_scaling="llama3", rope_theta=10000.0, rope_original_max_length=64, head_dim=16, attention="sdpa"
)
TIED = dataclasses.replace(PLAIN, tie_embeddings=True, num_kv_heads=8)
LENGTHS = (19, 1, 28)  # documents in one row of 48 tokens


def random_state_dict(config: Llama3Config, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        fqn: (torch.randn(parameter.shape, generator=generator) * 0.2 + float(parameter.dim() == 1)).to(dtype)
        for fqn, parameter in config.components().build().named_parameters()
    }


def build(config: Llama3Config, state_dict: dict[str, torch.Tensor]) -> torch.nn.Module:
    model = config.components().build()
    model.load_state_dict(state_dict, assign=True)
    return model


def hf_model(folder: str) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager")


def packed_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and segment ids [2, 48]: one row of three documents, one of a single document."""
    tokens = torch.randint(0, PLAIN.vocab_size, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(2))
    positions = torch.stack((torch.cat([torch.arange(n) for n in LENGTHS]), torch.arange(sum(LENGTHS))))
    segment_ids = torch.ones_like(tokens)
    segment_ids[0] = torch.repeat_interleave(torch.tensor([1, 2, 3]), torch.tensor(LENGTHS))
    return tokens, positions, segment_ids


def documents(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [*tensor[0].split(LENGTHS), tensor[1]]


@pytest.mark.parametrize("config", [PLAIN, SCALED, TIED], ids=["plain", "scaled_sdpa", "tied"])
def test_logits_and_gradients_of_a_packed_batch_equal_those_of_each_document_alone(config, tmp_path):
    hf.save_hf(random_state_dict(config), config, str(tmp_path))
    theirs = hf_model(str(tmp_path))
    ours = build(config, random_state_dict(config))
    tokens, positions, segment_ids = packed_batch()
    labels = torch.cat((tokens[:, 1:], tokens[:, :1]), dim=1)
    labels[:, ::5] = -100
    logits = ours(tokens, positions, segment_ids)
    their_logits = [theirs(document.unsqueeze(0)).logits[0] for document in documents(tokens)]
    for got, expected in zip(documents(logits), their_logits, strict=True):
        assert (got - expected).abs().max() <= 1e-4
        assert expected.abs().max() > 1  # else the bound above says little

    loss = ours.loss(tokens, labels, positions, segment_ids)
    loss.backward()
    their_loss = torch.nn.functional.cross_entropy(
        torch.cat(their_logits), torch.cat(documents(labels)), reduction="sum"
    )
    their_loss.backward()
    torch.testing.assert_close(loss, their_loss, rtol=1e-6, atol=0)
    their_parameters = dict(theirs.named_parameters())
    for fqn, parameter in ours.named_parameters():
        (name,) = hf_tensors(fqn, parameter)
        expected = their_parameters.pop(name).grad
        difference = (parameter.grad - expected).norm() / expected.norm()
        assert difference < 1e-5, f"{fqn}: relative difference {difference}"
    assert not their_parameters


@pytest.mark.parametrize("config", [PLAIN, SCALED, TIED], ids=["plain", "scaled", "tied"])
@pytest.mark.parametrize("max_shard_bytes", [1 << 40, 60_000], ids=["one_shard", "shards"])
def test_export_and_reimport_is_bit_identical(config, max_shard_bytes, tmp_path):
    state_dict = random_state_dict(config, torch.bfloat16)
    hf.save_hf(state_dict, config, str(tmp_path), max_shard_bytes=max_shard_bytes)
    loaded = hf.load_hf(str(tmp_path), config)
    assert list(loaded) == list(state_dict)
    for fqn, tensor in state_dict.items():
        assert loaded[fqn].dtype == torch.bfloat16
        assert torch.equal(loaded[fqn].view(torch.int16), tensor.view(torch.int16)), fqn
    assert hf.config_from_hf(str(tmp_path)) == dataclasses.replace(config, attention="math")
    assert hf_model(str(tmp_path)).dtype == torch.bfloat16

    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert (len(files) > 2) == (max_shard_bytes == 60_000)
    assert files == {name for name in os.listdir(tmp_path) if name.endswith(".safetensors")}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state_dict.values())


@pytest.mark.parametrize("config", [PLAIN, SCALED, TIED], ids=["plain", "scaled", "tied"])
def test_reads_a_folder_written_by_transformers(config, tmp_path):
    hf.save_hf(random_state_dict(config), config, str(tmp_path / "ours"))
    hf_model(str(tmp_path / "ours")).save_pretrained(tmp_path / "theirs")
    assert "rope_parameters" in json.loads((tmp_path / "theirs" / "config.json").read_text())  # the style of version 5
    assert hf.config_from_hf(str(tmp_path / "theirs")) == dataclasses.replace(config, attention="math")
    loaded = hf.load_hf(str(tmp_path / "theirs"), config)
    for fqn, tensor in random_state_dict(config).items():
        assert torch.equal(loaded[fqn], tensor), fqn


def saved_single(folder, config=PLAIN, **changes: torch.Tensor | None) -> str:
    """A folder with one safetensors file, in which some tensors are replaced, added, or (None) left out."""
    state_dict = random_state_dict(config)
    tensors = {name: part for fqn, tensor in state_dict.items() for name, part in hf_tensors(fqn, tensor).items()}
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model__norm__weight": None}, "tensor model.norm.weight is missing; "),
        ({"extra__bias": torch.ones(3)}, "tensor extra.bias is unexpected; "),
        ({"model__norm__weight": torch.ones(63)}, r"tensor model.norm.weight has shape \[63\], expected \[64\]; "),
        ({"model__norm__weight": torch.ones(64, dtype=torch.int8)}, "tensor model.norm.weight is torch.int8; "),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_with_its_file(changes, message, tmp_path):
    folder = saved_single(tmp_path, **changes)
    with pytest.raises(HfCheckpointError, match=f"^{tmp_path}/model.safetensors: {message}") as error:
        hf.load_hf(folder, PLAIN)
    assert "\n" not in str(error.value)


def test_a_tied_model_takes_a_repeated_head_but_no_other(tmp_path):
    embedding = random_state_dict(TIED)["embedding.weight"]
    folder = saved_single(tmp_path, TIED, lm_head__weight=embedding.clone())
    assert torch.equal(hf.load_hf(folder, TIED)["embedding.weight"], embedding)
    saved_single(tmp_path, TIED, lm_head__weight=embedding + 1)
    with pytest.raises(HfCheckpointError, match="lm_head.weight differs .*tie_embeddings=false"):
        hf.load_hf(folder, TIED)


def test_damaged_folders_are_named(tmp_path):
    def check(message: str) -> None:
        with pytest.raises(HfCheckpointError, match=message) as error:
            hf.load_hf(str(tmp_path), PLAIN)
        assert "\n" not in str(error.value)

    check("neither model.safetensors.index.json nor model.safetensors")
    hf.save_hf(random_state_dict(PLAIN), PLAIN, str(tmp_path), max_shard_bytes=60_000)
    with pytest.raises(HfCheckpointError, match="model-00001.*there are weights already; give an empty folder"):
        hf.save_hf(random_state_dict(PLAIN), PLAIN, str(tmp_path))

    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    tensors, whole = load_file(shard), shard.read_bytes()
    name = min(tensors)
    save_file({**{k: v for k, v in tensors.items() if k != name}}, shard)
    check(f"{shard.name}: tensor {name} is missing")
    shard.write_bytes(whole[:-100])
    check(f"{shard.name}: cannot be read as safetensors")
    shard.unlink()
    check(f"{shard.name}: there is no such file, but the index names it")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../x.safetensors"}}))
    check("index.json: model.norm.weight is in '../x.safetensors', which is not a file name")
    index.write_text("{")
    check("index.json: cannot be read as JSON")


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("model_type", "mistral", "model_type is 'mistral', a Llama 3 has 'llama'"),
        ("attention_bias", True, "attention_bias is True"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}, "RoPE scaling 'yarn' is not supported"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 2.0}, "the key 'low_freq_factor' is missing"),
        ("hidden_size", None, "the key 'hidden_size' is missing"),
    ],
)
def test_a_config_of_another_model_is_refused(key, value, message, tmp_path):
    hf.save_hf(random_state_dict(PLAIN), PLAIN, str(tmp_path))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config[key] = value
    if value is None:
        del config[key]
    path.write_text(json.dumps(config))
    with pytest.raises(HfCheckpointError, match=f"{path}: {message}"):
        hf.config_from_hf(str(tmp_path))


def test_an_incomplete_state_dict_is_not_saved(tmp_path):
    state_dict = random_state_dict(PLAIN)
    del state_dict["layers.1.attention.wq.weight"]
    with pytest.raises(HfCheckpointError, match="state dict: tensor layers.1.attention.wq.weight is missing"):
        hf.save_hf(state_dict, PLAIN, str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_rope_scaling_of_a_published_size_equals_that_of_transformers():
    from titan.models.llama3.config import llama3_8b

    config = llama3_8b()
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
        transformers.LlamaConfig(**hf.to_hf_config(config))
    )
    ours = config.components().rope.build()._frequencies(torch.device("cpu"))
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6, atol=0)
