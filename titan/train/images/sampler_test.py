"""The sampler, with a model that knows the answer; and the prediction step on devices against the plain model."""

import dataclasses
import types

import numpy as np
import pytest
import torch

from titan.core.init import Normal, init_plan, sample
from titan.graph.testing.xla_cpu import use_cpu_devices
from titan.models.flux.config import flux_debug
from titan.parallel.mesh import MeshSpec
from titan.train.build import build
from titan.train.config.run import Config
from titan.train.config.sampling import SamplingConfig
from titan.train.images.open_images import Images, open_images
from titan.train.images.sampler import Sampler, tiled
from titan.train.recipes.flux_debug import RECIPE
from titan.train.runtime.xla import XlaRuntime
from titan.train.step.state import PARAMS

use_cpu_devices(4)

MODEL = dataclasses.replace(
    flux_debug(), num_double_blocks=1, num_single_blocks=1, dim=32, num_heads=2, rope_dims=(4, 6, 6), text_length=24
)


def _config(tmp_path, **sampling) -> Config:
    return dataclasses.replace(
        RECIPE,
        model=dataclasses.replace(MODEL, images_per_row=2),
        training=dataclasses.replace(RECIPE.training, sequence_length=2 * (16 + 24), batch_size=4),
        data=dataclasses.replace(
            RECIPE.data, resolution=64, max_images=8, trial_images="photographs", cache_folder=str(tmp_path)
        ),
        sampling=SamplingConfig(interval=1, num_images=3, num_steps=4, **sampling),
        compile=dataclasses.replace(RECIPE.compile, cache_folder=""),
        tpu_config=dataclasses.replace(RECIPE.tpu_config, num_virtual_devices=4),
    )


@pytest.fixture
def images(tmp_path) -> Images:
    config = _config(tmp_path)
    return open_images(config.data, config.model.images(), config.training, process_index=0, process_count=1)


class _Knowing:
    """An executable whose velocities lead from any sample to an image of the store, told by its caption."""

    def __init__(self, store):
        self._store = store
        self.calls = 0

    def place(self, batch):
        return batch

    def __call__(self, state, batch):
        self.calls += 1
        assert list(state) == [f"{PARAMS}w"]
        prediction = np.zeros_like(batch["noised"][0])
        for row, (noised, time) in enumerate(zip(batch["noised"][0], batch["timestep"][0, :, 0], strict=True)):
            num_tokens = int((batch["text_segment_ids"][0, row] == 1).sum())
            for number in range(len(self._store)):
                image = self._store[number]
                caption = image.caption.tokens
                text = batch["text"][0, row, :num_tokens]
                if caption.shape == text.shape and np.array_equal(caption.astype(np.float32), text):
                    length = len(image.latents)
                    assert (batch["image_segment_ids"][0, row] == 1).sum() == length
                    prediction[row, :length] = (noised[:length] - image.latents) / time
        return {}, {"prediction": prediction}


def _sampler(config, images, executable) -> Sampler:
    config = dataclasses.replace(config, parallelism=dataclasses.replace(config.parallelism, num_devices=4).resolve(4))
    run = types.SimpleNamespace(
        config=config,
        mesh=MeshSpec(("dp_shard",), (4,)),
        runtime=types.SimpleNamespace(process_index=0, device_processes=(0,) * 4, fetch=lambda outputs: outputs),
        predict_step=types.SimpleNamespace(executable_for=lambda batch: executable),
        prediction_tensors=config.model.prediction_tensors(config.training.sequence_length),
    )
    return Sampler(run, images)


