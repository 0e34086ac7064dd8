"""FLUX.1 of 1.5M parameters that learns to draw handwritten digits: a trial run on any machine.

The digits are those that scikit-learn ships, 16 of them in a row; autoencoder and text encoders are stand-ins that need
no files. On two slow cores it takes less than four minutes, after which the samples can be read.
"""

import dataclasses
import sys

from titan.core.data.images.config import ImageDataConfig
from titan.models.flux.config import flux_debug
from titan.train.config.run import Config
from titan.train.config.sampling import SamplingConfig
from titan.train.config.training import OptimizerConfig, TrainingConfig
from titan.train.main import main

_DIGITS_PER_ROW, _DIGIT_TOKENS, _TEXT_TOKENS = 16, 4, 8

RECIPE = Config(
    name="flux_debug",
    model=dataclasses.replace(
        flux_debug(),
        num_double_blocks=1,
        num_single_blocks=3,
        text_length=_TEXT_TOKENS,
        images_per_row=_DIGITS_PER_ROW,
    ),
    training=TrainingConfig(
        steps=220,
        batch_size=8,
        sequence_length=_DIGITS_PER_ROW * (_DIGIT_TOKENS + _TEXT_TOKENS),
        validation_interval=55,
    ),
    optimizer=OptimizerConfig(learning_rate=2e-3, weight_decay=0.0),
    data=ImageDataConfig(trial_images="digits", resolution=32, validation_fraction=0.1),
    tokenizer=None,
    sampling=SamplingConfig(interval=110, num_images=16, num_steps=14, classifier_free_guidance=2.0),
)

if __name__ == "__main__":
    sys.exit(main(RECIPE))
