"""Flags of the images that a run draws to show what its model has learnt. Imports neither torch nor jax."""

import dataclasses

from titan.core.config.tree import option


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """Images sampled from captions while training, as a grid in TensorBoard."""

    interval: int = option(0, "Steps between two grids. 0: none.", minimum=0)
    num_images: int = option(
        8, "Images of a grid, for the captions of held-out images and then of those trained on.", minimum=1
    )
    num_steps: int = option(
        28, "Steps of Euler's method from noise to an image. A model distilled as FLUX.1-schnell needs 4.", minimum=1
    )
    schedule: str = option(
        "shifted",
        "Times of the steps: shifted has more of them near the noise, the larger the image (FLUX.1-dev); uniform has "
        "equal steps (FLUX.1-schnell).",
        choices=("shifted", "uniform"),
    )
    guidance: float = option(3.5, "Guidance scale that a model with such an input is given.", minimum=0.0)
    classifier_free_guidance: float = option(
        1.0,
        "Factor by which the velocity for the caption is taken further away from that for the empty one. 1: not; else "
        "each step evaluates the model twice.",
        minimum=1.0,
    )
    seed: int = option(0, "Seed of the noise, the same for every grid.", minimum=0, maximum=2**32 - 1)
