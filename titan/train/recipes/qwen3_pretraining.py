"""What the recipes of the published sizes of Qwen3 have in common."""

from titan.core.checkpoint import CheckpointConfig
from titan.models.qwen3.config import Qwen3Config, Qwen3MoeConfig
from titan.train.config.expert_balance import ExpertBalanceConfig
from titan.train.config.kernels import (
    FusedLinearCrossEntropyConfig,
    GroupedMatmulConfig,
    RopeKernelConfig,
    SplashAttentionKernelConfig,
)
from titan.train.config.parallelism import ParallelismConfig
from titan.train.config.run import Config
from titan.train.config.training import LrScheduleConfig, OptimizerConfig, TrainingConfig

_NUM_TOKENS = 30 * 10**12
_SEQUENCE_LENGTH = 4096
_AUXILIARY_LOSS = 1e-3  # router_aux_loss_coef of the published config.json


def qwen3_pretraining(
    *, name: str, model: Qwen3Config | Qwen3MoeConfig, learning_rate: float, batch_size: int
) -> Config:
    """The first stage of pre-training (Yang et al., 2025, arXiv:2505.09388, section 3.2): 30T tokens at length 4096.

    The report gives no learning rates and batch sizes. Rates here are those that Llama 3 has at a like size; bfloat16
    with a float32 state, 2,000 steps of warm-up, and a cosine to a tenth of the peak rate. Attention, loss and
    experts are kernels: at these sizes scores and logits would not fit. Experts are balanced as in the report (section
    2), by an auxiliary loss over the whole batch.

    Args:
      name: of the run.
      model: a published size.
      learning_rate: the peak rate.
      batch_size: sequences in one optimizer step.
    """
    is_mixture = isinstance(model, Qwen3MoeConfig)
    steps = _NUM_TOKENS // (batch_size * _SEQUENCE_LENGTH)
    return Config(
        name=name,
        model=model,
        parallelism=ParallelismConfig(gather_dtype="bfloat16"),
        training=TrainingConfig(
            steps=steps, batch_size=batch_size, sequence_length=_SEQUENCE_LENGTH, validation_interval=1000
        ),
        optimizer=OptimizerConfig(learning_rate=learning_rate),
        lr_schedule=LrScheduleConfig(warmup_steps=2000),
        checkpoint=CheckpointConfig(interval=1000),
        rope_kernel=RopeKernelConfig(enable=True),
        splash_attention_kernel=SplashAttentionKernelConfig(enable=True),
        fused_linear_cross_entropy=FusedLinearCrossEntropyConfig(enable=True),
        grouped_matmul=GroupedMatmulConfig(enable=is_mixture, paired=is_mixture),
        expert_balance=ExpertBalanceConfig(auxiliary_loss=_AUXILIARY_LOSS if is_mixture else 0.0),
    )
