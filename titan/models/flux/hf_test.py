"""FLUX.1 against Diffusers: the same function of the same weights, which pass through folders in both directions."""

import dataclasses
import inspect
import json

import pytest
import torch
from diffusers import FluxTransformer2DModel

from titan.models.flux import hf
from titan.models.flux.config import FluxConfig, flux_dev, flux_schnell
from titan.models.flux.rows_for_test import CONFIG, build, patch_positions
from titan.models.hf.folder import HfCheckpointError

# Both sum in float32, in another order.
ABSOLUTE, RELATIVE = 1e-4, 1e-4


def _theirs(config: FluxConfig) -> FluxTransformer2DModel:
    """Diffusers' model of these hyperparameters, with random weights."""
    arguments = {key: value for key, value in hf.to_hf_config(config).items() if key != "_class_name"}
    model = FluxTransformer2DModel(**arguments)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def _inputs(config: FluxConfig, rows: int, columns: int):
    """Two images of one shape, as Diffusers and as the model here take them."""
    generator = torch.Generator().manual_seed(1)
    noised = torch.randn(2, rows * columns, config.in_channels, generator=generator)
    text = torch.randn(2, config.text_length, config.text_dim, generator=generator)
    pooled = torch.randn(2, config.pooled_dim, generator=generator)
    timestep, guidance = torch.tensor([0.25, 0.9]), torch.tensor([1.0, 3.5])
    positions = patch_positions(rows=rows, columns=columns)
    theirs = {
        "hidden_states": noised,
        "encoder_hidden_states": text,
        "pooled_projections": pooled,
        "timestep": timestep,
        "img_ids": positions.float(),
        "txt_ids": torch.zeros(config.text_length, 3),
        "guidance": guidance if config.guidance_embedding else None,
        "return_dict": False,
    }
    ours = (
        noised,
        timestep.unsqueeze(1),
        positions.expand(2, -1, -1),
        torch.ones(noised.shape[:2], dtype=torch.int32),
        text,
        torch.ones(text.shape[:2], dtype=torch.int32),
        pooled.unsqueeze(1),
        guidance.unsqueeze(1) if config.guidance_embedding else None,
    )
    return theirs, ours


@pytest.mark.parametrize("guidance", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_predictions_and_gradients_are_those_of_diffusers(tmp_path, guidance, split):
    config = dataclasses.replace(CONFIG, guidance_embedding=guidance, split_projection=split, attention="sdpa")
    theirs = _theirs(config)
    theirs.save_pretrained(tmp_path / "theirs")
    model = config.components().build()
    weights = hf.load_hf(str(tmp_path / "theirs"), config)
    model.load_state_dict({name: weight.requires_grad_() for name, weight in weights.items()}, assign=True)
    their_inputs, our_inputs = _inputs(config, 4, 6)

    expected, got = theirs(**their_inputs)[0], model(*our_inputs)
    assert expected.std() > 0.1  # a prediction that depends on nothing would be equal too
    torch.testing.assert_close(got, expected, atol=ABSOLUTE, rtol=0)

    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    expected.backward(cotangent)
    got.backward(cotangent)
    their_gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for fqn, parameter in model.named_parameters():
        parts = hf.parts_of(config)(fqn, parameter.grad)
        for name, part in parts.items():
            reference = their_gradients.pop(name)
            assert (part - reference).norm() <= RELATIVE * reference.norm(), name
    assert not their_gradients


@pytest.mark.parametrize("split", [True, False])
def test_diffusers_reads_what_is_written_and_it_comes_back_bit_for_bit(tmp_path, split):
    config = dataclasses.replace(CONFIG, split_projection=split, guidance_embedding=True)
    model = build(config)
    # A small limit makes several shards of it.
    hf.save_hf(model.state_dict(), config, str(tmp_path), max_shard_bytes=200_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1

    theirs = FluxTransformer2DModel.from_pretrained(tmp_path)
    their_inputs, our_inputs = _inputs(config, 3, 5)
    with torch.no_grad():
        torch.testing.assert_close(model(*our_inputs), theirs(**their_inputs)[0], atol=ABSOLUTE, rtol=0)

    saved = hf.config_from_hf(str(tmp_path))
    assert saved.weight_fields() == config.weight_fields()
    back = hf.load_hf(str(tmp_path), config)
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("size, parameters", [(flux_dev, 11_901_408_320), (flux_schnell, 11_891_178_560)])
def test_published_sizes_have_the_parameters_of_diffusers(size, parameters):
    config = size()
    config.validate()
    ours = config.components().build()
    assert sum(parameter.numel() for parameter in ours.parameters()) == parameters
    arguments = {key: value for key, value in hf.to_hf_config(config).items() if key != "_class_name"}
    with torch.device("meta"):
        theirs = FluxTransformer2DModel(**arguments)
    parts = hf.parts_of(config)
    shapes = {n: p.shape for fqn, meta in ours.named_parameters() for n, p in parts(fqn, meta).items()}
    assert shapes == {name: parameter.shape for name, parameter in theirs.named_parameters()}


@pytest.mark.parametrize("size", [flux_dev, flux_schnell])
def test_keys_that_the_first_releases_lack_are_as_in_diffusers(tmp_path, size):
    config = size()
    left_out = {"axes_dims_rope", "out_channels"} | (set() if config.guidance_embedding else {"guidance_embeds"})
    content = {key: value for key, value in hf.to_hf_config(config).items() if key not in left_out}
    (tmp_path / "config.json").write_text(json.dumps({**content, "_diffusers_version": "0.30.0.dev0"}))
    assert hf.config_from_hf(str(tmp_path)).weight_fields() == config.weight_fields()
    defaults = {name: p.default for name, p in inspect.signature(FluxTransformer2DModel.__init__).parameters.items()}
    assert (defaults["axes_dims_rope"], defaults["guidance_embeds"]) == (config.rope_dims, False)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"_class_name": "SD3Transformer2DModel"}, "_class_name is 'SD3Transformer2DModel', a FLUX.1 transformer has"),
        ({"out_channels": 128}, "out_channels is 128, in_channels 16; give a model that predicts what it is given"),
        ({"num_layers": None}, "the key 'num_layers' is missing; give a complete config.json"),
    ],
)
def test_other_models_are_refused(tmp_path, change, message):
    content = {**hf.to_hf_config(CONFIG), **change}
    content = {key: value for key, value in content.items() if key not in change or value is not None}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(HfCheckpointError, match=message):
        hf.config_from_hf(str(tmp_path))


def test_weights_of_another_size_are_refused(tmp_path):
    hf.save_hf(build(CONFIG).state_dict(), CONFIG, str(tmp_path))
    with pytest.raises(HfCheckpointError, match="unexpected .*give the weights of this model"):
        hf.load_hf(str(tmp_path), dataclasses.replace(CONFIG, num_single_blocks=1))
