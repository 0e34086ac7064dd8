"""`--grouped_matmul`: the experts of every layer by grouped matmuls."""

import dataclasses

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from titan.core.config.rewrite import Rule
from titan.kernels.grouped_matmul.api import grouped_matmul, paired_grouped_matmul
from titan.kernels.grouped_matmul.tiles import GroupedMatmulTiles
from titan.kernels.route_scores.api import apply_route_scores
from titan.models.layers.experts import Experts, LoopExpertsConfig
from titan.train.config.run import Config


@dataclasses.dataclass(frozen=True)
class GroupedExpertsConfig:
    """Configuration of `GroupedExperts`.

    Attributes:
      reference: the node that this one takes the place of, with the sizes and initialisers of the weights.
      paired: gate and up projection as one kernel that reads the rows once; otherwise a grouped matmul each.
      implementation: of the grouped matmuls.
      tiles: their block sizes.
    """

    reference: LoopExpertsConfig
    paired: bool
    implementation: str
    tiles: GroupedMatmulTiles

    def build(self) -> "GroupedExperts":
        """The module, on the current default device."""
        return GroupedExperts(self)


class GroupedExperts(Experts):
    """`titan.models.layers.experts.LoopExperts` by grouped matmuls: each row meets its own expert's weights alone."""

    def __init__(self, config: GroupedExpertsConfig):
        super().__init__()
        reference = config.reference.build()
        self.paired = config.paired
        self.options = {"implementation": config.implementation, "tiles": config.tiles}
        self.w1, self.w2, self.w3 = reference.w1, reference.w2, reference.w3
        self.param_init = reference.param_init

    def map_rows(
        self, rows_RE: Tensor, group_sizes_X: Tensor, weights_R: Tensor, matrices: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        """As `Experts.map_rows`."""
        w1_XEF, w2_XFE, w3_XEF = matrices
        if self.paired:
            gate_RF, up_RF = paired_grouped_matmul(rows_RE, w1_XEF, w3_XEF, group_sizes_X, **self.options)
        else:
            gate_RF = self._product(rows_RE, w1_XEF, group_sizes_X)
            up_RF = self._product(rows_RE, w3_XEF, group_sizes_X)
        out_RE = self._product(F.silu(gate_RF) * up_RF, w2_XFE, group_sizes_X)
        return apply_route_scores(out_RE, weights_R)

    def _product(self, lhs: Tensor, rhs: Tensor, group_sizes_X: Tensor) -> Tensor:
        return grouped_matmul(lhs, rhs, group_sizes_X, **self.options)


def grouped_experts_rules(config: Config) -> tuple[Rule, ...]:
    """Replaces the experts of every layer where the flag is on."""
    kernel = config.grouped_matmul
    if not kernel.enable:
        return ()
    tiles = GroupedMatmulTiles(**kernel.tiles())
    return (
        Rule(
            name="grouped_experts",
            type=LoopExpertsConfig,
            replace=lambda node: GroupedExpertsConfig(node, kernel.paired, kernel.implementation, tiles),
        ),
    )
