"""What the recipes of the published sizes of Llama 3 have in common."""

from titan.core.checkpoint import CheckpointConfig
from titan.models.llama3.config import Llama3Config
from titan.train.config.kernels import FusedLinearCrossEntropyConfig, RopeKernelConfig, SplashAttentionKernelConfig
from titan.train.config.parallelism import ParallelismConfig
from titan.train.config.run import Config
from titan.train.config.training import LrScheduleConfig, OptimizerConfig, TrainingConfig


def llama3_pretraining(*, name: str, model: Llama3Config, learning_rate: float, batch_size: int) -> Config:
    """Pre-training as Grattafiori et al. (2024, arXiv:2407.21783, section 3.4) describe it, at one length throughout.

    Sequences of 8192 tokens, bfloat16 with a float32 state, 8,000 steps of warm-up, and a cosine to a hundredth of the
    peak rate at step 1,200,000. Attention and loss are kernels: at these sizes scores and logits would not fit.

    Args:
      name: of the run.
      model: a published size.
      learning_rate: the peak rate (table 3 there).
      batch_size: sequences in one optimizer step.
    """
    return Config(
        name=name,
        model=model,
        parallelism=ParallelismConfig(gather_dtype="bfloat16"),
        training=TrainingConfig(steps=1_200_000, batch_size=batch_size, sequence_length=8192, validation_interval=1000),
        optimizer=OptimizerConfig(learning_rate=learning_rate),
        lr_schedule=LrScheduleConfig(warmup_steps=8000, min_ratio=0.01),
        checkpoint=CheckpointConfig(interval=1000),
        rope_kernel=RopeKernelConfig(enable=True),
        splash_attention_kernel=SplashAttentionKernelConfig(enable=True),
        fused_linear_cross_entropy=FusedLinearCrossEntropyConfig(enable=True),
    )
