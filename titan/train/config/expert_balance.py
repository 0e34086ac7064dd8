"""The section of the configuration that keeps a mixture's experts equally busy. Imports no torch."""

import dataclasses

from titan.core.config.tree import option


@dataclasses.dataclass(frozen=True)
class ExpertBalanceConfig:
    """What makes the router of a mixture of experts give all of them about as many tokens."""

    bias: bool = option(
        False,
        "Add a bias to each expert's score, for the choice of experts alone, which each step raises for experts with "
        "fewer tokens than the mean and lowers for those with more. It is part of the run, not of the model's weights.",
    )
    bias_rate: float = option(1e-3, "What a step adds to the bias or takes from it.", minimum=0.0)
    auxiliary_loss: float = option(
        0.0,
        "Weight of Hugging Face's load_balancing_loss_func, taken over all devices' tokens of a microbatch. 0: none.",
        minimum=0.0,
    )
