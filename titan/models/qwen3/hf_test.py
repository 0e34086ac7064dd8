"""The Qwen3 of titan against that of transformers: logits, gradients, and folders in both directions."""

import dataclasses
import json

import pytest
import torch
import transformers
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from titan.models.hf.decoder import hf_tensors
from titan.models.hf.folder import HfCheckpointError
from titan.models.qwen3 import hf
from titan.models.qwen3.config import QWEN3_SIZES, Qwen3CommonConfig, Qwen3Config, Qwen3MoeConfig

DENSE = Qwen3Config(
    vocab_size=97, dim=64, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=16, ffn_dim=96, max_sequence_length=128
)
TIED = dataclasses.replace(DENSE, tie_embeddings=True, num_kv_heads=8, head_dim=8, attention="sdpa")
MOE = Qwen3MoeConfig(
    vocab_size=97,
    dim=64,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    num_experts=7,
    num_active_experts=3,
    expert_ffn_dim=40,
    max_sequence_length=128,
)
MOE_RAW = dataclasses.replace(MOE, normalize_expert_weights=False, num_experts=1, num_active_experts=1)
ALL = {"dense": DENSE, "tied_sdpa": TIED, "moe": MOE, "moe_raw_weights": MOE_RAW}
LENGTHS = (19, 1, 28)  # documents in one row of 48 tokens


def random_state_dict(config: Qwen3CommonConfig, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        fqn: (torch.randn(parameter.shape, generator=generator) * 0.2 + float(parameter.dim() == 1)).to(dtype)
        for fqn, parameter in config.components().build().named_parameters()
    }


def build(config: Qwen3CommonConfig, state_dict: dict[str, torch.Tensor]) -> torch.nn.Module:
    model = config.components().build()
    model.load_state_dict(state_dict, assign=True)
    return model


def hf_model(folder: object) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")


def packed_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and segment ids [2, 48]: one row of three documents, one of a single document."""
    tokens = torch.randint(0, DENSE.vocab_size, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(2))
    positions = torch.stack((torch.cat([torch.arange(n) for n in LENGTHS]), torch.arange(sum(LENGTHS))))
    segment_ids = torch.ones_like(tokens)
    segment_ids[0] = torch.repeat_interleave(torch.tensor([1, 2, 3]), torch.tensor(LENGTHS))
    return tokens, positions, segment_ids


def documents(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [*tensor[0].split(LENGTHS), tensor[1]]


def their_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By the names that tensors have in files; in memory transformers keeps all experts of a layer in two tensors."""
    gradients = {}
    for name, parameter in model.named_parameters():
        layer, is_experts, kind = name.partition(".experts.")
        if not is_experts:
            gradients[name] = parameter.grad
            continue
        for index, grad in enumerate(parameter.grad):
            parts = {"gate_proj": grad.chunk(2)[0], "up_proj": grad.chunk(2)[1]} if "gate" in kind else {kind: grad}
            gradients |= {f"{layer}.experts.{index}.{part}.weight": value for part, value in parts.items()}
    return gradients


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
def test_logits_and_gradients_of_a_packed_batch_equal_those_of_each_document_alone(config, tmp_path):
    hf.save_hf(random_state_dict(config), config, str(tmp_path))
    theirs = hf_model(tmp_path)
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
    expected_gradients = their_gradients(theirs)
    for fqn, parameter in ours.named_parameters():
        gradients = hf_tensors(fqn, parameter.grad)
        expected = torch.stack([expected_gradients.pop(name) for name in gradients])
        error = (torch.stack(list(gradients.values())) - expected).norm()
        if fqn.endswith("router.weight") and config.num_experts == 1:  # a choice of one: always with probability 1
            assert error == expected.norm() == 0
        else:
            assert error / expected.norm() < 1e-5, f"{fqn}: relative difference {error / expected.norm()}"
    assert not expected_gradients


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
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
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_bytes == 60_000)


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
def test_reads_a_folder_written_by_transformers(config, tmp_path):
    hf.save_hf(random_state_dict(config), config, str(tmp_path / "ours"))
    hf_model(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    assert hf.config_from_hf(str(tmp_path / "theirs")) == dataclasses.replace(config, attention="math")
    loaded = hf.load_hf(str(tmp_path / "theirs"), config)
    for fqn, tensor in random_state_dict(config).items():
        assert torch.equal(loaded[fqn], tensor), fqn


def test_experts_have_the_names_of_published_files(tmp_path):
    hf.save_hf(random_state_dict(MOE), MOE, str(tmp_path))
    (file,) = tmp_path.glob("*.safetensors")
    with safe_open(file, framework="pt") as tensors:
        shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}
    layer = {name.removeprefix("model.layers.2.mlp."): s for name, s in shapes.items() if ".layers.2.mlp" in name}
    experts = {
        f"experts.{index}.{name}_proj.weight": shape
        for index in range(7)
        for name, shape in (("gate", [40, 64]), ("up", [40, 64]), ("down", [64, 40]))
    }
    assert layer == {"gate.weight": [7, 64], **experts}


def test_an_expert_that_does_not_fit_is_named(tmp_path):
    hf.save_hf(random_state_dict(MOE), MOE, str(tmp_path))
    with pytest.raises(HfCheckpointError, match=r"layers.0.mlp.experts.7.down_proj.weight is missing \(and"):
        hf.load_hf(str(tmp_path), dataclasses.replace(MOE, num_experts=8))
    wider = dataclasses.replace(MOE, expert_ffn_dim=41)
    with pytest.raises(HfCheckpointError, match=r"experts.\d.\w+_proj.weight has shape .*40.*, expected .*41"):
        hf.load_hf(str(tmp_path), wider)


@pytest.mark.parametrize(
    "config, key, value, message",
    [
        (
            DENSE,
            "model_type",
            "llama",
            "model_type is 'llama', a Qwen3 has 'qwen3' or 'qwen3_moe'; give a Qwen3 folder",
        ),
        (DENSE, "attention_bias", True, "attention_bias is True, a Qwen3 has False"),
        (DENSE, "use_sliding_window", True, "use_sliding_window is True"),
        (DENSE, "rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "RoPE scaling 'yarn' is not supported"),
        (DENSE, "head_dim", None, "the key 'head_dim' is missing"),
        (MOE, "mlp_only_layers", [1], r"mlp_only_layers is \[1\]"),
        (MOE, "decoder_sparse_step", 2, "decoder_sparse_step is 2"),
        (MOE, "num_experts", None, "the key 'num_experts' is missing"),
    ],
)
def test_a_config_of_another_model_is_refused(config, key, value, message, tmp_path):
    hf.save_hf(random_state_dict(config), config, str(tmp_path))
    path = tmp_path / "config.json"
    content = {**json.loads(path.read_text()), key: value}
    if value is None:
        del content[key]
    path.write_text(json.dumps(content))
    with pytest.raises(HfCheckpointError, match=f"{path}: {message}") as error:
        hf.config_from_hf(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", QWEN3_SIZES)
def test_published_sizes_have_the_parameters_of_transformers(size):
    config = QWEN3_SIZES[size]()
    hf_config = hf.to_hf_config(config)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**hf_config))
    ours = config.components().build()
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
