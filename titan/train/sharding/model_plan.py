"""How a model's work is split over devices that share it: plans of its weights, and borders of its modules."""

import dataclasses

from torch import nn

from titan.parallel.module_boundaries import Borders
from titan.parallel.tensor_parallel import tensor_parallel_borders, tensor_parallel_weights
from titan.parallel.weight_plan import WeightPlans, merged_plans
from titan.train.config.run import Config
from titan.train.sharding.expert_parallel import expert_parallel_borders, expert_parallel_weights
from titan.train.sharding.mesh_axes import EXPERT_AXIS, TENSOR_AXIS


@dataclasses.dataclass(frozen=True)
class ModelSplit:
    """What parallelism besides data parallelism adds to a model.

    Attributes:
      plans: by name of the weight; none of those that are data-parallel alone.
      borders: by path of the module.
    """

    plans: WeightPlans = dataclasses.field(default_factory=dict)
    borders: Borders = dataclasses.field(default_factory=dict)


def model_split(config: Config, model: nn.Module) -> ModelSplit:
    """The split that a configuration asks for.

    Args:
      config: validated.
      model: as the step builds it, with the layers in loops or not, its weights whole.
    """
    size = config.parallelism.tensor_parallel
    plans, borders = [], {}
    if size > 1:
        plan = config.model.tensor_parallel_plan()
        splits_tokens = config.parallelism.sequence_parallel and plan.splits_tokens
        how = {"axis": TENSOR_AXIS, "size": size, "sequence_parallel": splits_tokens}
        plans.append(tensor_parallel_weights(model, plan, **how))
        borders |= tensor_parallel_borders(model, plan, **how)
    if config.parallelism.expert_parallel > 1:
        plans.append(expert_parallel_weights(model, EXPERT_AXIS))
        borders |= expert_parallel_borders(model, EXPERT_AXIS)
    return ModelSplit(merged_plans(*plans), borders)
