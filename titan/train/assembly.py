"""The parts of a run that a configuration means: the model's component tree, and the builder of its steps."""

from typing import Any

from titan.train.config.compile import TpuConfig
from titan.train.config.run import Config
from titan.train.optimizers.registry import make_optimizer
from titan.train.sharding.mesh_axes import mesh_spec, sharding_policy
from titan.train.sharding.model_plan import model_split
from titan.train.step.builder import StepBuilder
from titan.train.step.expert_balance import ExpertBalance
from titan.train.step.state import parameter_layouts
from titan.train.step.stored_form import Stacks
from titan.train.swaps.rules import with_swaps
from titan.train.swaps.scan_layers import stacked_parameters, with_scanned_layers


def components(config: Config) -> Any:
    """The model's component tree, in which the swaps that the configuration asks for are made."""
    return with_swaps(config.model.components(), config)


def with_loops(tree: Any, tpu_config: TpuConfig) -> Any:
    """The component tree with its layers as loops, if the configuration asks for them or for programs by layer."""
    if tpu_config.use_graph_split:
        return with_scanned_layers(tree, longest_pattern=1)
    return with_scanned_layers(tree) if tpu_config.use_scan_layers else tree


def step_builder(config: Config, tree: Any) -> tuple[StepBuilder, Stacks]:
    """What builds the steps of a run, and which entries of its state are stacks.

    Args:
      config: resolved for the devices.
      tree: the model's component tree after all swaps, its layers not yet in loops (see `components`).

    Returns:
      The builder, and the stored form of the state that its training step takes.
    """
    policy = sharding_policy(config.parallelism)
    build_model = with_loops(tree, config.tpu_config).build
    model = build_model()
    split = model_split(config, model)
    segments = {name: plan.segments for name, plan in split.plans.items() if plan.segments is not None}
    stacks = Stacks(stacked_parameters(model), segments)
    steps = StepBuilder(
        build_model=build_model,
        batch=config.model.batch_tensors(config.training.sequence_length),
        loss_module=config.model.loss_module,
        parameters=parameter_layouts(model, mesh_spec(config.parallelism), policy, stacks, split.plans),
        policy=policy,
        optimizer=make_optimizer(config),
        max_grad_norm=config.training.max_grad_norm,
        num_microbatches=config.training.microbatches,
        plans=split.plans,
        borders=split.borders,
        balance=_expert_balance(config),
    )
    return steps, stacks


def _expert_balance(config: Config) -> ExpertBalance | None:
    experts = config.model.experts()
    if experts is None:
        return None
    return ExpertBalance(experts.num_mixtures, experts.num_experts, experts.num_active, config.expert_balance)
