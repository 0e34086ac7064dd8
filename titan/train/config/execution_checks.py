"""What capture, executors and ahead-of-time compilation ask of the rest of the configuration. No torch."""

from titan.core.config.validate import ConfigError
from titan.core.tpu_flags import tpu_compiler_options
from titan.train.config.compile import CompileConfig
from titan.train.config.run import Config


def check_execution(config: Config) -> None:
    """Raises ConfigError for flags that the chosen executor does not have."""
    tpu_config = config.tpu_config
    if config.distributed.is_asked_for:
        if not tpu_config.is_xla:
            raise ConfigError(
                "distributed",
                "the torch executor has a process for each of --parallelism.num_devices, or those of torchrun",
                "leave it out, or use the xla executor",
            )
        if config.aot.enable:
            raise ConfigError("distributed", "one process compiles for all hosts of a slice", "leave it out")
    for section, name in (
        ("compile", "tpu_flag_bundles"),
        ("compile", "tpu_flags"),
        ("aot", "save"),
        ("aot", "load"),
    ):
        if getattr(getattr(config, section), name) and not tpu_config.is_xla:
            raise ConfigError(
                f"{section}.{name}",
                "only the xla executor compiles a whole step",
                "leave it out, or use that executor",
            )
    if config.profiler.enable and not tpu_config.is_xla:
        raise ConfigError(
            "profiler.enable",
            "the profiler is JAX's and would not see what PyTorch runs",
            "leave it off, or use the xla executor",
        )
    if tpu_config.use_graph_trainer:
        if tpu_config.executor == "xla" and not config.compile.enable:
            raise ConfigError(
                "compile.enable",
                "the xla executor always compiles",
                "leave it on, or add --tpu_config.executor=torch",
            )
        return
    asked_for = {
        f"tpu_config.{name}": getattr(tpu_config, name)
        for name in ("use_scan_layers", "use_graph_split", "dump_graph", "disable_passes")
    }
    asked_for["compile.memory_policy"] = config.compile.memory_policy != "none"
    for flag, is_asked_for in asked_for.items():
        if is_asked_for:
            raise ConfigError(
                flag, "there is no graph without the graph trainer", "leave it out, or use the graph trainer"
            )


def check_split(config: Config) -> None:
    """Raises ConfigError for flags that do not go with a step in pieces."""
    if not config.tpu_config.use_graph_split:
        return
    for given, problem, cure in (
        (
            config.tpu_config.executor != "xla",
            f"the {config.tpu_config.executor} executor compiles nothing that could be split",
            "leave it out, or use the xla executor",
        ),
        (
            config.tpu_config.use_scan_layers,
            "use_scan_layers is on too, and a loop over layers is one program or one for each iteration",
            "add --notpu_config.use_scan_layers, or leave this out",
        ),
        (
            config.aot.save or config.aot.load,
            "a step that is saved is one program",
            "leave it out, or leave out aot.save and aot.load",
        ),
        (
            config.aot.lowering != "titan",
            f"aot.lowering={config.aot.lowering} lowers whole steps alone",
            "give one of the two",
        ),
        (
            config.compile.offload_prefetch != CompileConfig.offload_prefetch,
            f"compile.offload_prefetch={config.compile.offload_prefetch} is for a step in one piece, and between "
            "pieces values come back in a way of their own",
            "leave out one of the two",
        ),
    ):
        if given:
            raise ConfigError("tpu_config.use_graph_split", problem, cure)


def check_aot(config: Config) -> None:
    """Raises ConfigError where the configuration does not suit the slice that it is compiled for."""
    if bool(config.hardware) != config.aot.enable:
        flag, missing = ("aot", "--hardware=v6e-2x4") if config.aot.enable else ("hardware", "--aot")
        raise ConfigError(flag, "--aot and --hardware go together", f"add {missing}, or leave --{flag} out")
    if not config.hardware:
        return
    tpu_slice = config.tpu_slice
    if not config.tpu_config.is_xla:
        raise ConfigError(
            "aot", "only the xla executor compiles ahead of time, and another is asked for", "leave that out"
        )
    if config.parallelism.num_devices not in (0, tpu_slice.num_devices):
        raise ConfigError(
            "parallelism.num_devices",
            f"{config.parallelism.num_devices} are not the {tpu_slice.num_devices} devices of {tpu_slice}",
            "leave it out, or name another slice",
        )
    if not config.parallelism.use_simple_fsdp and tpu_slice.num_devices > 1:
        raise ConfigError(
            "parallelism.use_simple_fsdp",
            f"false means one device, and {tpu_slice} has {tpu_slice.num_devices}",
            "leave it on, or give --hardware=v6e-1x1",
        )
    if config.parallelism.data_parallel_replicate % tpu_slice.num_slices:
        raise ConfigError(
            "parallelism.data_parallel_replicate",
            f"{config.parallelism.data_parallel_replicate} is no multiple of the {tpu_slice.num_slices} slices, "
            "between which only the sum of gradients should pass",
            f"give {tpu_slice.num_slices}, or one slice",
        )
    options = tpu_compiler_options(config.compile.tpu_flag_bundles, config.compile.tpu_flags, tpu_slice.generation)
    if dumps := [name for name in options if name.startswith("xla_dump")]:
        raise ConfigError(
            "compile.tpu_flags",
            f"the report reads the compiler's dump itself, and {dumps[0]} is given",
            "leave it out",
        )
    config.resolve_devices(tpu_slice.num_devices)
