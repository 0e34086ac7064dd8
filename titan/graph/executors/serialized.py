"""A compiled step as bytes, and back. One compiled for TPUs that are not there can be written, and loaded on them."""

import pickle
import time

import jax
from jax.experimental import serialize_executable

from titan.graph.executors.xla import LoweredStep, XlaExecutable


class NotLoadableError(RuntimeError):
    """Bytes that these devices cannot load; the message is the runtime's."""


def to_bytes(executable: XlaExecutable) -> bytes:
    """The compiled program, for `from_bytes` in the same versions of JAX and of its runtime."""
    content, _, _ = serialize_executable.serialize(executable.compiled)
    return content


def from_bytes(content: bytes, lowered: LoweredStep) -> XlaExecutable:
    """The executable of a step from what `to_bytes` gave of it, in place of `lowered.compile()`.

    Args:
      content: trusted: it is a pickle, and a program.
      lowered: the same step for the same devices, which are there.

    Raises:
      NotLoadableError: it cannot be loaded on these devices.
    """
    graph = lowered.graph
    devices = list(lowered.mesh.devices.flat)
    num_outputs = len(graph.metrics) + (len(graph.state) if graph.updates_state else 0)
    # As the step is called: arrays by position, none by keyword; a tuple of arrays comes out.
    arguments = jax.tree.structure((tuple(range(len(graph.state) + len(graph.batch))), {}))
    results = jax.tree.structure(tuple(range(num_outputs)))
    start = time.perf_counter()
    try:
        compiled = serialize_executable.deserialize_and_load(
            content, arguments, results, backend=devices[0].client, execution_devices=devices
        )
    except (jax.errors.JaxRuntimeError, pickle.UnpicklingError, ValueError, KeyError) as error:
        raise NotLoadableError(str(error)) from error
    return XlaExecutable(graph, lowered.mesh, compiled, lowered.lower_seconds, time.perf_counter() - start)
