"""The vector memory of a TPU core, which the blocks of a kernel share: budgets, and the refusal of what exceeds one.

The compiler's own answer to blocks that are too large is a failure after seconds to minutes. Kernels add up their
blocks beforehand, so that a hopeless compile never starts.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from titan.kernels.generations import MIB, find_generation

Tiles = TypeVar("Tiles")


class VmemError(ValueError):
    """The blocks of a kernel do not fit the vector memory.

    Attributes:
      config_section: the section of flags that sets these blocks; "" where no flag does.
    """

    def __init__(self, kernel: str, problem: str, config_section: str = ""):
        super().__init__(f"{kernel}: {problem}")
        self.config_section = config_section


def vmem_budget_bytes(generation: str) -> int:
    """The vector memory in bytes that the compiler lets one kernel use, by its default for a TPU generation.

    Raises:
      titan.kernels.generations.UnknownTpuError: the generation is unknown.
    """
    return find_generation(generation).vmem_bytes


def check_vmem(
    kernel: str,
    tiles: Tiles,
    *,
    estimate: Callable[[Tiles], int],
    alternatives: Iterable[Tiles],
    generation: str,
    config_section: str = "",
) -> None:
    """Refuses blocks that exceed the budget.

    Args:
      kernel: its name, for the message.
      tiles: the blocks that are asked for.
      estimate: the bytes that given blocks need.
      alternatives: other blocks, of which the message names the largest that fit.
      generation: the TPU that the kernel is for; "" (a platform without VMEM) is never refused.
      config_section: the section of flags that sets these blocks, commonly the kernel's own.

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
        config_section,
    )
