"""The filled table: importing this module registers every lowering that titan.graph has."""

from titan.graph.lowering import (  # noqa: F401
    activation,
    attention,
    collectives,
    control_flow,
    creation,
    foreach,
    indexing,
    loss,
    matmul,
    normalization,
    offload,
    pointwise,
    reduction,
    shape,
)
from titan.graph.lowering.table import TABLE

__all__ = ["TABLE"]
