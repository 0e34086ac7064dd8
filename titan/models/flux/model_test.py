"""FLUX.1: its flags change no result, rows of several images with padding are those images, the loss, the FLOPs."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from titan.core.config.validate import ConfigError
from titan.core.init import Zeros, init_plan
from titan.models.flux import hf
from titan.models.flux.config import FluxConfig, flux_dev
from titan.models.flux.embedders import sinusoid
from titan.models.flux.patches import patchify, unpatchify
from titan.models.flux.rows_for_test import CONFIG, build, image, packed

REWRITES = [{"split_projection": False}, {"rope": "matrix"}, {"qkv_unpack": "permute"}, {"attention": "sdpa"}]


def _loss_and_gradients(config: FluxConfig, weights, batch):
    """The loss, and its gradients under the names of Diffusers, which do not depend on the flags."""
    model = config.components().build()
    model.load_state_dict({name: weight.clone().requires_grad_() for name, weight in weights.items()}, assign=True)
    loss = model.loss(*batch.values())
    loss.backward()
    parts = hf.parts_of(config)
    return loss.detach(), {n: g for fqn, p in model.named_parameters() for n, g in parts(fqn, p.grad).items()}


def _converted(weights, config: FluxConfig, tmp_path):
    """The same weights for a model with other flags."""
    hf.save_hf(weights, CONFIG, str(tmp_path))
    return hf.load_hf(str(tmp_path), config)


@pytest.mark.parametrize("change", REWRITES, ids=lambda change: next(iter(change)))
def test_each_rewrite_changes_no_result(tmp_path, change):
    config, weights = dataclasses.replace(CONFIG, **change), build(CONFIG).state_dict()
    batch = image(CONFIG, 4, 5, text_length=7, seed=1)
    loss, gradients = _loss_and_gradients(CONFIG, weights, batch)
    other_loss, other_gradients = _loss_and_gradients(config, _converted(weights, config, tmp_path), batch)
    # Float32 sums in another order; what is only a matter of layout is the same to the last bit or two.
    torch.testing.assert_close(other_loss, loss, rtol=1e-6, atol=0)
    assert gradients.keys() == other_gradients.keys()
    for name, gradient in gradients.items():
        assert (other_gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_a_packed_row_is_its_images_and_padding_counts_for_nothing():
    config = dataclasses.replace(CONFIG, guidance_embedding=True)
    weights = build(config).state_dict()
    images = [
        image(config, rows, columns, text_length=text_length, seed=seed)
        for seed, (rows, columns, text_length) in enumerate([(4, 6, 7), (3, 3, 2), (2, 7, 5)])
    ]
    separate = [_loss_and_gradients(config, weights, batch) for batch in images]
    loss, gradients = _loss_and_gradients(config, weights, packed(images, image_padding=5, text_padding=3))
    # Sums of masked softmaxes and of three gradients, in another order.
    torch.testing.assert_close(loss, sum(loss for loss, _ in separate), rtol=1e-5, atol=0)
    for name, gradient in gradients.items():
        expected = sum(gradients[name] for _, gradients in separate)
        assert (gradient - expected).norm() <= 1e-4 * expected.norm(), name


@pytest.mark.parametrize("room", [1, 2])
def test_a_row_may_have_fewer_images_than_it_has_room_for(room):
    weights = build(CONFIG).state_dict()
    alone = image(CONFIG, 3, 4, text_length=7, seed=3)
    roomy = packed([alone], image_padding=2, text_padding=1)
    roomy["pooled"] = torch.cat((roomy["pooled"], *[torch.full_like(roomy["pooled"], 9.0)] * (room - 1)), dim=1)
    expected, _ = _loss_and_gradients(CONFIG, weights, alone)
    torch.testing.assert_close(_loss_and_gradients(CONFIG, weights, roomy)[0], expected, rtol=1e-5, atol=0)


def test_the_loss_is_the_error_of_the_velocity():
    model, batch = build(CONFIG), image(CONFIG, 3, 4, text_length=7, seed=4)
    t = batch["timestep"][..., None]
    noised = (1 - t) * batch["latents"] + t * batch["noise"]
    rest = [value for name, value in batch.items() if name not in ("latents", "noise", "timestep")]
    error = model(noised, batch["timestep"][:, :1], *rest) - (batch["noise"] - batch["latents"])
    torch.testing.assert_close(model.loss(*batch.values()), error.square().mean(-1).sum())


def test_at_its_beginning_the_model_predicts_zero():
    model = CONFIG.components().build()
    plan = init_plan(model)
    zeros = {name for name, init in plan.items() if init == Zeros()}
    assert {
        name for name in plan if "modulation" in name or name.startswith("head.") or name.endswith(".bias")
    } == zeros
    weights = build(CONFIG).state_dict()
    weights = {name: torch.zeros_like(weight) if name in zeros else weight for name, weight in weights.items()}
    batch = image(CONFIG, 3, 4, text_length=7, seed=5)
    loss, _ = _loss_and_gradients(CONFIG, weights, batch)
    torch.testing.assert_close(loss, (batch["noise"] - batch["latents"]).square().mean(-1).sum())


def test_sinusoids_are_exact_at_known_points():
    embedded = sinusoid(torch.tensor([0.0, 0.001]), 4).double()
    one, hundredth = torch.tensor(1.0).double(), torch.tensor(0.01).double()
    expected = torch.stack(
        (
            torch.tensor([1.0, 1.0, 0.0, 0.0]).double(),
            torch.stack((one.cos(), hundredth.cos(), one.sin(), hundredth.sin())),
        )
    )
    torch.testing.assert_close(embedded, expected, atol=1e-6, rtol=0)


def test_patches_are_those_of_diffusers_and_return():
    from diffusers import FluxPipeline

    latents = torch.arange(2 * 3 * 4 * 6, dtype=torch.float32).view(2, 3, 4, 6)
    tokens = patchify(latents)
    assert torch.equal(tokens, FluxPipeline._pack_latents(latents, 2, 3, 4, 6))
    assert torch.equal(unpatchify(tokens, rows=2, columns=3), latents)
    with pytest.raises(ValueError, match="latents of 4x5 pixels cannot be cut into 2x2 patches"):
        patchify(latents[..., :5])


def test_a_batch_declares_the_arguments_of_the_loss():
    config = dataclasses.replace(CONFIG, images_per_row=2, guidance_embedding=True)
    tensors = {tensor.name: tensor for tensor in config.batch_tensors(50)}
    batch = packed([image(config, 3, 4, text_length=7, seed=seed) for seed in (1, 2)], image_padding=12, text_padding=0)
    assert list(tensors) == list(batch)
    for name, tensor in tensors.items():
        assert (1, *tensor.shape) == batch[name].shape
        assert f"torch.{tensor.dtype}" == str(batch[name].dtype)
    assert {name for name, tensor in tensors.items() if tensor.ignored is not None} == {"image_segment_ids"}


def test_flops_are_those_of_the_matrix_products():
    config = dataclasses.replace(CONFIG, attention="math", guidance_embedding=True)
    model, batch = build(config), image(config, 4, 6, text_length=7, seed=1)
    with FlopCounterMode(display=False) as counter:
        model.loss(*batch.values())
    length = 4 * 6 + config.text_length
    assert config.flops_per_image(4 * 6) == pytest.approx(3 * counter.get_total_flops())
    assert config.flops_per_token(length) * length == pytest.approx(3 * counter.get_total_flops())
    attention = 4 * config.num_layers * config.dim * length**2
    assert config.attention_flops_per_token(length) * length == pytest.approx(3 * attention)


def test_dev_needs_223_teraflops_for_a_image_of_1024_pixels():
    assert flux_dev().flops_per_image(4096) == pytest.approx(223.15e12, rel=1e-4)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_heads": 3}, "--model.num_heads: 3 does not divide model.dim=64; give a divisor of it"),
        ({"rope_dims": (8, 24)}, "--model.rope_dims: 8,24 are not three positive even sizes"),
        ({"rope_dims": (8, 12, 14)}, "--model.rope_dims: 8,12,14 add up to 34, a head has 32 elements"),
    ],
)
def test_contradictions_are_named(change, message):
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(CONFIG, **change).validate()
    assert message in str(error.value)


def test_a_row_without_room_for_images_is_refused():
    with pytest.raises(ConfigError, match="14 leaves nothing for images beside 14 text tokens"):
        dataclasses.replace(CONFIG, images_per_row=2).batch_tensors(14)
