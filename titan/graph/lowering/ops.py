"""Importing this module fills the table with every lowering that titan.graph has."""

from titan.graph.lowering import (  # noqa: F401
    activation,
    attention,
    collectives,
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
