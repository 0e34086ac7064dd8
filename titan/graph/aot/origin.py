"""Where an instruction comes from: region, module and operation in the name that JAX gave it."""

import dataclasses

REGIONS = ("forward", "loss", "backward", "optimizer")


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of an instruction or a buffer; empty where not known.

    Attributes:
      region: of the step: forward, loss, backward or optimizer.
      module: the fully qualified name of the module.
      operation: JAX's primitive, with the functions around it that are not the step's own.
    """

    region: str
    module: str
    operation: str

    def __str__(self) -> str:
        operation = self.operation.rpartition("/")[2]
        if not self.region:
            return operation or "the compiler"
        return f"{self.module or 'the step'} ({self.region}) {operation}"


def origin(op_name: str) -> Origin:
    """Reads a name such as "jit(run)/shard_map/forward/layers.0.attention.wq/dot_general".

    What is in the body of a loop has the region and the module of the loop before its own.
    """
    parts = op_name.split("/") if op_name else []
    region = next((index for index in reversed(range(len(parts))) if parts[index] in REGIONS), None)
    if region is None:
        return Origin("", "", parts[-1] if parts else "")
    rest = parts[region + 1 :]
    has_module = len(rest) > 1 and "(" not in rest[0]
    return Origin(parts[region], rest[0] if has_module else "", "/".join(rest[has_module:]))
