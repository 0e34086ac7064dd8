import subprocess
import sys

import pytest

from titan.core import hardware


@pytest.mark.parametrize(
    ("kind", "teraflops", "gigabytes", "devices"),
    [
        ("TPU v5 lite", 197, 16, 1),
        ("TPU v5p", 459, 95, 1),
        ("TPU v5", 459, 95, 1),
        ("TPU v6 lite", 918, 32, 1),
        ("TPU7x", 2307, 192, 2),
        ("v6e", 918, 32, 1),
        ("tpu7x", 2307, 192, 2),
    ],
)
def test_table_by_device_kind_and_by_name(kind, teraflops, gigabytes, devices):
    found = hardware.find_hardware(kind)
    assert hardware.peak_flops(kind) == found.peak_bf16_flops == teraflops * 1e12
    assert found.hbm_bytes == gigabytes * 10**9
    assert found.devices_per_chip == devices


def test_unknown_devices():
    assert hardware.peak_flops("cpu") is None
    assert hardware.find_hardware("TPU v99") is None


def test_num_chips():
    assert hardware.num_chips(8, "TPU7x") == 4
    assert hardware.num_chips(8, "TPU v6 lite") == 8
    assert hardware.num_chips(3, "cpu") == 3


def test_measured_peak_is_a_speed_that_machines_have():
    assert 1e8 < hardware.measured_matmul_peak(1, budget_seconds=0.1) < 1e16


def test_measured_peak_refuses_devices_that_are_not_there():
    with pytest.raises(ValueError, match="asked for 1000 devices, this process has"):
        hardware.measured_matmul_peak(1000)


def test_import_is_light():
    script = "import sys, titan.core.hardware; sys.exit(bool({'jax', 'numpy', 'torch'} & set(sys.modules)))"
    path = [entry for entry in sys.path if entry]
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {script}"], check=False)
    assert done.returncode == 0
