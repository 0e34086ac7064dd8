"""The sections of the configuration that say how a step becomes a program: capture, compilation, ahead of time or not.

Imports neither torch nor jax.
"""

import dataclasses
import os

from titan.core.config.tree import option
from titan.core.config.validate import ConfigError, check_exists, check_writable_folder
from titan.core.tpu_flags import TPU_FLAG_BUNDLES, check_tpu_flags
from titan.graph.passes.memory_rules import MemoryPolicyError, parse_memory_policy
from titan.graph.passes.registry import pass_names


@dataclasses.dataclass(frozen=True)
class CompileConfig:
    """Compilation, and its cache on disk."""

    enable: bool = option(
        True,
        "Compile. Without the graph trainer: torch.compile block by block, and false is plain eager. The xla executor "
        "always compiles.",
    )
    cache_folder: str = option(
        "~/.cache/titan/compile", "Folder of compiled programs, kept between runs. Empty: no cache."
    )
    tpu_flag_bundles: tuple[str, ...] = option(
        (), f"Named bundles of compiler options for TPUs: {', '.join(TPU_FLAG_BUNDLES)}."
    )
    tpu_flags: tuple[str, ...] = option(
        (), "Compiler options for TPUs as NAME=VALUE; they override those of the bundles."
    )
    memory_policy: str = option(
        "none",
        "What the backward pass needs of the forward: none keeps it all, full each layer's input, selective those and "
        "results of matmuls, attention and collectives, offload the inputs in host memory. Then rules, "
        "MODULE[::KIND]=save|recompute|offload, as layers.*::attention=save; the last that matches counts.",
    )
    offload_prefetch: int = option(
        1,
        "Layers ahead of the one that needs it at which an offloaded value is fetched. A split step has its own way.",
        minimum=0,
    )

    def validate(self) -> None:
        """Raises ConfigError for a folder that cannot be written, options that make no sense, and what is no policy."""
        if self.cache_folder:
            check_writable_folder("compile.cache_folder", self.cache_folder)
        check_tpu_flags(self.tpu_flag_bundles, self.tpu_flags)
        try:
            policy = parse_memory_policy(self.memory_policy)
        except MemoryPolicyError as error:
            raise ConfigError("compile.memory_policy", str(error), "see --helpfull") from None
        is_default = self.offload_prefetch == type(self).offload_prefetch
        if not is_default and all(rule.action != "offload" for rule in policy.rules):
            raise ConfigError(
                "compile.offload_prefetch",
                f"compile.memory_policy={self.memory_policy} offloads nothing that could be fetched",
                "leave it out, or give --compile.memory_policy=offload",
            )


@dataclasses.dataclass(frozen=True)
class TpuConfig:
    """Capture of the whole training step as one graph, and what executes it."""

    use_graph_trainer: bool = option(
        True,
        "Capture the step as one graph. false: PyTorch runs the step uncaptured, eagerly or (compile.enable) with each "
        "block under torch.compile.",
    )
    executor: str = option(
        "xla",
        "What runs the captured graph: xla compiles it as one program, torch interprets it.",
        choices=("xla", "torch"),
    )
    use_scan_layers: bool = option(
        False,
        "Run layers that repeat as a loop over their stacked weights: capture and compilation take as long for any "
        "number of them.",
    )
    use_graph_split: bool = option(
        False,
        "Compile the step in pieces, the forward and the backward of each kind of layer among them, in parallel and "
        "each once; between them activations lie in host memory.",
    )
    dump_graph: str = option("", "Folder into which the graph is written after each stage. Empty: not written.")
    disable_passes: tuple[str, ...] = option(
        (),
        "Graph passes to leave out.",
        choices=pass_names,
    )
    num_virtual_devices: int = option(
        2, "CPU devices that the xla executor simulates where there is no accelerator.", minimum=1
    )

    @property
    def is_xla(self) -> bool:
        """Whether XLA runs the step, and not PyTorch."""
        return self.use_graph_trainer and self.executor == "xla"

    def validate(self) -> None:
        """Raises ConfigError for a folder that cannot be written."""
        if self.dump_graph:
            check_writable_folder("tpu_config.dump_graph", self.dump_graph)


@dataclasses.dataclass(frozen=True)
class AotConfig:
    """Ahead-of-time compilation for a TPU slice, on a machine without a TPU, in place of a run."""

    enable: bool = option(
        False, "Compile the training step for --hardware, report memory, collectives and compute, and end. No run."
    )
    report: str = option("", "JSON file to write the report to. Empty: the terminal alone.")
    page: str = option("", "HTML file to write the report to, with images. Empty: none.")
    compare: str = option("", "JSON file of an earlier report; what differs from it is printed. Empty: none.")
    save: str = option(
        "", "Folder to write the compiled training step to, by a run or by --aot. It replaces what was saved there."
    )
    load: str = option(
        "",
        "Folder that aot.save wrote: its training step is used in place of compiling one, if it is the step asked for. "
        "It holds code: load none that you do not trust.",
    )
    lowering: str = option(
        "titan",
        "What lowers the captured graph's ATen ops to StableHLO: titan, or torch_tpu, whose own lowering needs the "
        "torch_tpu package and no TPU.",
        choices=("titan", "torch_tpu"),
    )

    def validate(self) -> None:
        """Raises ConfigError for files that cannot be written or read, and for options of a compilation that is off.

        Whether TorchTPU is installed is seen when the compilation starts.
        """
        if self.save and self.load:
            raise ConfigError("aot.save", "what aot.load gives is saved already", "leave out one of the two")
        if self.save:
            check_writable_folder("aot.save", self.save)
        if self.load:
            check_exists("aot.load", self.load)
        if self.lowering != "titan" and not self.enable:
            raise ConfigError("aot.lowering", "only --aot chooses a lowering", "leave it out, or add --aot")
        for name in ("report", "page"):
            if path := getattr(self, name):
                check_writable_folder(f"aot.{name}", os.path.dirname(os.path.expanduser(path)) or ".")
        if self.compare:
            check_exists("aot.compare", self.compare)
        for name in ("report", "page", "compare"):
            if getattr(self, name) and not self.enable:
                raise ConfigError(f"aot.{name}", "there is no report without --aot", "leave it out, or add --aot")
