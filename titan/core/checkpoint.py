"""Checkpoints of a run: written in the background by Orbax, verified by a digest per array when read back."""

import asyncio
import contextlib
import dataclasses
import json
import os
import zlib
from collections.abc import Iterator
from typing import Any, Self

from absl import logging

from titan.core.array_digest import array_digest
from titan.core.config.tree import option
from titan.core.config.validate import check_exists, check_writable_folder

_SET_ASIDE = "set_aside"  # subfolder for checkpoints that are damaged or of a course the run has left


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Where a run keeps its state, how often it saves it, and whether it begins from it."""

    folder: str = option("", "The run's folder. Empty: ~/.cache/titan/runs/ and the run's name.")
    interval: int = option(50, "Steps between checkpoints.", minimum=1)
    keep: int = option(3, "How many of the newest checkpoints are kept.", minimum=1)
    asynchronous: bool = option(True, "Write in the background; a step then waits for the copy to the host only.")
    resume: bool = option(True, "Begin from the newest intact checkpoint in the folder, if there is one.")
    load_hf: str = option(
        "", "Hugging Face folder (safetensors) whose weights a new run begins from. Empty: initialised weights."
    )
    save_hf: str = option(
        "", "Folder into which the final weights are written in Hugging Face's format. Empty: not written."
    )

    def validate(self) -> None:
        """Raises ConfigError for a folder that cannot be read or written."""
        if self.folder:
            check_writable_folder("checkpoint.folder", self.folder)
        if self.load_hf:
            check_exists("checkpoint.load_hf", self.load_hf)
        if self.save_hf:
            check_writable_folder("checkpoint.save_hf", self.save_hf)


class CheckpointError(Exception):
    """A checkpoint could not be written, or none could be read; `str()` is one line with the path and the cure."""


class CheckpointMismatchError(ValueError):
    """A checkpoint of another model than the one that is to be restored.

    Attributes:
      problem: names the checkpoint and the first array that differs.
      cure: what to do.
    """

    def __init__(self, problem: str, cure: str):
        super().__init__(f"{problem}; {cure}")
        self.problem = problem
        self.cure = cure


class Checkpointer:
    """Saves and restores (arrays, host values) as numbered folders `FOLDER/STEP`.

    A checkpoint appears under its number by one rename, when all of it is written: a process killed at any moment
    leaves the finished ones as they are, and a temporary folder that the next `Checkpointer` removes.

    Each array's digest, shape and dtype are recorded beside the host values, which carry a CRC of their own. Restoring
    computes the digests anew from the arrays on the devices, so that damage anywhere between the two device memories
    is found. The digest (see `array_digest`) does not depend on the sharding, and costs one pass over the state.

    In a run of several processes every process makes the same calls; only one per folder at a time may save.
    """

    def __init__(self, config: CheckpointConfig, folder: str):
        """Opens `folder`, and makes it if it is missing.

        What killed saves have left is removed before the first save at the latest.

        Args:
          config: the section `checkpoint`; its `folder` is not read here.
          folder: the folder that holds the numbered checkpoints.
        """
        import orbax.checkpoint as ocp

        _quiet_orbax()
        self.folder = os.path.abspath(os.path.expanduser(folder))
        self._interval = config.interval
        self._asynchronous = config.asynchronous
        self._own: set[int] = set()  # steps restored or saved here
        self._restored_step = -1
        self._is_set_aside_checked = False
        self._ocp = ocp
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                # `save` below decides when; Orbax's default policies would ask for a coordination service.
                save_decision_policy=ocp.checkpoint_managers.FixedIntervalPolicy(1),
                preservation_policy=ocp.checkpoint_managers.LatestN(config.keep),
                # Made in the background, folders that cannot be made leave threads waiting for minutes at exit.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
                cleanup_tmp_directories=True,
                save_root_metadata=False,
                lightweight_initialize=True,  # a damaged step must not keep the folder from opening
            ),
        )

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints on disk, ascending; whether they are intact shows on `restore`.

        Of several processes all must call it. They get what the first one sees: a shared file system may still show
        another one an older listing.
        """
        return _of_first_process(sorted(self._ocp.utils.checkpoint_steps(self.folder)))

    def due(self, step: int) -> bool:
        """Whether the interval asks for a checkpoint after `step`."""
        return step > 0 and step % self._interval == 0

    def save(self, step: int, arrays: Any, host: dict[str, Any], *, force: bool = False) -> bool:
        """Saves a checkpoint if one is due (or `force`) and `step` is not saved yet.

        Returns as soon as the arrays are copied to host memory, after which they may be donated; writing goes on in
        the background. A save that still runs is waited for first, so at most one copy of the state is held.
        Checkpoints newer than what this run was restored from (damaged, or of a run that did not resume) are moved to
        `FOLDER/set_aside` first, so that they neither take this run's places nor are ever restored in its stead.

        Args:
          step: number of steps done.
          arrays: nested dict with jax.Array leaves of any sharding.
          host: values that JSON can hold.
          force: save although none is due, e.g. on SIGTERM; follow it by `wait()`.

        Returns:
          Whether a save was begun.

        Raises:
          CheckpointError: the save before this one, or this one, failed.
        """
        if not (force or self.due(step)) or step in self._own:
            return False
        import jax

        self.wait()
        text = json.dumps({"host": host, "arrays": _describe(arrays)})
        arrays = jax.tree.map(_detach, arrays)
        try:
            self._set_aside_strangers()
            self._manager.save(
                step,
                args=self._ocp.args.Composite(
                    arrays=self._ocp.args.StandardSave(arrays),
                    host=self._ocp.args.JsonSave({"text": text, "crc32": zlib.crc32(text.encode())}),
                ),
                force=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise self._save_error(error) from error
        self._own.add(step)
        if not self._asynchronous:
            self.wait()
        return True

    def wait(self) -> None:
        """Waits until the save in progress, if any, is finished on disk. Raises CheckpointError if it failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # whatever the background thread met: a full disk, a lost mount
            raise self._save_error(error) from error

    def restore(self, abstract_arrays: Any, step: int | None = None) -> tuple[int, Any, dict[str, Any]] | None:
        """Reads the newest intact checkpoint, onto whatever devices and shardings are asked for.

        A damaged one is named in a warning, and the one before it is used.

        Args:
          abstract_arrays: tree of jax.ShapeDtypeStruct with shardings (none: the first device), in the structure,
            shapes and dtypes that were saved.
          step: read this checkpoint and no other.

        Returns:
          (step, arrays, host), or None when the folder holds no checkpoint at all.

        Raises:
          CheckpointError: there are checkpoints, none of them is intact; or `step` is missing or damaged.
          CheckpointMismatchError: the checkpoint is of another model: names the array that differs.
        """
        self.wait()
        candidates = self.steps()[::-1] if step is None else [step]
        for candidate in candidates:
            path = os.path.join(self.folder, str(candidate))
            try:
                arrays, host = self._read(candidate, path, abstract_arrays)
            except _DamagedError as damage:
                logging.warning("checkpoint %s is damaged and not used: %s", path, damage)
                continue
            self._restored_step = candidate
            self._own = {candidate}
            self._is_set_aside_checked = False
            return candidate, arrays, host
        if not candidates:
            return None
        if step is not None:
            raise CheckpointError(
                f"checkpoint {self.folder}/{step} is missing or damaged; choose out of {self.steps()}"
            )
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in {self.folder} is intact; restore the folder from a copy, "
            "or begin anew with --checkpoint.resume=false or another --checkpoint.folder"
        )

    def close(self) -> None:
        """Waits for the save in progress and frees the background threads."""
        self.wait()
        self._manager.close()

    def _read(self, step: int, path: str, abstract_arrays: Any) -> tuple[Any, dict[str, Any]]:
        """One checkpoint's arrays and host values. Raises _DamagedError or CheckpointMismatchError."""
        args = self._ocp.args
        with _damage_on_all_processes(), _drained_event_loops():
            saved = self._manager.restore(step, args=args.Composite(host=args.JsonRestore())).host
            if zlib.crc32(saved["text"].encode()) != saved["crc32"]:
                raise ValueError("host/metadata does not match its CRC")
            record = json.loads(saved["text"])
        _check_same_model(path, record["arrays"], abstract_arrays)
        with _damage_on_all_processes(), _drained_event_loops():
            restore_args = args.Composite(arrays=args.StandardRestore(_with_shardings(abstract_arrays)))
            arrays = self._manager.restore(step, args=restore_args).arrays
        # The digests are global values: all processes see the same ones and so agree without asking.
        read = _describe(arrays)
        wrong = [name for name, entry in record["arrays"].items() if read[name]["digest"] != entry["digest"]]
        if wrong:
            raise _DamagedError(
                f"{len(wrong)} of {len(read)} arrays do not match their digest, the first is {wrong[0]}"
            )
        return arrays, record["host"]

    def _set_aside_strangers(self) -> None:
        """Moves checkpoints newer than the restored one, and not saved here, out of the numbered sequence."""
        if self._is_set_aside_checked:
            return
        import jax

        self._is_set_aside_checked = True
        strangers = [step for step in self.steps() if step > self._restored_step and step not in self._own]
        self._ocp.utils.sync_global_processes("titan_checkpoint_listed")  # before any process moves one
        if not strangers:
            return
        if jax.process_index() == 0:
            os.makedirs(os.path.join(self.folder, _SET_ASIDE), exist_ok=True)
            for step in strangers:
                target = os.path.join(self.folder, _SET_ASIDE, str(step))
                num_before = 0
                while os.path.exists(target):
                    num_before += 1
                    target = os.path.join(self.folder, _SET_ASIDE, f"{step}.{num_before}")
                os.rename(os.path.join(self.folder, str(step)), target)
                logging.warning("checkpoint %s/%d is not of this run's course: moved to %s", self.folder, step, target)
        self._ocp.utils.sync_global_processes("titan_checkpoint_set_aside")
        self._manager.reload()

    def _save_error(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"saving a checkpoint in {self.folder} failed: {_one_line(error)}; "
            "check the disk's free space and permissions"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        import jax

        # Of several processes one that fails must not wait for a save in progress, which waits for the others.
        if kind is None or jax.process_count() == 1:
            self.close()


def _of_first_process(numbers: list[int]) -> list[int]:
    """The numbers that process 0 comes with, on all processes."""
    import jax

    if jax.process_count() == 1:
        return numbers
    import numpy as np
    from jax.experimental.multihost_utils import broadcast_one_to_all

    count = int(broadcast_one_to_all(np.int32(len(numbers))))
    if count == 0:
        return []
    of_this_one = np.resize(np.array(numbers or [0], np.int32), count)  # any of the right shape, but on process 0
    return [int(number) for number in broadcast_one_to_all(of_this_one)]


class _DamagedError(Exception):
    """A checkpoint whose bytes are missing or wrong."""


@contextlib.contextmanager
def _damage_on_all_processes() -> Iterator[None]:
    """Turns an error of reading into _DamagedError on every process of the run, so that all go on together."""
    import jax

    error = None
    try:
        yield
    except jax.errors.JaxRuntimeError:  # out of memory, or a lost device: it says nothing about the files
        raise
    except Exception as caught:  # damage can surface as any error of Orbax, TensorStore or json
        error = caught
    num_failed = int(error is not None)
    if jax.process_count() > 1:
        import numpy as np
        from jax.experimental import multihost_utils

        num_failed = int(np.sum(multihost_utils.process_allgather(np.int32(num_failed))))
    if num_failed:
        raise _DamagedError(_one_line(error) if error else "another process cannot read it") from error


@contextlib.contextmanager
def _drained_event_loops() -> Iterator[None]:
    """Event loops made in the `with` block wait for their tasks before they close.

    Orbax closes its loop at the first array that it cannot read. TensorStore's threads, still reading the others, would
    then each print a traceback about a closed loop.
    """

    class DrainedLoop(asyncio.SelectorEventLoop):
        def close(self) -> None:
            # Of several arrays that cannot be read the first is reported, by Orbax; asyncio would print the others.
            self.set_exception_handler(lambda loop, context: None)
            if not self.is_closed():
                tasks = asyncio.all_tasks(self)
                if tasks:
                    self.run_until_complete(asyncio.wait(tasks))
            super().close()

    new_event_loop, asyncio.new_event_loop = asyncio.new_event_loop, DrainedLoop
    try:
        yield
    finally:
        asyncio.new_event_loop = new_event_loop


def _one_line(error: BaseException) -> str:
    """Kind and message of the error at the root of a chain, cut to a readable length."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def _leaves(tree: Any) -> dict[str, Any]:
    """Leaf by path, e.g. "['params']['embed.weight']"."""
    import jax

    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _describe(arrays: Any) -> dict[str, dict[str, Any]]:
    """Shape, dtype and digest of every array by path."""
    import jax

    leaves = _leaves(arrays)
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            raise TypeError(f"checkpoint leaf {name} is a {type(leaf).__name__}, not a jax.Array; save it among `host`")
    digests = jax.device_get({name: array_digest(leaf) for name, leaf in leaves.items()})
    return {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "digest": f"{int(digests[name]):08x}"}
        for name, leaf in leaves.items()
    }


def _check_same_model(path: str, saved: dict[str, dict[str, Any]], abstract_arrays: Any) -> None:
    """Raises CheckpointMismatchError unless names, shapes and dtypes are the saved ones."""
    asked = {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for name, leaf in _leaves(abstract_arrays).items()
    }
    cure = "run with the configuration it was saved with (beside the checkpoints), or with another --checkpoint.folder"
    for name in sorted(saved.keys() | asked.keys()):
        if name not in asked:
            raise CheckpointMismatchError(f"checkpoint {path} has an array {name} that this run does not have", cure)
        if name not in saved:
            raise CheckpointMismatchError(f"checkpoint {path} lacks the array {name} of this run", cure)
        was, now = ("{dtype}{shape}".format(**entry) for entry in (saved[name], asked[name]))
        if was != now:
            raise CheckpointMismatchError(f"checkpoint {path} has {name} as {was}, this run as {now}", cure)


def _with_shardings(abstract_arrays: Any) -> Any:
    import jax

    single = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or single), abstract_arrays
    )


def _detach(array: Any) -> Any:
    """What is safe to read after the caller donates `array`.

    Orbax copies device memory to the host before it returns. On CPU devices that copy would be a view of the very
    buffer that the next step overwrites, so there it is made here.
    """
    import jax.numpy as jnp

    is_host_memory = next(iter(array.sharding.device_set)).platform == "cpu"
    return jnp.copy(array) if is_host_memory else array


def _quiet_orbax() -> None:
    """Drops Orbax's messages below warnings; it logs dozens of lines for every save through absl's one logger."""
    logger = logging.get_absl_logger()
    if _keep_log_record not in logger.filters:
        logger.addFilter(_keep_log_record)


def _keep_log_record(record: Any) -> bool:
    return record.levelno >= logging.converter.STANDARD_WARNING or f"{os.sep}orbax{os.sep}" not in record.pathname
