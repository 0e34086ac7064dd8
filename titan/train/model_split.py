"""How a model's work is split over devices that share it: plans of its weights, and borders of its modules."""

import dataclasses

from torch import nn

from titan.parallel.module_borders import Borders
from titan.parallel.tensor_parallel import tensor_parallel_borders, tensor_parallel_weights
from titan.parallel.weight_plan import WeightPlans
from titan.train.config import Config
from titan.train.mesh_axes import TENSOR_AXIS


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
    size, sequence_parallel = config.parallelism.tensor_parallel, config.parallelism.sequence_parallel
    if size == 1:
        return ModelSplit()
    plan = config.model.tensor_parallel_plan()
    return ModelSplit(
        tensor_parallel_weights(model, plan, axis=TENSOR_AXIS, sequence_parallel=sequence_parallel),
        tensor_parallel_borders(model, plan, axis=TENSOR_AXIS, size=size, sequence_parallel=sequence_parallel),
    )
