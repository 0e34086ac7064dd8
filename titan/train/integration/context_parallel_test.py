"""Sequences split over devices: the step equals that of one device, for every family and kind of attention."""

import dataclasses

import jax
import numpy as np
import pytest
import torch

from titan.core.config.validate import ConfigError
from titan.graph.executors.torch import place_local
from titan.graph.executors.xla import jax_mesh, sharding
from titan.graph.ir.dialect import graphs_of
from titan.parallel.mesh import MeshSpec
from titan.train.config.kernels import SplashAttentionKernelConfig
from titan.train.config.run import Config
from titan.train.config.training import TrainingConfig
from titan.train.sharding.mesh_axes import data_share
from titan.train.sharding.token_order import in_mesh_order
from titan.train.step.state import LEARNING_RATE, batch_layouts
from titan.train.testing.batches import batch
from titan.train.testing.case import ONE, Case
from titan.train.testing.executed import evaluate_xla, run_xla
from titan.train.testing.graphs import assert_one_program, captured, graph_of
from titan.train.testing.grid import grid
from titan.train.testing.models import BATCH, LENGTH
from titan.train.testing.outcome import assert_same

CP4 = MeshSpec(("cp",), (4,))
FSDP_CP2, FSDP_CP4 = MeshSpec(("dp_shard", "cp"), (2, 2)), MeshSpec(("dp_shard", "cp"), (2, 4))
HSDP_CP2 = MeshSpec(("dp_replicate", "dp_shard", "cp"), (2, 2, 2))
FSDP_CP2_TP2 = MeshSpec(("dp_shard", "cp", "tp"), (2, 2, 2))
TOLERANCE = 1e-5  # of the largest value: float32 sums in another order
# Of the largest value: a matmul's result, and the partial sums of it on two devices, are each rounded to 8 bits.
BFLOAT16_TOLERANCE = 1.5e-2

CASES = {
    "llama3_cp4": Case("llama3_shared", CP4),
    "llama3_fsdp2_cp4_kernels_scan": Case(
        "llama3_shared", FSDP_CP4, scan=True, memory_policy="selective", kernels=True, fused_loss="xla"
    ),
    "llama3_hsdp4_cp2_microbatches": Case("llama3_shared", HSDP_CP2, microbatches=2),
    "llama3_fsdp2_cp2_tp2_kernels": Case("llama3_shared", FSDP_CP2_TP2, kernels=True, fused_loss="xla"),
    "tied_cp4": Case("qwen3_shared", CP4),
    "tied_fsdp2_cp4": Case("qwen3_shared", FSDP_CP4),
    "moe_fsdp2_cp2": Case("qwen3_moe_shared", FSDP_CP2),
    "moe_fsdp2_cp4": Case("qwen3_moe_shared", FSDP_CP4),
    "muse_fsdp2_cp2_kernels": Case("muse_glimmer_shared", FSDP_CP2, kernels=True, fused_loss="xla"),
    "muse_fsdp2_cp4": Case("muse_glimmer_shared", FSDP_CP4),
}
_EXHAUSTIVE = ("llama3_cp4", "tied_fsdp2_cp4", "moe_fsdp2_cp4", "muse_fsdp2_cp4")


@pytest.mark.parametrize("case", grid(CASES, _EXHAUSTIVE))
def test_split_sequences_equal_one_device(case):
    assert_same(run_xla(case), run_xla(Case(case.model)), TOLERANCE)


@pytest.mark.parametrize("case", grid(CASES, CASES.keys() - {"moe_fsdp2_cp2"}))
def test_every_device_has_the_same_program(case):
    assert_one_program(case)


def test_in_bfloat16_split_sequences_and_layers_equal_one_device_but_for_its_rounding():
    case, one = (Case("llama3_shared", mesh, gather_dtype="bfloat16", scan=True) for mesh in (FSDP_CP2_TP2, ONE))
    assert_same(run_xla(case), run_xla(one), BFLOAT16_TOLERANCE)


def test_experts_in_a_number_that_the_devices_do_not_divide_are_sharded_on_another_dim():
    state = captured(CASES["moe_fsdp2_cp2"]).state
    layout = state["params/layers.0.feed_forward.experts.w1"]
    assert layout.shape[0] == 6 and layout.axes_by_dim(FSDP_CP2) == ((), ("dp_shard", "cp"), ())


@pytest.mark.parametrize("scan", (False, True), ids=("layers", "scan"))
@pytest.mark.parametrize("memory_policy", ("full", "selective,layers.*.feed_forward=save"))
def test_gathered_keys_and_values_are_gathered_again_for_the_backward(memory_policy, scan):
    case = Case("llama3_shared", CP4, kernels=True, scan=scan, memory_policy=memory_policy)
    kept = _kept(graph_of(case).module)
    assert kept  # layers' inputs at least
    assert [value for value in kept if value.meta["val"].numel() >= _NUM_GATHERED] == []


