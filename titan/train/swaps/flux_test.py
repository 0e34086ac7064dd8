"""What the swaps make of FLUX.1's component tree.

That the results stay is tested in titan/train/integration/flux_step_test.py.
"""

import dataclasses

import pytest

from titan.core.config.validate import ConfigError
from titan.core.data.images.config import ImageDataConfig
from titan.models.flux.config import flux_dev
from titan.train.config.kernels import RopeKernelConfig, SplashAttentionKernelConfig
from titan.train.config.run import Config
from titan.train.config.sampling import SamplingConfig
from titan.train.config.training import TrainingConfig
from titan.train.swaps.rope import RotaryKernelConfig
from titan.train.swaps.rules import with_swaps
from titan.train.swaps.scan_layers import with_scanned_layers


def test_swaps_take_scale_direction_and_pairs_from_the_nodes_that_they_replace():
    kernels = Config(
        splash_attention_kernel=SplashAttentionKernelConfig(enable=True),
        rope_kernel=RopeKernelConfig(enable=True),
    )
    tree = with_swaps(flux_dev().components(), kernels)
    for block in (*tree.double_blocks, *tree.single_blocks):
        assert (block.inner.scale, block.inner.window, block.inner.causal) == (128**-0.5, 0, False)
        assert block.rotary == RotaryKernelConfig(True, "auto")


def test_the_blocks_of_the_published_size_are_two_loops():
    tree = with_scanned_layers(flux_dev().components())
    for loops, num_turns in ((tree.double_blocks, 19), (tree.single_blocks, 38)):
        assert [(loop.first, loop.num_turns, len(loop.blocks)) for loop in loops] == [(0, num_turns, 1)]


def test_matrices_for_the_rope_kernel_are_refused():
    config = Config(
        model=dataclasses.replace(flux_dev(), rope="matrix"),
        training=TrainingConfig(sequence_length=4608),
        data=ImageDataConfig(),
        tokenizer=None,
        sampling=SamplingConfig(),
    )
    config.validate()
    with pytest.raises(
        ConfigError, match="--model.rope: the RoPE kernel takes cosines and sines, and rope_kernel.enab"
    ):
        dataclasses.replace(config, rope_kernel=RopeKernelConfig(enable=True)).validate()
