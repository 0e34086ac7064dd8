"""Expert parallelism: the experts of a mixture spread over devices, and tokens exchanged with them.

Each device of the axis has tokens of its own and an equal part of the experts. It sends a token once, with its choices,
to each device that has an expert for it; that device sums up what its experts make of the token, and sends the sum
back (Lepikhin et al., 2020, arXiv:2006.16668). Shapes are static, so a device has for each other room for what may
come at worst:

    without a capacity   all M tokens of each of the P devices, and of them min(k, X/P) rows each for the experts
    with a capacity C    min(M, C X/P) tokens of each device, and C X rows for the experts

Grouped matmuls spend time on rows that are there alone. What is sent is always the room.

Shapes: M tokens of a device, P devices of the axis, S room for tokens from one device to another, T = P * S, E model
dim, X experts of all devices, k experts of a token.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from titan.models.layers.experts import Experts
from titan.models.layers.routed_rows import CopyTable
from titan.parallel.collectives import exchange
from titan.parallel.module_boundaries import Axes, ModuleBorder
from titan.parallel.weight_plan import WeightPlan


@dataclasses.dataclass(frozen=True)
class ExpertExchange(ModuleBorder):
    """The border of `Experts`, whose own code sees the tokens that chose its experts, from all devices of the axis.

    Attributes:
      axis: the mesh axis; its size divides the number of experts.
      num_experts: X.
    """

    axis: str
    num_experts: int

    def run(
        self,
        forward: Callable[..., Tensor],
        axes: Axes,
        x_ME: Tensor,
        weights_Mk: Tensor,
        experts_Mk: Tensor,
        capacity: int | None,
    ) -> Tensor:
        """As `Experts.forward`, for this device's tokens and the experts of all devices."""
        axis = axes[self.axis]
        num_tokens, num_local = len(x_ME), self.num_experts // axis.size
        room = min(num_tokens, num_local * (capacity or num_tokens))
        table = _table(experts_Mk // num_local, axis.size, room)  # sentinel expert X maps to sentinel device P
        experts_Tk = exchange(table.take(experts_Mk.to(torch.int32), self.num_experts), axis)
        local_Tk = experts_Tk - axis.index() * num_local
        local_Tk = torch.where((local_Tk >= 0) & (local_Tk < num_local), local_Tk, num_local)
        out_TE = forward(
            exchange(table.spread(x_ME), axis),
            exchange(table.spread(weights_Mk), axis),
            local_Tk,
            capacity and capacity * axis.size,
        )
        return table.collect(exchange(out_TE, axis), x_ME.dtype)


def _table(devices_Mk: Tensor, num_devices: int, room: int) -> CopyTable:
    """Places of tokens in what is sent: for each device its tokens, in order, and then gaps.

    Args:
      devices_Mk: of each token's experts; `num_devices` stands for none.
      room: tokens for one device; no more than that go to it.
    """
    num_tokens = len(devices_Mk)
    device_P = torch.arange(num_devices, device=devices_Mk.device)
    goes_PM = (devices_Mk == device_P.view(-1, 1, 1)).sum(dim=2, dtype=torch.int32) > 0
    order_PM = torch.where(goes_PM, 0, 1).argsort(dim=1, stable=True)
    place_PM = order_PM.argsort(dim=1, stable=True)
    num_sent_P1 = goes_PM.sum(dim=1, keepdim=True, dtype=torch.int32)
    slot_S = torch.arange(room, device=devices_Mk.device)
    source_PS = torch.where(slot_S < num_sent_P1, order_PM[:, :room], num_tokens)
    copies_PM = torch.where(goes_PM, device_P.unsqueeze(1) * room + place_PM, num_devices * room)
    return CopyTable(source_PS.flatten(), copies_PM.T, has_gaps=True)


def expert_parallel_borders(model: nn.Module, axis: str) -> dict[str, ModuleBorder]:
    """The borders of a model's experts, by path.

    Args:
      model: as built, on any device, its weights whole.
      axis: the mesh axis.
    """
    return {path: ExpertExchange(axis, len(experts.w1)) for path, experts in _experts(model)}


def expert_parallel_weights(model: nn.Module, axis: str) -> dict[str, WeightPlan]:
    """What expert parallelism asks of each weight, by name: those of the experts are split along their first dim."""
    return {f"{path}.{name}": WeightPlan(shards={axis: 0}) for path, experts in _experts(model) for name in _WEIGHTS}


_WEIGHTS = ("w1", "w2", "w3")


def _experts(model: nn.Module) -> list[tuple[str, Experts]]:
    return [(path, module) for path, module in model.named_modules() if isinstance(module, Experts)]
