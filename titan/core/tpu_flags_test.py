"""Bundles of compiler options: what a choice amounts to, and the one line that each mistake gives."""

import pytest

from titan.core.config.validate import ConfigError
from titan.core.hardware import HARDWARE
from titan.core.tpu_flags import TPU_FLAG_BUNDLES, check_tpu_flags, tpu_compiler_options


def test_single_options_override_those_of_bundles():
    options = tpu_compiler_options(("no_latency_hiding", "scoped_vmem_48m"), (), "v6e")
    assert options == {
        "xla_tpu_enable_latency_hiding_scheduler": "false",
        "xla_tpu_scoped_vmem_limit_kib": "49152",
    }
    flags = ("xla_tpu_scoped_vmem_limit_kib=65536", "--xla_tpu_rwb_fusion=false")
    assert tpu_compiler_options(("no_latency_hiding", "scoped_vmem_48m"), flags, "v6e") == {
        "xla_tpu_enable_latency_hiding_scheduler": "false",
        "xla_tpu_scoped_vmem_limit_kib": "65536",
        "xla_tpu_rwb_fusion": "false",
    }


def test_bundles_are_of_known_generations_and_of_valid_options():
    for name, bundle in TPU_FLAG_BUNDLES.items():
        assert bundle.generations and set(bundle.generations) <= HARDWARE.keys(), name
        check_tpu_flags((), [f"{option}={value}" for option, value in bundle.options.items()])


@pytest.mark.parametrize(
    ("bundles", "flags", "message"),
    [
        (("sparse_core_ofload",), (),
         "--compile.tpu_flag_bundles: there is no bundle 'sparse_core_ofload'; did you mean sparse_core_offload? "
         f"there are {', '.join(TPU_FLAG_BUNDLES)}"),
        (("sparse_core_offload", "no_sparse_core_offload"), (),
         "--compile.tpu_flag_bundles: sparse_core_offload sets "
         "xla_tpu_enable_sparse_core_collective_offload_all_gather=true and no_sparse_core_offload "
         "xla_tpu_enable_sparse_core_collective_offload_all_gather=false; leave one of them out"),
        (("sparse_core_offload",), (),
         "--compile.tpu_flag_bundles: sparse_core_offload is for v6e: on tpu7x it has no effect; leave it out"),
        ((), ("xla_tpu_rwb_fusion",),
         "--compile.tpu_flags: 'xla_tpu_rwb_fusion' is no option with its value; "
         "write NAME=VALUE, separated by commas"),
        ((), ("xla_tpu_rwb_fusion=",),
         "--compile.tpu_flags: 'xla_tpu_rwb_fusion=' is no option with its value; "
         "write NAME=VALUE, separated by commas"),
        ((), ("xla_a=1", "xla_a=2"), "--compile.tpu_flags: xla_a is '1' and '2'; give it once"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(bundles, flags, message):
    with pytest.raises(ConfigError) as error:
        tpu_compiler_options(bundles, flags, "tpu7x")
    assert str(error.value) == message
