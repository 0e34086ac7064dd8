"""Compiler options against the compiler itself: libtpu takes every bundle, and what it refuses is one line."""

import logging

import jax
import pytest

from titan.core.config.validate import ConfigError
from titan.core.tpu_flags import TPU_FLAG_BUNDLES
from titan.kernels.tpu_compile import tpu_device
from titan.train.config.compile import CompileConfig
from titan.train.runtime.compiler_options import compiler_options


@pytest.mark.parametrize("bundle", TPU_FLAG_BUNDLES)
def test_the_compiler_takes_every_option_of_a_bundle(bundle):
    for generation in TPU_FLAG_BUNDLES[bundle].generations:
        options = compiler_options(CompileConfig(tpu_flag_bundles=(bundle,)), tpu_device(generation))
        assert options == TPU_FLAG_BUNDLES[bundle].options


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("xla_tpu_rwb_fusion=false", "xla_tpu_fast=true"),
         r"--compile.tpu_flags: the TPU compiler \(.* cl/\d+.*\) has no option 'xla_tpu_fast'; correct it, or leave it "
         "out$"),
        (("xla_tpu_scoped_vmem_limit_kib=64M",),
         r"--compile.tpu_flags: the TPU compiler \(.*\) cannot read '64M' as a value of xla_tpu_scoped_vmem_limit_kib; "
         "correct it, or leave it out$"),
    ],
)  # fmt: skip
def test_what_the_compiler_refuses_is_one_line(flags, message):
    config = CompileConfig(tpu_flag_bundles=("no_latency_hiding",), tpu_flags=flags)
    with pytest.raises(ConfigError, match=message):
        compiler_options(config, tpu_device("v6e"))


def test_other_devices_do_without_and_the_log_says_so(caplog):
    config = CompileConfig(tpu_flag_bundles=("no_latency_hiding",))
    with caplog.at_level(logging.WARNING):
        assert compiler_options(config, jax.devices("cpu")[0]) == {}
        assert compiler_options(CompileConfig(), jax.devices("cpu")[0]) == {}
    assert caplog.messages == ["--compile.tpu_flag_bundles left out: the devices are cpu, no TPUs"]
