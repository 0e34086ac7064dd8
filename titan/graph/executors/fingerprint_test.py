"""Digests of programs and graphs: what is computed counts, where its code lies does not."""

import jax
import jax.numpy as jnp
import torch
from jax.experimental import pallas as pl
from jax.sharding import SingleDeviceSharding

from titan.graph.capture.trace import StepFunction, capture
from titan.graph.executors.fingerprint import fingerprint, graph_digest, program_digest
from titan.graph.executors.xla import lower_xla
from titan.kernels.tpu_compile import tpu_device
from titan.parallel.layout import TensorLayout
from titan.parallel.mesh import MeshSpec


def lowered_text(kernel):
    """StableHLO of a Mosaic kernel for a TPU that is not there."""
    device = tpu_device("v6e")
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=SingleDeviceSharding(device))
    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="kernel")
    with jax.default_device(device):
        return jax.jit(lambda x: call(x)).lower(x).as_text()


def double(x_ref, y_ref):
    y_ref[...] = x_ref[...] * 2.0


def test_of_a_kernel_counts_what_it_computes_and_not_where_its_code_lies():
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2.0

    def triple(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 3.0

    texts = [lowered_text(function) for function in (double, kernel, triple)]
    assert len(set(texts)) == 3  # the line is in the kernel's bytecode
    one, same, other = map(program_digest, texts)
    assert one == same != other


def graph_of(step):
    layout = TensorLayout((4,), torch.float32)
    return capture(lambda mesh: StepFunction(step, torch.nn.Module()), {"x": layout}, {"y": layout}, MeshSpec((), ()))


def test_of_a_graph_ops_and_constants_count():
    def add(state, batch):
        return {"x": state["x"] + batch["y"] * torch.tensor([1.0, 2.0, 3.0, 4.0])}, {"z": state["x"].sum()}

    def same(state, batch):
        return {"x": state["x"] + batch["y"] * torch.tensor([1.0, 2.0, 3.0, 4.0])}, {"z": state["x"].sum()}

    def constant(state, batch):
        return {"x": state["x"] + batch["y"] * torch.tensor([1.0, 2.0, 3.0, 5.0])}, {"z": state["x"].sum()}

    def op(state, batch):
        return {"x": state["x"] - batch["y"] * torch.tensor([1.0, 2.0, 3.0, 4.0])}, {"z": state["x"].sum()}

    graphs = [graph_of(step) for step in (add, same, constant, op)]
    assert graphs[0].text() != graphs[1].text()  # their lines
    one, two, three, four = map(graph_digest, graphs)
    assert one == two
    assert len({one, three, four}) == 3


def test_options_of_the_environment_and_of_the_compiler_count(monkeypatch):
    lowered = lower_xla(graph_of(lambda state, batch: ({"x": state["x"] + batch["y"]}, {})), jax.devices("cpu")[:1])
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    before = fingerprint(lowered, {})
    assert before.keys() >= {"hardware", "mesh", "batch.y", "versions.jaxlib", "versions.compiler", "graph", "program"}
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/x --xla_cpu_enable_fast_math=true")
    assert fingerprint(lowered, {"xla_a": "1"}) == {
        **before,
        "compiler_options.xla_a": "1",
        "environment.XLA_FLAGS": "--xla_cpu_enable_fast_math=true",
    }
