"""What a kernel refuses while a graph is lowered, as a mistake in the configuration."""

import contextlib
from collections.abc import Iterator

from titan.core.config.validate import ConfigError
from titan.graph.lowering.table import LoweringError
from titan.kernels.vmem import VmemError


@contextlib.contextmanager
def kernel_refusals() -> Iterator[None]:
    """Turns blocks that exceed a TPU's vector memory into a ConfigError that names their section.

    Which blocks fit depends on shapes and on the TPU, so that it shows no earlier than at lowering. Other errors, and
    refusals of blocks that no flag sets, pass through.
    """
    try:
        yield
    except LoweringError as error:
        cause = error.__cause__
        if not isinstance(cause, VmemError) or not cause.config_section:
            raise
        raise ConfigError(cause.config_section, str(cause), "give such blocks, or 0 for the default") from error
