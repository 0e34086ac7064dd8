"""Initialisers: plans, distributions, and independence of the sharding."""

import math
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from titan.core.init import Normal, Ones, TruncatedNormal, Uniform, Zeros, init_plan, sample


class Leaf(torch.nn.Module):
    """A module with two parameters, of which `param_init` describes those given."""

    def __init__(self, **param_init):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(2, 3, device="meta"))
        self.bias = torch.nn.Parameter(torch.empty(2, device="meta"))
        self.param_init = param_init


def test_plan_has_every_parameter_in_the_order_of_named_parameters():
    model = torch.nn.Sequential(Leaf(weight=Normal(0.5), bias=Zeros()), Leaf(weight=Ones(), bias=Normal(2.0)))
    plan = init_plan(model)
    assert plan == {"0.weight": Normal(0.5), "0.bias": Zeros(), "1.weight": Ones(), "1.bias": Normal(2.0)}
    assert list(plan) == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    "leaf, message",
    [
        (Leaf(weight=Ones()), r"parameter 0\.bias has no initialiser; set param_init\['bias'\] in Leaf\.__init__"),
        (torch.nn.Linear(2, 2), r"parameter 0\.weight has no initialiser; .* in Linear\.__init__"),
        (Leaf(weight=Ones(), bias=0.0), r"the initialiser of 0\.bias is 0\.0; give an Initializer"),
        (Leaf(weight=Ones(), bias=Ones(), scale=Ones()), r"param_init of 0 names 'scale', which is no parameter"),
    ],
)
def test_plan_names_what_does_not_fit(leaf, message):
    with pytest.raises(ValueError, match=message):
        init_plan(torch.nn.Sequential(leaf))


def test_constants_and_dtypes():
    zeros, ones = sample(Zeros(), 0, "a", (2, 3), "bfloat16"), sample(Ones(), 0, "a", (5,), "float32")
    assert str(zeros.dtype) == "bfloat16" and not zeros.any()
    assert ones.dtype == np.float32 and (ones == 1).all()
    full, half = (sample(Normal(1.0), 0, "a", (100,), dtype) for dtype in ("float32", "bfloat16"))
    assert (full.astype("bfloat16") == half).all()
    with pytest.raises(TypeError, match="is no Initializer"):
        sample(0.02, 0, "a", (1,), "float32")


def test_moments_and_cut():
    values = np.asarray(sample(Normal(0.5), 0, "a", (1000, 1000), "float32"), np.float64)
    assert abs(values.mean()) < 5 * 0.5 / 1000
    assert values.std() == pytest.approx(0.5, rel=5e-3)
    assert np.abs(values).max() > 3.5 * 0.5  # not cut
    for cutoff in (1.0, 3.0):
        values = np.asarray(sample(TruncatedNormal(0.02, cutoff), 0, "a", (1000, 1000), "float32"), np.float64) / 0.02
        # The variance of a standard normal within +-c is 1 - 2 c phi(c) / (Phi(c) - Phi(-c)).
        density = math.exp(-(cutoff**2) / 2) / math.sqrt(2 * math.pi)
        std = math.sqrt(1 - 2 * cutoff * density / math.erf(cutoff / math.sqrt(2)))
        assert abs(values.mean()) < 5e-3
        assert values.std() == pytest.approx(std, rel=5e-3)
        assert 0.99 * cutoff < np.abs(values).max() <= cutoff * (1 + 1e-6)
    values = np.asarray(sample(Uniform(0.3), 0, "a", (1000, 1000), "float32"), np.float64) / 0.3
    assert abs(values.mean()) < 5e-3
    assert values.std() == pytest.approx(3**-0.5, rel=5e-3)
    assert 0.999 < np.abs(values).max() <= 1 + 1e-6


def test_values_depend_on_name_and_seed():
    def draw(seed, fqn):
        return np.asarray(sample(Normal(1.0), seed, fqn, (10_000,), "float32"))

    base = draw(0, "layers.0.attention.wq.weight")
    for other in (draw(0, "layers.1.attention.wq.weight"), draw(1, "layers.0.attention.wq.weight")):
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.05
    # Pinned: a change in these is a change in every run's initial weights, and belongs in the changelog.
    np.testing.assert_allclose(base[:3], [-1.0770574, -0.33656701, 0.69651276], rtol=1e-6)


_SHARDING_SCRIPT = """
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from titan.core.init import Normal, TruncatedNormal, sample

    devices = np.array(jax.devices())
    assert len(devices) == 8
    layouts = [
        (devices[:1], ("x",), P()),
        (devices[:2], ("x",), P("x")),
        (devices, ("x",), P("x")),
        (devices, ("x",), P(None, "x")),
        (devices.reshape(2, 4), ("x", "y"), P("y", "x")),
        (devices.reshape(2, 4), ("x", "y"), P(("x", "y"))),
        (devices, ("x",), P()),
    ]

    def draw(seed):
        return [
            sample(initializer, seed, "layers.0.wq.weight", shape, dtype)
            for initializer in (Normal(1.0), TruncatedNormal(0.02, 3.0))
            for shape, dtype in (((264, 136), "float32"), ((264, 136), "bfloat16"), ((8, 8), "float32"))
        ]

    reference = [np.asarray(drawn).tobytes() for drawn in draw(3)]
    for mesh_devices, axes, spec in layouts:
        sharding = NamedSharding(Mesh(mesh_devices, axes), spec)
        for drawn, expected in zip(jax.jit(draw, out_shardings=sharding)(3), reference, strict=True):
            assert drawn.sharding == sharding
            assert np.asarray(drawn).tobytes() == expected, (drawn.shape, drawn.dtype, spec)
    print("IDENTICAL")
"""


def test_values_are_the_same_bits_on_any_mesh():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    script = textwrap.dedent(_SHARDING_SCRIPT)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("IDENTICAL\n"), done.stderr
