"""One form of one small model's step: its mesh, loops, pieces, memory policy and kernels."""

import dataclasses
from typing import Any

from titan.core.data.config import TokenizerConfig
from titan.parallel.mesh import MeshSpec
from titan.train.config.compile import CompileConfig, TpuConfig
from titan.train.config.expert_balance import ExpertBalanceConfig
from titan.train.config.kernels import FusedLinearCrossEntropyConfig, GroupedMatmulConfig
from titan.train.config.parallelism import ParallelismConfig
from titan.train.config.run import Config
from titan.train.config.training import OptimizerConfig, TrainingConfig
from titan.train.testing.models import BATCH, CONFIGS, KERNELS, LENGTH

ONE = MeshSpec((), ())
FSDP = MeshSpec(("dp_shard",), (2,))
HSDP = MeshSpec(("dp_replicate", "dp_shard"), (2, 2))


@dataclasses.dataclass(frozen=True)
class Case:
    """One form of one model's step.

    Attributes:
      model: a key of `CONFIGS`, or "pattern".
      mesh: the devices.
      scan: whether layers are loops.
      split: whether the step is in pieces.
      memory_policy, prefetch, reshard, sequence_parallel: the flags of these names.
      microbatches: parts of the batch.
      gather_dtype: that of the parameters in use, as in the flag.
      balance: of the experts, where there are any.
      kernels: attention, RoPE and experts by what stands in for the kernels on CPUs.
      fused_loss: head and loss as one op, of this implementation.
      reduce_dtype, max_grad_norm: the flags of these names.
    """

    model: str
    mesh: MeshSpec = ONE
    scan: bool = False
    split: bool = False
    memory_policy: str = "none"
    prefetch: int = 1
    reshard: bool = True
    microbatches: int = 1
    gather_dtype: str = ""
    balance: ExpertBalanceConfig = ExpertBalanceConfig()
    sequence_parallel: bool = True
    kernels: bool = False
    fused_loss: str = ""
    reduce_dtype: str = "float32"
    max_grad_norm: float = 1.0

    @property
    def config(self) -> Config:
        """The configuration that means it; for the model "pattern", all of it but the layers."""
        of_model = CONFIGS["llama3" if self.model == "pattern" else self.model]
        changes: dict[str, Any] = {}
        if self.kernels:
            has_experts = of_model.model.experts() is not None
            changes |= {**KERNELS, "grouped_matmul": GroupedMatmulConfig(enable=has_experts)}
        if self.fused_loss:
            loss = FusedLinearCrossEntropyConfig(enable=True, implementation=self.fused_loss)
            changes["fused_linear_cross_entropy"] = loss
        return dataclasses.replace(
            of_model,
            parallelism=ParallelismConfig(
                num_devices=self.mesh.num_devices,
                data_parallel_replicate=self.mesh.size("dp_replicate"),
                data_parallel_shard=self.mesh.size("dp_shard"),
                expert_parallel=self.mesh.size("ep"),
                context_parallel=self.mesh.size("cp"),
                tensor_parallel=self.mesh.size("tp"),
                sequence_parallel=self.sequence_parallel,
                gather_dtype=self.gather_dtype,
                reduce_dtype=self.reduce_dtype,
                reshard_after_forward=self.reshard,
            ),
            training=TrainingConfig(
                batch_size=BATCH,
                sequence_length=LENGTH,
                microbatches=self.microbatches,
                max_grad_norm=self.max_grad_norm,
            ),
            # So large an epsilon that an update follows its gradient: AdamW would else turn the rounding of a gradient
            # near zero into a step of any size.
            optimizer=OptimizerConfig(epsilon=1e-2),
            tokenizer=TokenizerConfig(vocab_size=100),
            expert_balance=self.balance,
            tpu_config=TpuConfig(use_scan_layers=self.scan, use_graph_split=self.split),
            compile=CompileConfig(memory_policy=self.memory_policy, offload_prefetch=self.prefetch),
            **changes,
        )
