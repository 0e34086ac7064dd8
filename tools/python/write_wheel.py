"""Writes a pure Python wheel (PEP 427) whose bytes depend on its contents alone."""

import argparse
import base64
import hashlib
import pathlib
import sys
import zipfile

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip file can state


def write_wheel(
    output: pathlib.Path,
    *,
    distribution: str,
    version: str,
    summary: str,
    requires: list[str],
    scripts: list[str],
    license_file: pathlib.Path,
    files: dict[str, pathlib.Path],
) -> None:
    """Writes the wheel `output`.

    Args:
        output: the wheel; its name has to follow from distribution and version.
        distribution: the name that pip knows it by.
        version: its version.
        summary: one line on what it is.
        requires: requirements as in `Requires-Dist`.
        scripts: console scripts as in `entry_points.txt`, "name = package.module:function".
        license_file: the text of the license, which is Apache-2.0.
        files: path in the wheel -> file to read.
    """
    info = f"{distribution.replace('-', '_')}-{version}.dist-info"
    contents = {path: file.read_bytes() for path, file in files.items()}
    metadata = ["Metadata-Version: 2.4", f"Name: {distribution}", f"Version: {version}", f"Summary: {summary}"]
    metadata += ["License-Expression: Apache-2.0", "License-File: LICENSE", "Requires-Python: >=3.11"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    contents[f"{info}/METADATA"] = _lines(metadata)
    contents[f"{info}/WHEEL"] = _lines(
        ["Wheel-Version: 1.0", "Generator: titan", "Root-Is-Purelib: true", "Tag: py3-none-any"]
    )
    contents[f"{info}/licenses/LICENSE"] = license_file.read_bytes()
    if scripts:
        contents[f"{info}/entry_points.txt"] = _lines(["[console_scripts]", *scripts])
    record = [f"{path},sha256={_digest(data)},{len(data)}" for path, data in sorted(contents.items())]
    contents[f"{info}/RECORD"] = _lines([*record, f"{info}/RECORD,,"])

    with zipfile.ZipFile(output, "w") as archive:
        # PEP 427 asks for the metadata at the end of the archive.
        for path in sorted(contents, key=lambda path: (path.startswith(info), path)):
            member = zipfile.ZipInfo(path, date_time=_EPOCH)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = 0o100644 << 16
            archive.writestr(member, contents[path])


def _lines(lines: list[str]) -> bytes:
    return "".join(line + "\n" for line in lines).encode()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def main() -> None:
    """Writes the wheel that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--distribution", required=True)
    parser.add_argument("--version", required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--summary", required=True)
    parser.add_argument("--requires", action="append", default=[])
    parser.add_argument("--script", action="append", default=[])
    parser.add_argument("--license", type=pathlib.Path, required=True)
    parser.add_argument("--file", action="append", nargs=2, default=[], metavar=("PATH_IN_WHEEL", "FILE"))
    args = parser.parse_args()
    write_wheel(
        args.output,
        distribution=args.distribution,
        version=args.version,
        summary=args.summary,
        requires=args.requires,
        scripts=args.script,
        license_file=args.license,
        files={path: pathlib.Path(file) for path, file in args.file},
    )


if __name__ == "__main__":
    sys.exit(main())