class _Level(_Knowing):
    """An executable whose velocity is the same everywhere: one for the empty caption, another for all others."""

    of_captions, of_empty = 2.0, -0.5

    def __call__(self, state, batch):
        pooled = batch["pooled"][0, :, 0]
        is_empty = (pooled == self._store.empty_caption.pooled).all(1)
        velocities = np.where(is_empty, self.of_empty, self.of_captions).astype(np.float32)
        return {}, {"prediction": np.broadcast_to(velocities[:, None, None], batch["noised"][0].shape)}


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_guidance_leads_away_from_the_empty_caption(tmp_path, images, scale):
    drawn = []

    def decode_image(tokens, *, rows, columns):
        drawn.append(tokens)
        return np.zeros((16 * rows, 16 * columns, 3), np.uint8)

    encoders = types.SimpleNamespace(decode_image=decode_image)
    config = _config(tmp_path, classifier_free_guidance=scale, seed=5)
    sampler = _sampler(config, dataclasses.replace(images, encoders=encoders), _Level(images.store))
    sampler.sample({f"{PARAMS}w": 0})
    # From time 1 to 0 the sample moves by -1 times the velocity, -0.5 + scale (2 - -0.5).
    velocity = {1.0: 2.0, 3.0: 7.0}[scale]
    image_length = config.model.image_length(config.training.sequence_length)
    noise = np.random.RandomState(5).standard_normal((3, image_length, MODEL.in_channels))
    assert len(drawn) == 3
    for tokens, begin in zip(drawn, noise, strict=True):
        # float32: sums of four steps of values below 16
        np.testing.assert_allclose(tokens, begin[: len(tokens)] - velocity, atol=1e-5)


@pytest.mark.parametrize("guided", [1.0, 3.0])
def test_a_model_that_knows_the_images_draws_them(tmp_path, images, guided):
    config = _config(tmp_path, classifier_free_guidance=guided)
    executable = _Knowing(images.store)
    sheet = _sampler(config, images, executable).sample({f"{PARAMS}w": 0, "step": 0})
    assert executable.calls == 4
    numbers = [*images.validation.images.numbers, *images.train.images.numbers][:3]
    expected = []
    for number in numbers:
        image = images.store[number]
        decoded = images.encoders.decode_image(
            np.asarray(image.latents, np.float32), rows=image.rows, columns=image.columns
        )
        expected.append(decoded)
    if guided == 1.0:
        # float32 sums of a few terms, rounded to whole numbers
        assert np.abs(sheet.astype(int) - tiled(expected)).max() <= 1
    else:  # the empty caption's velocity is 0 here, so that each step goes three times as far and misses
        assert np.abs(sheet.astype(int) - tiled(expected)).max() > 10


def test_a_sheet_has_all_images():
    sheet = tiled([np.full((2, 3, 3), value, np.uint8) for value in (10, 20, 30)])
    assert [int((sheet[..., 0] == value).sum()) for value in (10, 20, 30)] == [6, 6, 6]


def test_predictions_on_devices_are_those_of_the_plain_model(tmp_path):
    config = dataclasses.replace(
        _config(tmp_path), parallelism=dataclasses.replace(RECIPE.parallelism, data_parallel_replicate=2)
    )
    run = build(config, XlaRuntime(config))
    draw = np.random.default_rng(0)
    batch = {}
    for tensor in run.prediction_tensors:
        shape = (1, 8, *tensor.shape)
        is_integer = tensor.dtype == "int32"
        array = draw.integers(0, 3, shape) if is_integer else draw.standard_normal(shape)
        batch[tensor.name] = array.astype(tensor.dtype)
    batch["timestep"] = np.abs(batch["timestep"])
    # At the initialisation all predictions are 0.
    model = config.model.components().build()
    weights = {
        name: np.array(sample(Normal(0.2), 0, name, tuple(weight.shape), "float32"))
        for name, weight in model.named_parameters()
    }
    assert init_plan(model).keys() == weights.keys()
    state = run.runtime.place_parameters({name: torch.from_numpy(array) for name, array in weights.items()})
    executable = run.predict_step.executable_for(batch)
    got = run.runtime.fetch(executable(state, executable.place(batch))[1])["prediction"]
    with torch.no_grad():
        inputs = tuple(torch.from_numpy(batch[tensor.name][0]) for tensor in run.prediction_tensors)
        tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
        expected = torch.func.functional_call(model, tensors, inputs).numpy()
    assert np.abs(expected).max() > 0.1
    # float32 on both sides, sums in other orders
    np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())
