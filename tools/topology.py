"""Shows in which order a mesh takes the devices of a TPU slice, and what its axes ask of the links.

    ./bazelw run //tools:topology -- --hardware=tpu7x-4x4x8 --mesh=dp_replicate=2,dp_shard=128 [--svg=FILE.svg]

Needs no TPU and neither torch nor jax.
"""

import argparse
import pathlib
import re
import sys
from collections.abc import Sequence

from titan.core.config.validate import ConfigError
from titan.core.tpu_slice import TpuSlice, parse_tpu_slice
from titan.parallel.tpu_topology.topology import assign
from titan.parallel.tpu_topology.topology_svg import to_svg
from titan.parallel.tpu_topology.topology_text import to_text
from titan.parallel.tpu_topology.torus import Torus


def torus_of(tpu_slice: TpuSlice) -> Torus:
    """How the chips of a slice, or of several, are joined."""
    hardware = tpu_slice.hardware
    return Torus(tpu_slice.shape, hardware.wraps(tpu_slice.shape), hardware.devices_per_chip, tpu_slice.num_slices)


def parse_mesh(text: str) -> dict[str, int]:
    """Axis sizes by name from "dp_replicate=2,dp_shard=128".

    Raises:
      ConfigError: the text is of another form, or names an axis twice.
    """
    axes = {}
    for part in text.split(","):
        match = re.fullmatch(r"(\w+)=([1-9]\d*)", part.strip())
        if not match or match[1] in axes:
            raise ConfigError("mesh", f"{text!r} gives no sizes of axes", "write it as dp_replicate=2,dp_shard=128")
        axes[match[1]] = int(match[2])
    return axes


def main(argv: Sequence[str]) -> int:
    """Prints the assignment; 2 for a mistake in the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", required=True, help="the slice, as v6e-2x4, tpu7x-4x4x8 or 4*tpu7x-8x8x16")
    parser.add_argument("--mesh", default="", help="axes, outermost first; default: slices, then all their devices")
    parser.add_argument("--no_cubes", action="store_true", help="replicas of 64 chips need not be cubes of 4x4x4")
    parser.add_argument("--svg", default="", help="file for a picture of the rings")
    args = parser.parse_args(argv)
    try:
        tpu_slice = parse_tpu_slice(args.hardware)
        per_slice = tpu_slice.num_devices // tpu_slice.num_slices
        axes = parse_mesh(args.mesh or f"dp_replicate={tpu_slice.num_slices},dp_shard={per_slice}")
        try:
            assignment = assign(torus_of(tpu_slice), axes, cubes=not args.no_cubes)
        except ValueError as error:
            raise ConfigError("mesh", str(error), f"give axes that make {tpu_slice.num_devices} devices") from error
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(to_text(assignment), end="")
    if args.svg:
        path = pathlib.Path(args.svg).expanduser()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(to_svg(assignment), encoding="utf-8")
        except OSError as error:
            print(f"--svg: {path} cannot be written ({error.strerror}); give another file", file=sys.stderr)
            return 2
        print(f"picture: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
