"""Marks on the ops of a piece of code, for the graph that PyTorch traces of it."""

import contextlib

from torch.fx import traceback as fx_traceback


def traced_as(mark: str) -> contextlib.AbstractContextManager:
    """Within it, ops that are traced into a graph have `mark` among their metadata; elsewhere it does nothing."""
    if fx_traceback.has_preserved_node_meta():
        return fx_traceback.annotate({mark: True})
    return contextlib.nullcontext()
