"""Collectives at the borders of modules: the module's own code stays that of a single device.

A module with a border has its forward run by it, which may put collectives before and after. A module that communicates
inside, because what it computes is another thing on a mesh, has a method `bind_axes` instead.
"""

import abc
import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titan.parallel.mesh_axis import MeshAxis, mesh_axes

Axes = Mapping[str, MeshAxis]
"""The axes of a mesh, by name."""


class ModuleBorder(abc.ABC):
    """What is done around a module's forward; it holds no mesh, so that one serves every capture."""

    @abc.abstractmethod
    def run(self, forward: Callable[..., Any], axes: Axes, *args: Any) -> Any:
        """Calls `forward` with the arguments of the module, or with what collectives make of them.

        Args:
          forward: the module's own.
          axes: of the mesh that the step runs on.
          args: that the module was called with.
        """


Borders = Mapping[str, ModuleBorder]
"""Path of a module to its border."""

_BORDER = "_module_border"


@functools.cache
def _bordered(base: type[nn.Module]) -> type[nn.Module]:
    # One class for all modules of a kind, as for simple_fsdp; border and axes are the instance's.
    def forward(self: nn.Module, *args: Any) -> Any:
        border, axes = self.__dict__[_BORDER]
        return border.run(functools.partial(base.forward, self), axes, *args)

    return type(base.__name__, (base,), {"__module__": base.__module__, "forward": forward})


def place_borders(module: nn.Module, mesh: DeviceMesh, borders: Borders) -> nn.Module:
    """Puts borders around submodules, and gives axes to those that have a method `bind_axes`; in place.

    `bind_axes(axes)` is called once with the axes of the mesh, by name, before any forward.

    Args:
      module: the model, which simple_fsdp has not changed yet.
      mesh: that the step runs on.
      borders: by path in `module`.

    Raises:
      ValueError: there is no module at a path, or it has a border already. The module is then as it was.
    """
    axes = mesh_axes(mesh)
    submodules = dict(module.named_modules())
    for path in borders:
        if path not in submodules:
            raise ValueError(f"there is no module {path} to put a border around")
        if _BORDER in submodules[path].__dict__:
            raise ValueError(f"module {path} has a border already")
    for path, border in borders.items():
        submodule = submodules[path]
        submodule.__class__ = _bordered(type(submodule))
        submodule.__dict__[_BORDER] = border, axes
    for submodule in submodules.values():
        if hasattr(submodule, "bind_axes"):
            submodule.bind_axes(axes)
    return module
