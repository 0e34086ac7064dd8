"""Installs the locked packages into a virtual environment, once per user and lock.

The environment lies under $XDG_CACHE_HOME/titan/python (~/.cache/titan/python),
in a folder named after a digest of the locks, the interpreter and this script,
and is never changed once complete. So clones of the repository share one
installation, and a changed lock never touches what another clone runs on.
Where that folder cannot be written, the environment goes to --fallback.

Runs on the base interpreter, before any package is there: standard library only.
"""

import argparse
import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

_SECONDS_BETWEEN_REPORTS = 30


def main() -> int:
    """Writes three lines to --result: interpreter, site-packages folder, version."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lock", type=pathlib.Path, required=True)
    parser.add_argument("--cpu-lock", type=pathlib.Path)
    parser.add_argument("--cuda-lock", type=pathlib.Path, required=True)
    parser.add_argument("--fallback", type=pathlib.Path, required=True)
    parser.add_argument("--result", type=pathlib.Path, required=True)
    parser.add_argument("--as-is", action="store_true", help="use this interpreter's packages")
    args = parser.parse_args()

    locks = (args.cpu_lock, args.lock, args.cuda_lock)
    if args.as_is:
        interpreter = pathlib.Path(sys.executable)
    else:
        parent = _environments_folder()
        if parent is None:
            folder = args.fallback
        else:
            folder = parent / _digest([*filter(None, locks), pathlib.Path(__file__)])
        with open(folder.with_name(folder.name + ".lock"), "w") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            if not (folder / "complete").exists():
                try:
                    _install(folder, *locks)
                except subprocess.CalledProcessError as error:
                    print(
                        f"{_what(error.cmd)} failed with exit code {error.returncode}; its message is above",
                        file=sys.stderr,
                    )
                    return 1
                (folder / "complete").touch()
        interpreter = folder / "bin" / "python3"

    site_packages, version = subprocess.run(
        [
            interpreter,
            "-I",
            "-c",
            "import sys, sysconfig; print(sysconfig.get_path('purelib')); print(sys.version.replace('\\n', ' '))",
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    args.result.write_text(f"{interpreter}\n{site_packages}\n{version}\n")
    return 0


def _environments_folder() -> pathlib.Path | None:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = pathlib.Path(cache) / "titan" / "python"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if folder.is_absolute() and os.access(folder, os.W_OK) else None


def _digest(files: list[pathlib.Path]) -> str:
    digest = hashlib.sha256(f"{os.path.realpath(sys.executable)}\n{sys.version}\n".encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _install(folder: pathlib.Path, cpu_lock: pathlib.Path | None, lock: pathlib.Path, cuda_lock: pathlib.Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    except subprocess.CalledProcessError:
        print("Debian and Ubuntu keep the venv module apart: apt-get install python3-venv", file=sys.stderr)
        raise
    interpreter = folder / "bin" / "python3"
    # Given the choice, pip takes the CUDA build of torch: its index states hashes, a folder of wheels does not.
    if cpu_lock:
        _pip_install(interpreter, cpu_lock, must_succeed=False)
    _pip_install(interpreter, lock)
    if _is_cuda_torch(folder):
        print(
            "pip offers only the CUDA build of torch, so its CUDA packages (5 GB on disk) are installed too; for the "
            "CPU build add PyTorch's index of CPU wheels to pip's configuration as an extra index and delete "
            f"{folder}",
            file=sys.stderr,
        )
        _pip_install(interpreter, cuda_lock)
    print("compiling the packages to bytecode", file=sys.stderr, flush=True)
    # In parallel, and for all packages at once: pip compiles one file at a time.
    # A few packages ship templates that are no Python, hence no check.
    subprocess.run(
        [interpreter, "-m", "compileall", "-q", "-j", "0", folder / "lib"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _pip_install(interpreter: pathlib.Path, lock: pathlib.Path, *, must_succeed: bool = True) -> None:
    """Runs pip, and says now and then how far it is. Raises CalledProcessError where it has to succeed and does not."""
    command = [
        *(interpreter, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar=off"),
        *("--no-compile", "--no-deps", "--require-hashes", "-r", lock),
    ]
    total = sum(line[:1].isalnum() for line in lock.read_text().splitlines())
    found = [0]
    started_at = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=None if must_succeed else subprocess.DEVNULL, text=True
    ) as pip:

        def count() -> None:
            for line in pip.stdout:
                found[0] += line.startswith("Collecting ")

        reader = threading.Thread(target=count, daemon=True)
        reader.start()
        while True:
            try:
                code = pip.wait(_SECONDS_BETWEEN_REPORTS)
                break
            except subprocess.TimeoutExpired:
                seconds = round(time.monotonic() - started_at)
                what = f"downloading, {found[0]} of {total}" if found[0] < total else f"installing all {total}"
                print(f"locked Python packages: {what}, {seconds} s so far", file=sys.stderr, flush=True)
        reader.join()
    if code and must_succeed:
        raise subprocess.CalledProcessError(code, command)


def _is_cuda_torch(folder: pathlib.Path) -> bool:
    for version in folder.glob("lib/python*/site-packages/torch/version.py"):
        values: dict = {}
        exec(version.read_text(), values)
        return bool(values.get("cuda"))
    return False


def _what(command: list) -> str:
    return " ".join(str(part) for part in command[1:4])


if __name__ == "__main__":
    sys.exit(main())
