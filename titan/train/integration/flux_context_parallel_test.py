"""Rows of FLUX.1 split over devices: the step equals that of one device, alone, with FSDP, HSDP and split layers."""

import pytest

from titan.core.config.flags import parse
from titan.core.config.validate import ConfigError
from titan.parallel.mesh import MeshSpec
from titan.train.recipes.flux_debug import RECIPE
from titan.train.testing.case import Case
from titan.train.testing.executed import run_xla
from titan.train.testing.grid import grid
from titan.train.testing.outcome import assert_same
from titan.train.testing.runs import PHOTOGRAPH_FLAGS

FSDP_CP2 = MeshSpec(("dp_shard", "cp"), (2, 2))
HSDP_CP2 = MeshSpec(("dp_replicate", "dp_shard", "cp"), (2, 2, 2))
FSDP_CP2_TP2 = MeshSpec(("dp_shard", "cp", "tp"), (2, 2, 2))
TOLERANCE = 1e-5  # of the largest value: float32 sums in another order

CASES = {
    "fsdp2_cp2": Case("flux_shared", FSDP_CP2),
    "hsdp4_cp2_scan_kernels": Case("flux_shared", HSDP_CP2, scan=True, kernels=True, memory_policy="full"),
    "fsdp2_cp2_tp2": Case("flux_shared", FSDP_CP2_TP2, scan=True),
}


# The others have it too.
@pytest.mark.parametrize("case", grid(CASES, {"fsdp2_cp2"}))
def test_split_rows_equal_one_device(case):
    assert_same(run_xla(case), run_xla(Case(case.model)), TOLERANCE)


@pytest.mark.parametrize(
    "flags, message",
    (
        (
            ["--parallelism.context_parallel=3"],
            "--model.text_length: 2 x 32 tokens of text cannot be split over context_parallel=3; give a multiple of 3",
        ),
        (
            ["--parallelism.context_parallel=2", "--training.sequence_length=129"],
            "--training.sequence_length: the 65 of 129 tokens that are for images cannot be split over "
            "context_parallel=2; give 130",
        ),
    ),
)
def test_rows_that_cannot_be_split_are_refused(flags, message):
    with pytest.raises(ConfigError) as error:
        parse(["flux_debug", *PHOTOGRAPH_FLAGS, *flags], RECIPE)
    assert str(error.value) == message
    parse(["flux_debug", *PHOTOGRAPH_FLAGS, *flags, "--parallelism.context_parallel=1"], RECIPE)