# Elements of the keys of all tokens of all rows, of which no other value of a layer has so many.
_NUM_GATHERED = BATCH * 4 * LENGTH * 8


def _kept(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """What layers compute in the forward pass, or one turn of a loop over them does, and the backward pass reads."""
    graph = module.graph
    loops = list(graph.find_nodes(op="call_function", target=torch.ops.higher_order.scan))
    if loops:
        body = getattr(module, loops[0].args[0].target).graph
        return list(body.output_node().args[0][len(loops[0].args[1]) :])
    made = [
        node for node in graph.nodes if node.meta.get("region") == "forward" and "layers" in node.meta["module_fqn"]
    ]
    return [node for node in made if any(user.meta.get("region") == "backward" for user in node.users)]


def test_with_the_splash_kernel_no_mask_of_queries_and_keys_is_made():
    module = graph_of(Case("muse_glimmer_shared", CP4, kernels=True, scan=True)).module
    shapes = {tuple(node.meta["val"].shape) for part in graphs_of(module) for node in part.nodes if _is_bool(node)}
    assert shapes  # labels that count, for one
    assert [shape for shape in shapes if shape[-2:] == (LENGTH // 4, LENGTH)] == []


def _is_bool(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def test_validation_equals_one_device():
    split, one = (evaluate_xla(Case("muse_glimmer_shared", mesh)) for mesh in (FSDP_CP4, ONE))
    assert split["num_tokens"] == one["num_tokens"] == (batch()["labels"] != -100).sum()
    assert split["loss_sum"] == pytest.approx(one["loss_sum"], rel=TOLERANCE)


def test_each_device_has_the_same_number_of_keys_to_see():
    """With equal chunks in the order of the sequence, the last device would have seven times the first one's work."""
    tensors = Config().model.batch_tensors(LENGTH)
    index = in_mesh_order({"positions": np.arange(LENGTH)[None, None]}, CP4, tensors)["positions"]
    seen = (index[0, 0].reshape(4, -1) + 1).sum(axis=1)
    assert len(set(seen)) == 1


def test_tokens_keep_their_labels_positions_and_documents():
    whole = batch()
    moved = in_mesh_order(whole, FSDP_CP4, Config().model.batch_tensors(LENGTH))
    names = [name for name in whole if name != LEARNING_RATE]
    assert moved[LEARNING_RATE] == whole[LEARNING_RATE]
    for row in range(BATCH):
        before, after = (
            sorted(zip(*(arrays[name][0, row].tolist() for name in names), strict=True)) for arrays in (whole, moved)
        )
        assert before == after
    assert not np.array_equal(moved["tokens"], whole["tokens"])


def test_each_rank_of_the_torch_executor_has_the_part_that_xla_places_on_its_device():
    mesh = FSDP_CP4
    whole = {name: array for name, array in batch().items() if name != LEARNING_RATE}
    tensors = Config().model.batch_tensors(LENGTH)
    layouts = batch_layouts(tensors, {name: array.shape for name, array in whole.items()}, mesh)
    devices = jax_mesh(mesh, jax.devices())
    for name, layout in layouts.items():
        placed_by_xla = jax.device_put(whole[name], sharding(layout, mesh, devices))
        shards = {shard.device: np.asarray(shard.data) for shard in placed_by_xla.addressable_shards}
        for rank, device in enumerate(devices.devices.flat):
            share, num_shares = data_share(mesh, range(mesh.num_devices), rank)
            rows = {name: np.split(array, num_shares, axis=1)[share] for name, array in whole.items()}
            np.testing.assert_array_equal(place_local(rows, layouts, mesh, rank)[name], shards[device])


@pytest.mark.parametrize(
    "changes, message",
    (
        (
            {"training": TrainingConfig(sequence_length=36)},
            "--training.sequence_length: 36 tokens cannot be split into two chunks for each of context_parallel=4 "
            "devices; give a multiple of 8, e.g. 40",
        ),
        (
            {"splash_attention_kernel": SplashAttentionKernelConfig(enable=True, implementation="tokamax")},
            "--splash_attention_kernel.implementation: tokamax's kernel takes whole sequences, which context_parallel "
            "splits; give auto, jax or xla",
        ),
    ),
)
def test_what_cannot_be_split_is_refused(changes, message):
    config = Case("llama3_shared", CP4).config
    config.validate()
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(config, **changes).validate()
    assert str(error.value) == message
