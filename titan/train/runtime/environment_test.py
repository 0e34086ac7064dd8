"""The settings of the process are there however titan is started."""

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import os, sys
from titan.train.runtime.environment import restart_with_tunables
print("before", os.getpid(), flush=True)
restart_with_tunables()
print(os.environ["GLIBC_TUNABLES"], os.getpid(), sys.argv[1:])
"""


def _started(command: list[str], tunables: str | None) -> list[str]:
    env = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    env |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    env |= {} if tunables is None else {"GLIBC_TUNABLES": tunables}
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc alone reads the variable")
@pytest.mark.parametrize("as_file", [True, False])
def test_a_program_restarts_once_with_its_arguments_and_number(tmp_path, as_file):
    file = tmp_path / "program.py"
    file.write_text(_PROGRAM)
    command = [sys.executable, str(file)] if as_file else [sys.executable, "-c", _PROGRAM]
    first, second, last = _started([*command, "--a=b c", ""], None)
    assert first == second and first.startswith("before ")
    assert last == f"glibc.malloc.hugetlb=1 {first.split()[1]} ['--a=b c', '']"


def test_what_a_user_has_set_stays():
    first, last = _started([sys.executable, "-c", _PROGRAM], "glibc.malloc.check=0")
    assert last.startswith("glibc.malloc.check=0 ")
