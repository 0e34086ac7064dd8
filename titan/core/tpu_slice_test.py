import pytest

from titan.core.config.validate import ConfigError
from titan.core.tpu_slice import TpuSlice, parse_tpu_slice


@pytest.mark.parametrize(
    ("name", "expected", "num_chips", "num_devices", "topology"),
    [
        ("v5e-2x2", TpuSlice("v5e", (2, 2)), 4, 4, "v5e:2x2"),
        ("v5p-2x2x1", TpuSlice("v5p", (2, 2, 1)), 4, 4, "v5p:2x2x1"),
        ("v6e-2x4", TpuSlice("v6e", (2, 4)), 8, 8, "v6e:2x4"),
        ("v6e-1x1", TpuSlice("v6e", (1, 1)), 1, 1, "v6e:1x1"),
        ("tpu7x-4x4x8", TpuSlice("tpu7x", (4, 4, 8)), 128, 256, "tpu7x:4x4x8"),
        ("4*tpu7x-8x8x16", TpuSlice("tpu7x", (8, 8, 16), 4), 4096, 8192, "tpu7x:8x8x16"),
    ],
)
def test_names(name, expected, num_chips, num_devices, topology):
    parsed = parse_tpu_slice(name)
    assert parsed == expected
    assert (parsed.num_chips, parsed.num_devices, parsed.topology) == (num_chips, num_devices, topology)
    assert str(parsed) == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v6e", "'v6e' names no TPU slice; write it as v5e-2x2"),
        ("v6e:2x4", "'v6e:2x4' names no TPU slice; write it as v5e-2x2"),
        ("v9x-2x4", "'v9x-2x4': there is no TPU generation 'v9x' in the table; give v5e, v5p, v6e, tpu7x"),
        ("v6e-2x2x2", "'v6e-2x2x2' has 3 dims, slices of v6e have 2; write it as v6e-2x4"),
        ("tpu7x-4x4", "'tpu7x-4x4' has 2 dims, slices of tpu7x have 3; write it as tpu7x-2x2x1"),
        ("v6e-0x4", "'v6e-0x4' has no chips; give at least v6e-2x4"),
        ("v6e-3x4", "the chips of a v6e come in blocks of 2x2, which do not fill this shape; give even numbers"),
        ("v6e-16x32", "'v6e-16x32' has 512 chips, a pod of v6e has 256; give a smaller slice, or several as 2*v6e-2x4"),
    ],
)
def test_mistakes_are_one_line(name, message):
    with pytest.raises(ConfigError) as error:
        parse_tpu_slice(name)
    assert message in str(error.value)
    assert str(error.value).startswith("--hardware: ")
