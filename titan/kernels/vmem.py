"""The vector memory of a TPU core, which the blocks of a kernel share: budgets, and the refusal of what exceeds one.

The compiler's own answer to blocks that are too large is a failure after seconds to minutes. Kernels add up their
blocks beforehand, so that a hopeless compile never starts.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

MIB = 2**20

_BUDGET_MIB = {"v5e": 16, "v5p": 16, "v6e": 32, "tpu7x": 32}

Tiles = TypeVar("Tiles")


class VmemError(ValueError):
    """The blocks of a kernel do not fit the vector memory.

    Attributes:
      kernel: whose blocks.
    """

    def __init__(self, kernel: str, problem: str):
        super().__init__(f"{kernel}: {problem}")
        self.kernel = kernel


def vmem_budget_bytes(generation: str) -> int:
    """The vector memory in bytes that the compiler lets one kernel use, by its default for a TPU generation.

    Measured with libtpu 0.0.42 (`xla_tpu_scoped_vmem_limit_kib`): 16 MiB on v5e and v5p, 32 MiB on v6e and tpu7x.

    Raises:
      ValueError: the generation is unknown.
    """
    if generation not in _BUDGET_MIB:
        raise ValueError(f"no VMEM budget is known for {generation!r}: name one of {', '.join(_BUDGET_MIB)}")
    return _BUDGET_MIB[generation] * MIB


def check_vmem(
    kernel: str,
    tiles: Tiles,
    *,
    estimate: Callable[[Tiles], int],
    alternatives: Iterable[Tiles],
    generation: str,
) -> None:
    """Refuses blocks that exceed the budget.

    Args:
      kernel: its name, for the message.
      tiles: the blocks that are asked for.
      estimate: the bytes that given blocks need.
      alternatives: other blocks, of which the message names the largest that fit.
      generation: the TPU that the kernel is for; "" (a platform without VMEM) is never refused.

    Raises:
      VmemError: the blocks do not fit; the text has the kernel, the need, the budget and the largest blocks that fit.
    """
    if not generation:
        return
    budget = vmem_budget_bytes(generation)
    needed = estimate(tiles)
    if needed <= budget:
        return
    fitting = [(estimate(other), other) for other in alternatives]
    fitting = [(size, other) for size, other in fitting if size <= budget]
    cure = "no blocks fit"
    if fitting:
        size, largest = max(fitting, key=lambda entry: entry[0])
        cure = f"the largest that fit are {largest} ({size / MIB:.1f} MiB)"
    raise VmemError(
        kernel,
        f"{tiles} needs {needed / MIB:.1f} MiB of VMEM, and {generation} gives a kernel {budget / MIB:.0f} MiB: {cure}",
    )
