"""Published speeds of TPU training runs, which modelled ones are held against.

The numbers were stated in public of runs on v6e and v7x chips, and collected for this project; there is no link to
each. Where no batch, sequence or policy is named below, none was stated, and the variant of our recipe chooses its own.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Published:
    """One published run.

    Attributes:
      mfu: model FLOPs per second and chip, as a fraction of the peak; None where only tokens are given.
      tokens_per_second_per_chip: None where only the MFU is given.
      run: what was stated of it.
    """

    mfu: float | None
    tokens_per_second_per_chip: float | None
    run: str


PUBLISHED = {
    ("llama3_405b", "tpu7x-4x4x8"): Published(0.57, None, "128 to 1,024 chips, about 57%"),
    ("llama3_405b", "tpu7x-8x8x16"): Published(0.57, None, "128 to 1,024 chips, about 57%"),
    ("qwen3_235b_a22b", "tpu7x-4x4x4"): Published(
        None, 4568.0, "64 chips, 4096 tokens, 16 sequences a device, scan or split, host offload"
    ),
    ("qwen3_235b_a22b", "tpu7x-4x8x8"): Published(0.32, None, "256 chips, about 32%"),
    ("qwen3_235b_a22b", "tpu7x-8x8x16"): Published(0.3242, None, "one slice of 1,024 chips"),
    ("qwen3_235b_a22b", "8*tpu7x-8x8x16"): Published(0.3051, 4208.0, "8 slices of 1,024 chips"),
    ("muse_glimmer_30b", "tpu7x-4x4x4"): Published(
        0.44, 5848.0, "64 chips, 16384 tokens, a sequence a device, float32 reductions, about 44%"
    ),
    ("muse_glimmer_30b", "tpu7x-4x4x8"): Published(0.434, None, "128 chips"),
    # Stated is the time of a step, of which tokens are those of three images of 4096 tokens and texts of 512.
    ("flux_dev", "v6e-2x4"): Published(None, 3 * 4608 / 2.78, "8 chips, three images a device, 2.78 s a step"),
    # 20.76% and 19.4% MFU by a count of 202 TFLOPs an image, where titan counts 223: hence the tokens.
    ("flux_dev", "tpu7x-2x2x2"): Published(None, 6 * 4608 / 2.53, "8 chips, three images a device, 2.53 s a step"),
    ("flux_dev", "tpu7x-8x8x16"): Published(None, 6 * 4608 / 2.71, "1,024 chips, three a device, 2.71 s a step"),
}
"""Recipe and slice to the published run of that model on as many chips."""
