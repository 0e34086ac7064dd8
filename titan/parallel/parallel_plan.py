"""The words in which a model family says how tensor parallelism splits it. Data alone: imports no torch.

A plan maps patterns of module paths to what is done with the modules' weights and at their borders. Between the borders
of a block each device computes with its part of the heads, of the inner dim or of the vocabulary (Shoeybi et al., 2019,
arXiv:1909.08053); outside of them devices have the same tokens or, with sequence parallelism, a part of the tokens each
(Korthikanti et al., 2022, arXiv:2205.05198).
"""

import dataclasses
import enum
import fnmatch
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Split:
    """A weight of which each device has a slice.

    Attributes:
      dim: that is sliced.
      segments: equal segments of that dim, of each of which a device has a slice.
    """

    dim: int
    segments: int = 1


class Whole(enum.Enum):
    """A weight that each device has whole, by what it meets there.

    Attributes:
      ON_PARTS: a device's part of the heads or of the inner dim: its gradient is a part of the whole one.
      ON_TOKENS: the residual stream: its gradient is a part where sequence parallelism splits the tokens.
      ON_SUM: a part of a sum, to which each device adds its share of the weight, a bias: its gradient is whole.
    """

    ON_PARTS = "on_parts"
    ON_TOKENS = "on_tokens"
    ON_SUM = "on_sum"


class Border(enum.Enum):
    """What happens around a module's forward.

    Attributes:
      BLOCK: its first argument [B, T, E] becomes all tokens, and its result, a part of a sum, the sum's own tokens.
      BEGIN: its first argument becomes all tokens: it is the first module of a block that is none itself.
      END: its result, a part of a sum, becomes the sum's own tokens: it is the last one.
      FEATURES: its result, a slice of the last dim, becomes all of it, for work that all devices do alike. The gradient
        of its argument is a part of the whole one, which is for the weights that this comes from to know.
      VOCABULARY: it looks up token ids in its slice of a table, and its result is the sum over slices, own tokens only.
      LOSS: its first argument [B, T, E] becomes all tokens. The module itself sums over slices of the vocabulary.
      SHARED: it computes a slice of the parts that `ParallelPlan.shared` names, side by side in the last dim of its
        result. Where they are fewer than the devices, each part is put together on all of the devices that share it.
    """

    BLOCK = "block"
    BEGIN = "begin"
    END = "end"
    FEATURES = "features"
    VOCABULARY = "vocabulary"
    LOSS = "loss"
    SHARED = "shared"


@dataclasses.dataclass(frozen=True)
class ModulePlan:
    """What is done with one kind of module.

    Attributes:
      weights: name of each weight of its own to how it lies.
      border: collectives around its forward; None: none.
    """

    weights: Mapping[str, Split | Whole] = dataclasses.field(default_factory=dict)
    border: Border | None = None


@dataclasses.dataclass(frozen=True)
class SharedParts:
    """Equal parts that may be fewer than the devices: as many devices that follow one another then need the same one.

    Attributes:
      name: the hyperparameter that is their number, a field of the model's configuration.
      num_parts: its value.
      part_size: elements of a part, of which each of the devices that share it computes as many.
    """

    name: str
    num_parts: int
    part_size: int


@dataclasses.dataclass(frozen=True)
class ParallelPlan:
    """How tensor parallelism splits the models of a family.

    Attributes:
      modules: pattern of module paths to plan. `*` stands for any part of a path, dots included: layers in a loop have
        one name more than layers by themselves.
      sizes: the hyperparameters, by field of the model's configuration, that the number of devices must divide.
      shared: the parts that modules with the border SHARED compute; None: there are none.
      splits_tokens: whether there is sequence parallelism. Without it devices have all tokens whatever the flag says.
    """

    modules: Mapping[str, ModulePlan]
    sizes: tuple[str, ...]
    shared: SharedParts | None = None
    splits_tokens: bool = True

    def of(self, path: str) -> ModulePlan | None:
        """The plan of the module at a path; None if it has none.

        Raises:
          ValueError: two patterns match.
        """
        found = [pattern for pattern in self.modules if fnmatch.fnmatchcase(path, pattern)]
        if len(found) > 1:
            raise ValueError(f"module {path} is meant by both {found[0]} and {found[1]} of its plan")
        return self.modules[found[0]] if found else None
