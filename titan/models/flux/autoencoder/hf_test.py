"""FLUX.1's autoencoder against Diffusers' `AutoencoderKL`; weights pass through folders in both directions."""

import json

import pytest
import torch
from diffusers import AutoencoderKL

from titan.models.flux.autoencoder import hf
from titan.models.flux.autoencoder.config import AutoencoderConfig, flux_autoencoder
from titan.models.hf.folder import HfCheckpointError

CONFIG = AutoencoderConfig(channels=16, multipliers=(1, 2, 4), num_res_blocks=1, latent_channels=6, num_groups=4)
ABSOLUTE, RELATIVE = 1e-4, 1e-4  # float32 sums in another order


def _theirs(config: AutoencoderConfig) -> AutoencoderKL:
    return AutoencoderKL(**{key: value for key, value in hf.to_hf_config(config).items() if key != "_class_name"})


def _random(parameters):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(p.shape, generator=generator) * (0.3 if p.dim() == 1 else p[0].numel() ** -0.5)
        for name, p in parameters
    }


def test_latents_images_and_gradients_are_those_of_diffusers(tmp_path):
    theirs = _theirs(CONFIG)
    theirs.load_state_dict(_random(theirs.named_parameters()))
    theirs.save_pretrained(tmp_path)
    assert hf.config_from_hf(str(tmp_path)) == CONFIG
    ours = CONFIG.build()
    weights = hf.load_hf(str(tmp_path), CONFIG)
    ours.load_state_dict({name: weight.requires_grad_() for name, weight in weights.items()}, assign=True)

    images = torch.rand(2, 3, 24, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1
    noise = torch.randn(2, 6, 6, 4, generator=torch.Generator().manual_seed(2))
    posterior = theirs.encode(images).latent_dist
    mean, log_variance = ours.moments(images)
    torch.testing.assert_close(mean, posterior.mean, atol=ABSOLUTE, rtol=0)
    torch.testing.assert_close(log_variance, posterior.logvar, atol=ABSOLUTE, rtol=0)
    # As Diffusers' FLUX pipelines do it: the shift first, and the scale after it.
    expected = (posterior.mean + posterior.std * noise - 0.1159) * 0.3611
    latents = ours.encode(images, noise)
    torch.testing.assert_close(latents, expected, atol=ABSOLUTE, rtol=0)
    torch.testing.assert_close(ours.encode(images), (posterior.mean - 0.1159) * 0.3611, atol=ABSOLUTE, rtol=0)

    their_images = theirs.decode(expected / 0.3611 + 0.1159).sample
    our_images = ours.decode(latents)
    assert their_images.shape == images.shape and their_images.std() > 0.05
    torch.testing.assert_close(our_images, their_images, atol=ABSOLUTE, rtol=0)

    their_images.square().sum().backward()
    our_images.square().sum().backward()
    reference = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    largest = max(grad.norm() for grad in reference.values())
    for fqn, parameter in ours.named_parameters():
        grad = reference.pop(*hf.parts_of(fqn, parameter))
        # The bias of keys has a gradient of 0 but for rounding: softmax does not see what all keys have in common.
        assert (parameter.grad - grad).norm() <= RELATIVE * grad.norm() + 1e-7 * largest, fqn
    assert not reference


def test_diffusers_reads_what_is_written(tmp_path):
    ours = CONFIG.build()
    ours.load_state_dict(_random(ours.named_parameters()), assign=True)
    hf.save_hf(ours.state_dict(), CONFIG, str(tmp_path))
    theirs = AutoencoderKL.from_pretrained(tmp_path)
    latents = torch.randn(1, 6, 4, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs.decode(latents / CONFIG.scale + CONFIG.shift).sample
        torch.testing.assert_close(ours.decode(latents), expected, atol=ABSOLUTE, rtol=0)
    back = hf.load_hf(str(tmp_path), CONFIG)
    assert all(torch.equal(back[name], weight) for name, weight in ours.state_dict().items())


def test_the_published_size_has_the_parameters_of_diffusers():
    config = flux_autoencoder()
    with torch.device("meta"):
        theirs = {name: parameter.shape for name, parameter in _theirs(config).named_parameters()}
    ours = {n: p.shape for fqn, meta in config.build().named_parameters() for n, p in hf.parts_of(fqn, meta).items()}
    assert ours == theirs
    assert sum(shape.numel() for shape in ours.values()) == 83_819_683


def test_images_without_whole_latents_are_refused():
    with pytest.raises(ValueError, match="images of 24x18 pixels have no whole number of latents; give multiples of 4"):
        CONFIG.build().encode(torch.empty(1, 3, 24, 18, device="meta"))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"use_quant_conv": True}, "use_quant_conv is True, a FLUX.1 autoencoder has False"),
        ({"use_quant_conv": None}, "the key 'use_quant_conv' is missing"),
        ({"block_out_channels": [16, 24]}, r"block_out_channels \[16, 24\] are no multiples of the first"),
    ],
)
def test_other_autoencoders_are_refused(tmp_path, change, message):
    content = {**hf.to_hf_config(CONFIG), **change}
    content = {key: value for key, value in content.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(HfCheckpointError, match=message):
        hf.config_from_hf(str(tmp_path))
