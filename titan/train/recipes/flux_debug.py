"""FLUX.1 of 2.3M parameters on the pictures that scikit-image and scikit-learn ship: a trial run on any machine.

Two pictures of about 128x128 pixels in a row; autoencoder and text encoders are stand-ins that need no files.
"""

import dataclasses
import sys

from titan.core.data.images.config import ImageDataConfig
from titan.models.flux.config import flux_debug
from titan.train.config.run import Config, OptimizerConfig, TrainingConfig
from titan.train.config.sampling import SamplingConfig
from titan.train.main import main

RECIPE = Config(
    name="flux_debug",
    model=dataclasses.replace(flux_debug(), text_length=32, pictures_per_row=2),
    training=TrainingConfig(steps=100, batch_size=8, sequence_length=2 * (64 + 32), validation_interval=50),
    optimizer=OptimizerConfig(learning_rate=2e-3, weight_decay=0.0),
    data=ImageDataConfig(resolution=128, validation_fraction=0.1),
    tokenizer=None,
    sampling=SamplingConfig(interval=100, num_steps=14, classifier_free_guidance=2.0),
)

if __name__ == "__main__":
    sys.exit(main(RECIPE))
