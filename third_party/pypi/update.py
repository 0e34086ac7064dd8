"""Locks requirements.in anew, for every platform, with uv: for Python 3.11, and beside it for Python 3.12 and later.

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

_HERE = pathlib.Path(__file__).parent
_FOLDERS = {"3.11": _HERE, "3.12": _HERE.with_name("pypi_312")}
_CUDA = re.compile(r"nvidia-|cuda-|triton==")


def main(upgrades: list[str]) -> None:
    """Rewrites the locks of both folders."""
    for version, folder in _FOLDERS.items():
        _update(version, folder, upgrades)


def _update(version: str, home: pathlib.Path, upgrades: list[str]) -> None:
    lock, cuda_lock = home / "requirements_lock.txt", home / "requirements_cuda_lock.txt"
    # A wheel found on a local disk would be locked without the hashes of all the others.
    env = {name: value for name, value in os.environ.items() if name not in ("PIP_FIND_LINKS", "UV_FIND_LINKS")}
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder, "lock.txt")
        output.write_text(lock.read_text() + cuda_lock.read_text())  # uv keeps the versions it finds here
        command = [
            *("uv", "pip", "compile", "--quiet", "--universal", f"--python-version={version}", "--generate-hashes"),
            *("--no-annotate", "--no-header", f"--output-file={output}", str(home / "requirements.in")),
        ]
        subprocess.run([*command, *(f"--upgrade-package={name}" for name in upgrades)], check=True, env=env)
        blocks = re.split(r"(?m)^(?=\w)", output.read_text())
    _rewrite(lock, [block for block in blocks if not _CUDA.match(block)])
    _rewrite(cuda_lock, [block for block in blocks if _CUDA.match(block)])


def _rewrite(lock: pathlib.Path, blocks: list[str]) -> None:
    header = lock.read_text().splitlines(keepends=True)[0]
    lock.write_text(header + "".join(blocks))


if __name__ == "__main__":
    main(sys.argv[1:])
