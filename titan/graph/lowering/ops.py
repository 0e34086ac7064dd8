"""The filled table: importing this module registers every lowering, titan's own and those of plugins."""

import importlib

from titan.graph.lowering.aten import (  # noqa: F401 (each registers its lowerings)
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
from titan.graph.lowering.dialect import collectives, control_flow, offload  # noqa: F401
from titan.graph.lowering.registry import LOWERING_MODULES
from titan.graph.lowering.table import TABLE

for _module in LOWERING_MODULES:
    importlib.import_module(_module)

__all__ = ["TABLE"]
