"""Locks requirements.in anew, for every platform and Python 3.11 and later, with uv.

    python3 third_party/pypi/update.py [PACKAGE ...]

Names the packages to upgrade; without any, only what requirements.in asks for
changes. requirements_cpu_lock.txt is kept by hand: PyTorch publishes those hashes.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

_FOLDER = pathlib.Path(__file__).parent
_LOCK = _FOLDER / "requirements_lock.txt"
_CUDA_LOCK = _FOLDER / "requirements_cuda_lock.txt"
_CUDA = re.compile(r"nvidia-|cuda-|triton==")


def main(upgrades: list[str]) -> None:
    """Rewrites both locks."""
    # A wheel found on a local disk would be locked without the hashes of all the others.
    env = {name: value for name, value in os.environ.items() if name not in ("PIP_FIND_LINKS", "UV_FIND_LINKS")}
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder, "lock.txt")
        output.write_text(_LOCK.read_text() + _CUDA_LOCK.read_text())  # uv keeps the versions it finds here
        command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version=3.11", "--generate-hashes",
                   "--no-annotate", "--no-header", f"--output-file={output}", str(_FOLDER / "requirements.in")]
        subprocess.run([*command, *(f"--upgrade-package={name}" for name in upgrades)], check=True, env=env)
        blocks = re.split(r"(?m)^(?=\w)", output.read_text())
    _rewrite(_LOCK, [block for block in blocks if not _CUDA.match(block)])
    _rewrite(_CUDA_LOCK, [block for block in blocks if _CUDA.match(block)])


def _rewrite(lock: pathlib.Path, blocks: list[str]) -> None:
    header = lock.read_text().splitlines(keepends=True)[0]
    lock.write_text(header + "".join(blocks))


if __name__ == "__main__":
    main(sys.argv[1:])
