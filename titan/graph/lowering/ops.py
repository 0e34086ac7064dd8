"""The filled table: importing this module registers every lowering that titan.graph has."""

from titan.graph.lowering.aten import (
    activation,
    attention,
    creation,
    foreach,
    indexing,
    loss,
    matmul,
    normalization,
    pointwise,
    reduction,
    shape,
)
from titan.graph.lowering.dialect import collectives, control_flow, offload
from titan.graph.lowering.table import TABLE

__all__ = ["TABLE"]
