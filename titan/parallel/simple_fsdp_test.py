"""SimpleFSDP against one process, on real process groups, and what it does to a module.

The checks that need process groups share their processes, and each is a test of its own.
"""

import functools
import pathlib
import subprocess
import sys
import traceback
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from titan.parallel.axis_index import axis_index
from titan.parallel.mesh import MeshSpec, fake_world
from titan.parallel.simple_fsdp import ShardingPolicy, fsdp_placements, reduce_replicas, simple_fsdp
from titan.parallel.weight_plan import WeightPlan

FSDP, DDP, HSDP = ("dp_shard",), ("dp_replicate",), ("dp_replicate", "dp_shard")


class _Scale(nn.Module):
    """Two of these in one model are modules of one class with weights of one name."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(shape) + 0.5)
        self.seen_dtype = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        self.seen_dtype = weight.dtype
        return x * weight.to(x.dtype)


class _Model(nn.Module):
    """Weights that four ranks divide on dim 0, on dim 1 alone and not at all, a tied one and one read twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 8)
        self.up = nn.Linear(8, 6)  # weight [6, 8]: dim 1; bias [6]: nothing
        self.down = nn.Linear(6, 8)  # weight [8, 6] and bias [8]: dim 0
        self.temperature = _Scale(())
        self.scale = _Scale((8,))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens_B: torch.Tensor) -> torch.Tensor:
        x_BD = self.scale(self.embedding(tokens_B))
        x_BD = self.scale(x_BD + self.down(self.up(x_BD).tanh()))
        return self.temperature(self.head(x_BD))


_TOKENS = torch.arange(10) % 12


def _rows(rank: int, world_size: int) -> slice:
    """A share of the ten tokens that differs in size from rank to rank."""
    return {2: [slice(0, 3), slice(3, 10)], 4: [slice(0, 1), slice(1, 3), slice(3, 6), slice(6, 10)]}[world_size][rank]


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float(), (tokens + 1) % 12, reduction="sum")


@functools.cache
def _reference() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of all tokens and gradients, in one process."""
    model = _Model()
    logits = model(_TOKENS)
    _loss(logits, _TOKENS).backward()
    return logits.detach(), {name: weight.grad for name, weight in model.named_parameters()}


def _mesh(axes: tuple[str, ...]) -> DeviceMesh:
    sizes = (dist.get_world_size(),) if len(axes) == 1 else (2, dist.get_world_size() // 2)
    return MeshSpec(axes, sizes).device_mesh("cpu")


def _backward(model: nn.Module) -> torch.Tensor:
    rows = _rows(dist.get_rank(), dist.get_world_size())
    logits = model(_TOKENS[rows])
    _loss(logits, _TOKENS[rows]).backward()
    return logits.detach()


# Of a tensor's largest gradient. float32 sums in another order; bfloat16 rounds by 2^-9 a weight, product or sum, and
# these gradients are a few such roundings deep.
_FLOAT32_ERROR, _BFLOAT16_ERROR = 1e-5, 3e-2


def _assert_grads(model: nn.Module, expected: dict[str, torch.Tensor], max_error: float = _FLOAT32_ERROR) -> None:
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    assert set(grads) == set(expected)
    for name, grad in grads.items():
        error = (grad.full_tensor() - expected[name]).abs().max() / expected[name].abs().max()
        assert error <= max_error, f"{name}: off by {error:.1e} of the largest gradient"


class _Collectives(TorchDispatchMode):
    """Records op name, dtype and shape of the input of each collective."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, torch.dtype, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        arguments = [argument.name for argument in func._schema.arguments]
        if func.namespace in ("_c10d_functional", "titan") and "group_name" in arguments:
            self.calls.append((func.__name__.partition(".")[0], args[0].dtype, tuple(args[0].shape)))
        return func(*args, **(kwargs or {}))

    def count(self, name: str) -> int:
        return [call[0] for call in self.calls].count(name)


# Checks: functions of no argument that every rank of a world runs, alike.


def _matches_one_process(axes: tuple[str, ...], average: bool) -> None:
    logits, grads = _reference()
    model = simple_fsdp(_Model(), _mesh(axes), ShardingPolicy(average=average))
    ours = _backward(model)
    torch.testing.assert_close(ours, logits[_rows(dist.get_rank(), dist.get_world_size())], rtol=1e-5, atol=1e-6)
    divisor = dist.get_world_size() if average else 1
    _assert_grads(model, {name: grad / divisor for name, grad in grads.items()})
    for name, weight in model.named_parameters():
        assert weight.grad.placements == weight.placements, name


