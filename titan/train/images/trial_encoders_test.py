"""The stand-ins: images survive them as far as they are smooth, and captions are told apart."""

import dataclasses

import numpy as np
import pytest

from titan.core.config.validate import ConfigError
from titan.models.flux.config import flux_debug
from titan.train.images.trial_encoders import TrialEncoders

MODEL = flux_debug()


def test_what_varies_slowly_is_given_back():
    encoders = TrialEncoders(MODEL)
    y, x = np.mgrid[0:32, 0:64] / 64
    pixels = (255 * np.stack([0.3 + 0.4 * x, 0.5 + 0.3 * y, 0.6 - 0.2 * x], -1)).round().astype(np.uint8)
    tokens = encoders.encode_image(pixels)
    assert tokens.shape == (2 * 4, 64) and tokens.dtype == np.float32
    # Within a block colour, unlike brightness, is level: it is off by up to half of its change there, of 13.
    difference = encoders.decode_image(tokens, rows=2, columns=4).astype(int) - pixels
    assert np.abs(difference).max() <= 7
    assert np.abs(difference.mean(-1)).max() <= 2


def test_encoding_what_was_decoded_gives_the_same_latents():
    encoders = TrialEncoders(MODEL)
    tokens = 0.1 * np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    again = encoders.encode_image(encoders.decode_image(tokens, rows=2, columns=3))
    # Pixels are rounded to 1/127.5, which the latents' units of brightness make a little larger.
    assert np.abs(again - tokens).max() < 0.05


def test_captions_have_the_models_widths_and_are_told_apart():
    encoders = TrialEncoders(MODEL)
    cat, cap, empty, long = encoders.encode_captions(["a cat", "a cap", "", "x" * 1000])
    assert cat.tokens.shape == (6, MODEL.text_dim) and cat.pooled.shape == (MODEL.pooled_dim,)
    assert empty.tokens.shape == (1, MODEL.text_dim)
    assert long.tokens.shape == (MODEL.text_length, MODEL.text_dim)
    assert np.abs(cat.pooled - cap.pooled).max() > 1e-3
    assert np.abs(cat.tokens - cap.tokens).max() > 1e-3
    (again,) = TrialEncoders(MODEL).encode_captions(["a cat"])
    np.testing.assert_array_equal(again.tokens, cat.tokens)
    np.testing.assert_array_equal(again.pooled, cat.pooled)


def test_fingerprints_differ_where_embeddings_do():
    assert TrialEncoders(MODEL).fingerprint == TrialEncoders(dataclasses.replace(MODEL, dim=64)).fingerprint
    assert TrialEncoders(MODEL).fingerprint != TrialEncoders(dataclasses.replace(MODEL, text_length=9)).fingerprint


def test_no_more_channels_than_there_are():
    tokens = TrialEncoders(dataclasses.replace(MODEL, in_channels=768)).encode_image(np.zeros((16, 16, 3), np.uint8))
    assert tokens.shape == (1, 768)
    for in_channels in (66, 772):
        with pytest.raises(ConfigError, match=f"--model.in_channels: {in_channels} is no multiple of 4 up to 768"):
            TrialEncoders(dataclasses.replace(MODEL, in_channels=in_channels))
