"""The compiled training step in a folder: `--aot.save` writes it, `--aot.load` takes it in place of compiling.

    DIR/step.json              format, fingerprint, name and digest of the executable, the report of `--aot`
    DIR/step-<digest>.bin      the executable

`step.json` comes last and by one rename, so that a reader finds the old step or the new one, and both whole.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import pathlib
from collections.abc import Iterable, Mapping

from titan.core.config.tree import leaves
from titan.core.config.validate import ConfigError
from titan.core.files import write_atomically
from titan.graph.executors.fingerprint import fingerprint
from titan.graph.executors.serialized import NotLoadableError, from_bytes, to_bytes
from titan.graph.executors.xla import LoweredStep, XlaExecutable
from titan.train.config.run import Config

_log = logging.getLogger(__name__)

_FORMAT = 1
_MANIFEST = "step.json"

# What does not enter the training step: paths of leaves and sections. Compiler options do, as what they amount to.
OUTSIDE_THE_STEP = (
    *("name", "hardware", "data", "tokenizer", "sampling", "checkpoint", "metrics", "profiler", "lr_schedule"),
    "distributed",
    *("aot.enable", "aot.report", "aot.page", "aot.compare", "aot.save", "aot.load"),
    *("training.steps", "training.seed", "training.validation_interval", "training.validation_batches"),
    *("compile.enable", "compile.cache_folder", "compile.tpu_flag_bundles", "compile.tpu_flags"),
    *("tpu_config.use_graph_trainer", "tpu_config.executor", "tpu_config.dump_graph", "tpu_config.num_virtual_devices"),
    "optimizer.learning_rate",
)

# Consequences of the others, as a rule, and therefore named only where nothing else differs.
_DIGESTS = ("device_order", "state", "graph", "program")
_CONSEQUENCES = ("batch", *_DIGESTS)


@dataclasses.dataclass(frozen=True)
class SavedStep:
    """A step that was found whole in its folder.

    Attributes:
      folder: as the flag names it.
      fingerprint: what it depends on, by name.
      executable: the file with the compiled program.
      report: the report of `--aot` on it as JSON; empty if a run saved it.
    """

    folder: str
    fingerprint: Mapping[str, str]
    executable: pathlib.Path
    report: str

    def check(self, wanted: Mapping[str, str]) -> None:
        """Raises ConfigError, naming the fields, unless the saved step has the fingerprint `wanted`."""
        names = [name for name in {**wanted, **self.fingerprint} if wanted.get(name) != self.fingerprint.get(name)]
        if not names:
            return
        shown = [name for name in names if not _is_in(name, _CONSEQUENCES)] or names
        differences = [
            f"{name} is {_short(wanted, name)} here and {_short(self.fingerprint, name)} there" for name in shown
        ]
        more = f", and {len(shown) - 3} more" if len(shown) > 3 else ""
        raise ConfigError(
            "aot.load",
            f"{self.folder} holds another step: {', '.join(differences[:3])}{more}",
            "give what it was saved with, or leave this out and save anew with --aot.save",
        )

    def load(self, lowered: LoweredStep, wanted: Mapping[str, str]) -> XlaExecutable:
        """The executable, on the devices of `lowered`.

        Raises:
          ConfigError: the fingerprint is not `wanted`, or the devices do not take the program.
        """
        self.check(wanted)
        try:
            executable = from_bytes(self.executable.read_bytes(), lowered)
        except NotLoadableError as error:
            raise ConfigError(
                "aot.load", f"{self.folder} cannot be loaded: {error}", "save it anew with --aot.save"
            ) from error
        _log.info("training step loaded from %s, not compiled", self.folder)
        return executable


def open_saved_step(folder: str) -> SavedStep:
    """The step in a folder.

    Raises:
      ConfigError: there is none, or it is damaged.
    """
    path = pathlib.Path(folder).expanduser()
    cure = "save it anew with --aot.save"
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        saved_format = manifest["format"]
        if saved_format == _FORMAT:
            executable, digest = path / manifest["executable"], manifest["sha256"]
            step = SavedStep(folder, dict(manifest["fingerprint"]), executable, manifest["report"])
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError("aot.load", f"{folder!r} holds no saved step", "give a folder of --aot.save") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("aot.load", f"{path / _MANIFEST} is damaged: {error!r}", cure) from None
    if saved_format != _FORMAT:
        raise ConfigError("aot.load", f"{folder!r} is of another version of titan (format {saved_format})", cure)
    try:
        content = executable.read_bytes()
    except OSError as error:
        raise ConfigError("aot.load", f"{executable} cannot be read ({error.strerror})", cure) from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise ConfigError("aot.load", f"{executable} is damaged: its digest is not that of {_MANIFEST}", cure)
    return step


def save_step(folder: str, executable: XlaExecutable, of: Mapping[str, str], report: str = "") -> None:
    """Writes a compiled step, in place of what was saved there.

    Args:
      folder: made if need be.
      executable: the compiled training step.
      of: its fingerprint.
      report: see `SavedStep`.

    Raises:
      ConfigError: the folder cannot be written.
    """
    path = pathlib.Path(folder).expanduser()
    content = to_bytes(executable)
    digest = hashlib.sha256(content).hexdigest()
    name = f"step-{digest[:16]}.bin"
    manifest = {"format": _FORMAT, "fingerprint": dict(of), "executable": name, "sha256": digest, "report": report}
    try:
        write_atomically(path / name, content)
        write_atomically(path / _MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    except OSError as error:
        problem = f"{folder!r} cannot be written ({error.strerror})"
        raise ConfigError("aot.save", problem, "give another folder, or leave it out") from error
    for old in path.glob("step-*.bin"):
        if old.name != name:
            with contextlib.suppress(FileNotFoundError):
                old.unlink()
    _log.info("training step saved to %s: %.1f MiB", folder, len(content) / 2**20)


def step_fingerprint(config: Config, lowered: LoweredStep, compiler_options: Mapping[str, str]) -> dict[str, str]:
    """What a training step depends on: the configuration as far as it enters it, and what has become of it.

    Args:
      config: resolved for the devices.
      lowered: the step.
      compiler_options: see `fingerprint`.
    """
    values = {leaf.path: str(leaf.value) for leaf in leaves(config) if not _is_in(leaf.path, OUTSIDE_THE_STEP)}
    found = fingerprint(lowered, compiler_options)
    return {"hardware": found["hardware"], **values, **found}


def _is_in(path: str, sections: Iterable[str]) -> bool:
    return any(path == section or path.startswith(f"{section}.") for section in sections)


def _short(values: Mapping[str, str], name: str) -> str:
    value = values.get(name, "not set")
    return value[:12] if name in _DIGESTS else value or "''"