def _optimizer_updates_shards() -> None:
    reference, ours = _Model(), simple_fsdp(_Model(), _mesh(HSDP))
    _loss(reference(_TOKENS), _TOKENS).backward()
    _backward(ours)
    for model in (reference, ours):
        torch.optim.AdamW(model.parameters(), lr=0.1).step()
    for (name, ours_), theirs in zip(ours.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours_.full_tensor(), theirs, rtol=1e-4, atol=1e-5, msg=name)


def _dtypes() -> None:
    model = simple_fsdp(_Model(), _mesh(HSDP), ShardingPolicy(gather_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    with _Collectives() as collectives:
        _backward(model)
    assert model.scale.seen_dtype is torch.bfloat16
    dtypes = {name: {call[1] for call in collectives.calls if call[0] == name} for name, *_ in collectives.calls}
    assert dtypes == {
        "all_gather_into_tensor": {torch.bfloat16},
        "reduce_scatter_tensor": {torch.float32},
        "all_reduce": {torch.float32},
    }, dtypes
    assert {weight.grad.dtype for weight in model.parameters()} == {torch.float32}
    _assert_grads(model, _reference()[1], _BFLOAT16_ERROR)

    model = simple_fsdp(_Model(), _mesh(HSDP), ShardingPolicy(reduce_dtype=torch.bfloat16))
    with _Collectives() as collectives:
        _backward(model)
    assert model.scale.seen_dtype is torch.float32
    assert {call[1] for call in collectives.calls if call[0] != "all_gather_into_tensor"} == {torch.bfloat16}
    assert {weight.grad.dtype for weight in model.parameters()} == {torch.float32}
    _assert_grads(model, _reference()[1], _BFLOAT16_ERROR)


def _hsdp_reduces_in_order() -> None:
    layer = simple_fsdp(nn.Linear(8, 6, bias=False), _mesh(HSDP))
    output = layer(torch.ones(3, 8))
    with _Collectives() as collectives:
        output.sum().backward()
    assert [(name, shape) for name, _, shape in collectives.calls] == [
        ("reduce_scatter_tensor", (6, 8)),
        ("all_reduce", (3, 8)),
    ]


def _communicates_along_the_sharded_dim() -> None:
    # The first dim cannot be sharded. Slices of the other put below each other, as DTensor has them, would on TPUs be
    # rows of a few elements, each padded to 128.
    layer = simple_fsdp(nn.Linear(8, 5, bias=False), _mesh(HSDP))
    with _Collectives() as collectives:
        layer(torch.ones(3, 8)).sum().backward()
    assert [(name, shape) for name, _, shape in collectives.calls] == [
        ("all_gather_along", (5, 4)),
        ("reduce_scatter_along", (5, 8)),
        ("all_reduce", (5, 4)),
    ]


def _deferred_replicas() -> None:
    model = simple_fsdp(_Model(), _mesh(HSDP), ShardingPolicy(defer_replicas=True))
    rank, num_microbatches = dist.get_rank(), 3
    weights = dict(model.named_parameters())
    grads = None
    with _Collectives() as collectives:
        for _ in range(num_microbatches):
            rows = _rows(rank, dist.get_world_size())
            loss = _loss(model(_TOKENS[rows]), _TOKENS[rows])
            new = torch.autograd.grad(loss, list(weights.values()))
            grads = [old + grad for old, grad in zip(grads, new, strict=True)] if grads else list(new)
    # The temperature is not sharded: along the shard axis its gradient is all-reduced at once.
    assert [name for name, weight in weights.items() if not any(p.is_shard() for p in weight.placements)] == [
        "temperature.weight"
    ]
    assert [call for call in collectives.calls if call[0] == "all_reduce"] == [
        ("all_reduce", torch.float32, ())
    ] * num_microbatches
    with _Collectives() as collectives:
        reduced = [reduce_replicas(grad) for grad in grads]
    assert [call[0] for call in collectives.calls] == ["all_reduce"] * len(weights)
    for (name, weight), grad in zip(weights.items(), reduced, strict=True):
        assert grad.placements == weight.placements
        torch.testing.assert_close(grad.full_tensor(), 3 * _reference()[1][name], rtol=1e-5, atol=1e-6)
        assert reduce_replicas(grad) is grad


class _Halves(nn.Module):
    """A feed-forward whose code suits a slice of it: the sum of all slices' results is the whole's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = _Scale((8,))
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.scale(x_BD)).tanh())


def _plans_split_weights_along_further_axes() -> None:
    x_BD, weight_BD = torch.rand(4, 8), torch.rand(4, 8)
    reference = _Halves()
    (reference(x_BD) * weight_BD).sum().backward()
    mesh = MeshSpec(("dp_shard", "tp"), (2, 2)).device_mesh("cpu")
    plans = {
        "scale.weight": WeightPlan(partial=("tp",)),
        "up.weight": WeightPlan({"tp": 0}),
        "down.weight": WeightPlan({"tp": 1}),
    }
    model = simple_fsdp(_Halves(), mesh, plans=plans)
    rows = slice(mesh.get_local_rank("dp_shard"), None, 2)
    # A sum over `tp` of results is one of losses, these being linear in them, so that no collective is needed here.
    (model(x_BD[rows]) * weight_BD[rows]).sum().backward()
    assert model.up._parameters["weight"].placements == (Shard(1), Shard(0))
    assert model.up.weight.shape == (6, 8) and model.down.weight.shape == (8, 6)
    _assert_grads(model, {name: weight.grad for name, weight in reference.named_parameters()})


def _two_shard_axes_are_one_of_their_product() -> None:
    mesh = MeshSpec(("dp_shard", "cp"), (2, 2)).device_mesh("cpu")
    model = simple_fsdp(_Model(), mesh, ShardingPolicy(shard_axes=("dp_shard", "cp")))
    _backward(model)
    assert model.embedding._parameters["weight"].placements == (Shard(0), Shard(0))
    _assert_grads(model, _reference()[1])

    # Along another dim than the first, communicated in another way.
    torch.manual_seed(0)
    layer, inputs = nn.Linear(8, 5, bias=False), torch.randn(3, 8)
    upstream = torch.randn(3, 5)
    layer(inputs).backward(upstream)
    expected = {"weight": layer.weight.grad.clone() * dist.get_world_size()}
    layer.weight.grad = None
    sharded = simple_fsdp(layer, mesh, ShardingPolicy(shard_axes=("dp_shard", "cp")))
    assert sharded._parameters["weight"].placements == (Shard(1), Shard(1))
    sharded(inputs).backward(upstream)
    _assert_grads(sharded, expected)

    with pytest.raises(ValueError, match="shard axes cp, dp_shard are not in the order of the mesh's, dp_shard, cp"):
        simple_fsdp(nn.Linear(8, 5), mesh, ShardingPolicy(shard_axes=("cp", "dp_shard")))


def _policies_are_per_instance() -> None:
    first, second = _Scale((8,)), _Scale((8,))
    simple_fsdp(first, _mesh(FSDP), ShardingPolicy(gather_dtype=torch.bfloat16, average=True))
    simple_fsdp(second, _mesh(DDP))
    assert type(first) is type(second), "torch.compile would compile each module anew"
    for scale in (first, second):
        scale(torch.ones(8)).sum().backward()
    size = dist.get_world_size()
    assert (first.seen_dtype, second.seen_dtype) == (torch.bfloat16, torch.float32)
    assert first.weight.grad is None, "reading a weight gives a plain tensor, not the parameter"
    assert first._parameters["weight"].grad.placements == (Shard(0),)
    assert second._parameters["weight"].grad.placements == (Replicate(),)
    torch.testing.assert_close(first._parameters["weight"].grad.full_tensor(), torch.ones(8))
    torch.testing.assert_close(second._parameters["weight"].grad.full_tensor(), torch.full((8,), float(size)))


def _state_dict_round_trip() -> None:
    model = simple_fsdp(_Model(), _mesh(HSDP))
    saved = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert list(saved) == list(_Model().state_dict())
    before = model(_TOKENS).detach()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert not model(_TOKENS).any()
    model.load_state_dict(saved)
    assert torch.equal(model(_TOKENS), before)


def _reads_leave_the_weight_alone() -> None:
    model = nn.Sequential(nn.Linear(257, 256), nn.Linear(256, 257))  # weights sharded on dim 0 and 1, one bias on none
    expected = model(torch.ones(257)).detach()
    simple_fsdp(model, _mesh(FSDP))
    with torch.no_grad():
        read = model(torch.ones(257))
        assert not read.requires_grad and not model[0].weight.requires_grad
    torch.testing.assert_close(read, expected)
    model(torch.ones(257)).sum().backward()
    for name, weight in model.named_parameters():
        local = weight._local_tensor
        assert local.grad_fn is None and not local.requires_grad, f"{name} is part of a graph"
        assert local.untyped_storage().nbytes() == 4 * local.numel(), f"the full {name} is still in memory"


def _frozen_weights_have_no_gradient() -> None:
    layer = nn.Linear(8, 8)
    layer.weight.requires_grad_(False)
    simple_fsdp(layer, _mesh(FSDP))
    with _Collectives() as collectives:
        layer(torch.ones(8)).sum().backward()
    assert layer._parameters["weight"].grad is None and layer._parameters["bias"].grad is not None
    assert collectives.count("reduce_scatter_tensor") == 1


def _axis_index_is_the_coordinate() -> None:
    mesh = _mesh(HSDP)
    for axis, name in enumerate(HSDP):
        index = axis_index(mesh, name)
        assert index.dtype is torch.int32 and index.shape == () and int(index) == mesh.get_local_rank(axis)
    assert int(axis_index(_mesh(FSDP), "dp_shard")) == dist.get_rank()


def _shards_match_local_shapes() -> None:
    for axes in (FSDP, DDP, HSDP):
        mesh = _mesh(axes)
        spec = MeshSpec(axes, tuple(mesh.shape))
        for name, weight in simple_fsdp(_Model(), mesh).named_parameters():
            assert weight.placements == fsdp_placements(tuple(weight.shape), spec, ShardingPolicy()), name
            assert torch.equal(weight.full_tensor(), dict(_Model().named_parameters())[name]), name


_CHECKS: dict[int, dict[str, Callable[[], None]]] = {
    2: {
        f"{name}_matches_one_process": functools.partial(_matches_one_process, axes, False)
        for name, axes in {"fsdp": FSDP, "ddp": DDP}.items()
    },
    4: {
        **{
            f"{name}_average_{average}_matches_one_process": functools.partial(_matches_one_process, axes, average)
            for name, axes in {"fsdp": FSDP, "ddp": DDP, "hsdp": HSDP}.items()
            for average in (False, True)
        },
        **{
            check.__name__.strip("_"): check
            for check in (
                _optimizer_updates_shards,
                _dtypes,
                _hsdp_reduces_in_order,
                _communicates_along_the_sharded_dim,
                _deferred_replicas,
                _plans_split_weights_along_further_axes,
                _two_shard_axes_are_one_of_their_product,
                _policies_are_per_instance,
                _state_dict_round_trip,
                _reads_leave_the_weight_alone,
                _frozen_weights_have_no_gradient,
                _axis_index_is_the_coordinate,
                _shards_match_local_shapes,
            )
        },
    },
}


def _run_checks(rank: int, folder: str) -> None:
    """One process of all worlds, the smaller ones among the first ranks; leaves the traceback of each failed check."""
    torch.set_num_threads(1)
    for world_size, checks in _CHECKS.items():
        if rank >= world_size:
            continue
        store = f"file://{folder}/store{world_size}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        for name, check in checks.items():
            try:
                check()
            except Exception:
                pathlib.Path(folder, f"{world_size}.{name}.{rank}").write_text(traceback.format_exc())
            dist.barrier()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("results")
    torch.multiprocessing.spawn(_run_checks, (str(folder),), nprocs=max(_CHECKS))
    return folder


@pytest.mark.parametrize(("world_size", "check"), [(size, name) for size, checks in _CHECKS.items() for name in checks])
def test_processes(results, world_size: int, check: str) -> None:
    failed = sorted(results.glob(f"{world_size}.{check}.*"))
    assert not failed, f"rank {failed[0].suffix}: {failed[0].read_text()}"


# What needs no process group but a fake one.

_FOUR = MeshSpec(("dp_shard",), (4,))


def test_a_second_application_is_an_error_and_changes_nothing() -> None:
    with fake_world(_FOUR) as mesh:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        simple_fsdp(model[1], mesh)
        with pytest.raises(ValueError, match="module 1 is parametrised by simple_fsdp already"):
            simple_fsdp(model, mesh)
        assert type(model[0]) is nn.Linear and not isinstance(model[0].weight, DTensor)


def test_a_mesh_must_have_one_of_the_policys_axes() -> None:
    with fake_world(_FOUR), pytest.raises(ValueError, match="mesh_dim_names"):
        simple_fsdp(nn.Linear(4, 4), DeviceMesh("cpu", list(range(4))))
    with fake_world(MeshSpec(("data",), (4,))) as mesh:
        with pytest.raises(ValueError, match="axes data, none of the policy's dp_shard, dp_replicate"):
            simple_fsdp(nn.Linear(4, 4), mesh)
        simple_fsdp(nn.Linear(4, 4), mesh, ShardingPolicy(shard_axes=("data",)))
    with pytest.raises(ValueError, match="not both"):
        ShardingPolicy(shard_axes=("data",), replicate_axis="data")


def test_a_plan_must_suit_the_weights() -> None:
    with fake_world(_FOUR) as mesh:
        layer = nn.Linear(4, 6)
        with pytest.raises(ValueError, match="no weight wait to follow its plan"):
            simple_fsdp(layer, mesh, plans={"wait": WeightPlan({"dp_shard": 0})})
        with pytest.raises(ValueError, match=r"dp_shard=4 does not divide dim 0 of a weight of shape \(6, 4\)"):
            simple_fsdp(layer, mesh, plans={"weight": WeightPlan({"dp_shard": 0})})
        assert type(layer) is nn.Linear and not isinstance(layer.weight, DTensor)
    with pytest.raises(ValueError, match="axis tp splits"):
        WeightPlan({"tp": 0}, partial=("tp",))


def test_one_device_needs_no_mesh_and_has_the_policys_precision() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    names = list(model.state_dict())
    simple_fsdp(model, None, ShardingPolicy(gather_dtype=torch.bfloat16))
    assert list(model.state_dict()) == names
    for name, weight in model.named_parameters():
        assert type(weight) is nn.Parameter and weight.dtype == torch.float32, name
    output = model(torch.ones(2, 4, dtype=torch.bfloat16))
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert torch.equal(model[0]._parameters["weight"].grad, torch.full((4, 4), 2.0))
    plain = nn.Linear(4, 4)
    weight = plain.weight
    assert simple_fsdp(plain, None).weight is weight


def test_meta_weights_stay_on_the_meta_device_and_say_nothing_of_the_rank() -> None:
    shapes = []
    for rank in (0, 3):
        with fake_world(_FOUR, rank) as mesh, torch.device("meta"):
            model = simple_fsdp(_Model(), mesh)
            assert all(weight.is_meta for weight in model.parameters())
            assert model.head._parameters["weight"] is model.embedding._parameters["weight"]
            shapes.append([tuple(weight._local_tensor.shape) for weight in model.parameters()])
    assert shapes[0] == shapes[1] == [(3, 8), (6, 2), (6,), (2, 6), (2,), (), (2,)]


def test_the_first_dim_that_the_axis_divides_is_sharded() -> None:
    hsdp = MeshSpec(HSDP, (2, 4))
    policy = ShardingPolicy()
    assert fsdp_placements((8, 4), hsdp, policy) == (Replicate(), Shard(0))
    assert fsdp_placements((6, 4), hsdp, policy) == (Replicate(), Shard(1))
    assert fsdp_placements((6, 3), hsdp, policy) == (Replicate(), Replicate())
    assert fsdp_placements((0, 4), hsdp, policy) == (Replicate(), Shard(1))
    assert fsdp_placements((), hsdp, policy) == (Replicate(), Replicate())
    assert fsdp_placements((8,), MeshSpec(DDP, (4,)), policy) == (Replicate(),)


def test_several_shard_axes_share_a_dim_that_no_plan_takes() -> None:
    mesh, policy = MeshSpec(("dp_shard", "ep", "tp"), (2, 2, 2)), ShardingPolicy(shard_axes=("dp_shard", "ep"))
    assert fsdp_placements((6, 4), mesh, policy) == (Shard(1), Shard(1), Replicate())
    assert fsdp_placements((8, 4), mesh, policy, WeightPlan({"tp": 0})) == (Shard(1), Shard(1), Shard(0))
    assert fsdp_placements((4, 3, 2), mesh, policy, WeightPlan({"ep": 0})) == (Shard(2), Shard(0), Replicate())
    assert fsdp_placements((4,), mesh, policy, WeightPlan({"tp": 0})) == (Replicate(), Replicate(), Shard(0))


def test_the_module_that_is_parametrised_keeps_its_looks() -> None:
    with fake_world(_FOUR) as mesh:
        layer = nn.Linear(4, 4)
        text, module_name = repr(layer), type(layer).__module__
        assert repr(simple_fsdp(layer, mesh)) == text and type(layer).__module__ == module_name
        assert isinstance(layer, nn.Linear)


def test_jax_is_never_imported() -> None:
    names = ", ".join(f"titan.parallel.{name}" for name in ("axis_index", "layout", "mesh", "simple_fsdp"))
    code = f"import sys, {names}\nassert not {{'jax', 'jaxlib'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(filter(None, sys.path))})
