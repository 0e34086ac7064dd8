"""Which devices a run takes, how the mesh's axes lie over them, and the dtypes of collectives. Imports no torch."""

import dataclasses

from titan.core.config.tree import option
from titan.core.config.validate import ConfigError

REST_OF_DEVICES = -1
"""Value of `parallelism.data_parallel_shard` that stands for all devices that the other axes leave."""


@dataclasses.dataclass(frozen=True)
class ParallelismConfig:
    """Devices, the mesh axes over them, and the dtypes of collectives."""

    num_devices: int = option(0, "Devices to train on. 0: all that are present.", minimum=0)
    data_parallel_shard: int = option(
        REST_OF_DEVICES,
        "Devices over which parameters and optimizer state are sharded (FSDP). -1: all that the other axes leave.",
    )
    data_parallel_replicate: int = option(
        1, "Replicas of the sharded state: above 1 with a shard axis is HSDP, alone it is DDP.", minimum=1
    )
    expert_parallel: int = option(
        1,
        "Devices over which the experts of a mixture are spread. They have sequences of their own, as those of "
        "data_parallel_shard, and shard all other parameters too.",
        minimum=1,
    )
    context_parallel: int = option(
        1, "Devices over which each sequence is split. They shard all parameters too.", minimum=1
    )
    tensor_parallel: int = option(
        1, "Devices over which attention heads, feed-forwards, embedding and head are split.", minimum=1
    )
    sequence_parallel: bool = option(
        True,
        "With tensor_parallel, split the tokens between those parts too. false, and always for FLUX.1: every device "
        "has all of them.",
    )
    topology_aware: bool = option(
        True,
        "On TPUs, take devices in an order in which mesh axes run along rings of the torus. false: as JAX lists them.",
    )
    hsdp_cubes: bool = option(
        True,
        "On slices of several cubes of 4x4x4 chips, replicas of 64 chips are such cubes. false: whatever part of the "
        "slice has the shortest modelled time, as planes of 8x8.",
    )
    use_simple_fsdp: bool = option(
        True, "Distribute parameters by SimpleFSDP. false: one device, parameters used as they are."
    )
    gather_dtype: str = option(
        "",
        "Dtype in which parameters are gathered and used, on one device too. Empty: that of the parameter.",
        choices=("", "float32", "bfloat16"),
    )
    reshard_after_forward: bool = option(
        True,
        "Gather the parameters of layers again for the backward pass. false: keep them gathered from the forward on.",
    )
    reduce_dtype: str = option(
        "float32", "Dtype in which gradients are summed over devices.", choices=("float32", "bfloat16")
    )

    def validate(self) -> None:
        """Raises ConfigError where the axes contradict one another or, if that is given, the number of devices."""
        if self.data_parallel_shard < 1 and self.data_parallel_shard != REST_OF_DEVICES:
            raise ConfigError(
                "parallelism.data_parallel_shard",
                f"{self.data_parallel_shard} is no number of devices",
                f"give at least 1, or {REST_OF_DEVICES} for the rest of the devices",
            )
        num_devices = max(max(self.data_parallel_shard, 1) * self._num_other_devices, self.num_devices)
        if not self.use_simple_fsdp and num_devices > 1:
            raise ConfigError(
                "parallelism.use_simple_fsdp",
                f"false means one device, but {num_devices} are asked for",
                "leave it on, or give --parallelism.num_devices=1",
            )
        if not self.use_simple_fsdp and self.gather_dtype:
            raise ConfigError(
                "parallelism.gather_dtype",
                "it is SimpleFSDP that hands out parameters in another dtype, and it is off",
                "leave it out, or leave --parallelism.use_simple_fsdp on",
            )
        if self.num_devices:
            self.resolve(self.num_devices)

    @property
    def _num_other_devices(self) -> int:
        """The product of all axes but data_parallel_shard."""
        return self.data_parallel_replicate * self.expert_parallel * self.context_parallel * self.tensor_parallel

    @property
    def num_batch_shares(self) -> int:
        """Parts into which the sequences of a batch are divided; the configuration must be resolved."""
        return self.data_parallel_replicate * self.data_parallel_shard * self.expert_parallel

    def resolve(self, num_present: int) -> "ParallelismConfig":
        """This configuration with `num_devices` and `data_parallel_shard` as the numbers they stand for.

        Args:
          num_present: devices that the machine has.

        Raises:
          ConfigError: more devices are asked for than present, or the axes do not multiply to the number of devices.
        """
        num_devices = self.num_devices or num_present
        if not self.use_simple_fsdp and not self.num_devices:
            num_devices = 1
        if num_devices > num_present:
            raise ConfigError(
                "parallelism.num_devices",
                f"{num_devices} devices are asked for, {num_present} are present",
                "give fewer, or on CPUs raise --tpu_config.num_virtual_devices",
            )
        others, shard = self._num_other_devices, self.data_parallel_shard
        named = {
            name: getattr(self, name)
            for name in ("data_parallel_replicate", "expert_parallel", "context_parallel", "tensor_parallel")
            if getattr(self, name) > 1
        }
        product = " x ".join(f"{name}={size}" for name, size in named.items()) or "data_parallel_replicate=1"
        if num_devices % others:
            blamed = next((name for name, size in named.items() if num_devices % size), None)
            if blamed is None:
                raise ConfigError(
                    "parallelism.num_devices",
                    f"{num_devices} devices are no multiple of {product}",
                    f"give a multiple of {others}, or smaller sizes",
                )
            raise ConfigError(
                f"parallelism.{blamed}",
                f"{named[blamed]} does not divide {num_devices} devices",
                f"give a divisor of {num_devices}, or another --parallelism.num_devices",
            )
        if shard == REST_OF_DEVICES:
            shard = num_devices // others
        if shard * others != num_devices:
            raise ConfigError(
                "parallelism.data_parallel_shard",
                f"{shard} times {product} is {shard * others}, not {num_devices} devices",
                f"give {num_devices // others}, or --parallelism.num_devices={shard * others}",
            )
        return dataclasses.replace(self, num_devices=num_devices, data_parallel_shard=shard)
