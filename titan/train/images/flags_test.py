"""Flags of runs on images: mistakes are one line, found before anything is read or compiled."""

import dataclasses

import pytest

from titan.core.config.flags import one_line_errors, parse
from titan.core.config.validate import ConfigError
from titan.models.flux.config import flux_schnell
from titan.train.config.run import Config
from titan.train.recipes.flux_debug import RECIPE
from titan.train.recipes.flux_dev import RECIPE as FLUX_DEV
from titan.train.testing.runs import PHOTOGRAPH_FLAGS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--data.resolution=256",
         "--training.sequence_length: 192 leaves 128 tokens for images, and one of data.resolution=256 has 256; "
         "give 320, or a lower resolution"),
        ("--data.resolution=100",
         "--data.resolution: 100 is no multiple of 16 pixels, which are one token; give 96"),
        ("--training.sequence_length=64",
         "--training.sequence_length: 64 leaves nothing for images beside 64 text tokens (model.images_per_row "
         "times model.text_length); give more, e.g. 4608 for 1024x1024 pixels with 512 text tokens"),
        ("--fused_linear_cross_entropy.enable",
         "--fused_linear_cross_entropy.enable: Flux has no cross-entropy to be fused; leave it out"),
        ("--nometrics.tensorboard",
         "--metrics.tensorboard: images drawn with sampling.interval=110 go there or to metrics.sinks alone; "
         "leave it on, name a sink, or give --sampling.interval=0"),
        ("--data.guidance=3.5",
         "--data.guidance: 3.5 has no effect unless model.guidance_embedding is true; leave it at 1.0, or see "
         "sampling.classifier_free_guidance"),
        ("--sampling.guidance=1",
         "--sampling.guidance: 1.0 has no effect unless model.guidance_embedding is true; leave it at 3.5, or see "
         "sampling.classifier_free_guidance"),
        ("--data.path=/missing", "--data.path: there is no file or folder '/missing'; correct the path"),
        ("--data.encoders=/missing", "--data.encoders: there is no file or folder '/missing'; correct the path"),
        ("--data.caption_extension=.txt",
         "--data.caption_extension: it begins with a dot; leave the dot out, as txt"),
        ("--data.caption_column=", "--data.caption_column: the name is empty; name a column"),
        ("--tokenizer.path=x",
         "--tokenizer.path: there is no such flag; did you mean --data.path? --helpfull lists all flags"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_, one_line_errors():
        parse(["flux_debug", *PHOTOGRAPH_FLAGS, *arguments.split()], RECIPE)
    assert exit_.value.code == 2
    assert capsys.readouterr().err == message + "\n"


def test_what_is_refused_for_want_of_an_effect_is_taken_where_it_has_one():
    flags = "--nometrics.tensorboard --sampling.interval=0 --model.guidance_embedding --data.guidance=3.5"
    assert parse(["flux_debug", *flags.split()], RECIPE).data.guidance == 3.5


def test_schnell_is_a_few_flags_from_dev():
    flags = "--nomodel.guidance_embedding --model.text_length=256 --training.sequence_length=4352"
    assert parse(["flux_dev", *flags.split()], FLUX_DEV).model == flux_schnell()


@pytest.mark.parametrize("section", ["data", "tokenizer", "sampling"])
def test_sections_of_another_kind_of_data_are_refused(section):
    for config, other, message in (
        (RECIPE, Config(), "Flux is trained on images, and this section is one for documents; use its recipe"),
        (Config(), RECIPE, "Llama3 is trained on documents, and this section is one for images; use its recipe"),
    ):
        with pytest.raises(ConfigError) as error:
            dataclasses.replace(config, **{section: getattr(other, section)}).validate()
        assert str(error.value) == f"--{section}: {message}"
