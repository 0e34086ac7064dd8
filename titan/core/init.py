"""Initial values of parameters: described by frozen dataclasses, sampled in JAX, independent of mesh and sharding.

A module says how its parameters begin in `module.param_init`, a dict from the parameter's own name to an initialiser;
`init_plan` collects these for a whole model, and `sample` draws one parameter from (seed, fully qualified name). Inside
a `jax.jit` with `out_shardings` every device draws only its own shard, and the values are the same bits on any mesh,
since JAX's partitionable threefry is a function of the element's index in the whole array.
"""

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax
    import torch


@dataclasses.dataclass(frozen=True)
class Normal:
    """A normal distribution of mean 0.

    Attributes:
      std: the standard deviation.
    """

    std: float


@dataclasses.dataclass(frozen=True)
class TruncatedNormal:
    """A normal distribution of mean 0, conditioned on lying within `cutoff` standard deviations.

    Attributes:
      std: the standard deviation before the cut; what remains has a smaller one (0.987 of it for a cutoff of 3).
      cutoff: the largest magnitude, in units of `std`.
    """

    std: float
    cutoff: float = 3.0


@dataclasses.dataclass(frozen=True)
class Uniform:
    """A uniform distribution around 0.

    Attributes:
      bound: values lie within [-bound, bound).
    """

    bound: float


@dataclasses.dataclass(frozen=True)
class Zeros:
    """The value 0 everywhere."""


@dataclasses.dataclass(frozen=True)
class Ones:
    """The value 1 everywhere."""


Initializer = Normal | TruncatedNormal | Uniform | Zeros | Ones


def init_plan(module: "torch.nn.Module") -> dict[str, Initializer]:
    """The initialiser of every parameter of a model, by fully qualified name, in the order of `named_parameters()`.

    Raises:
      ValueError: a parameter without an initialiser, or a `param_init` entry that is no `Initializer` or names no
        parameter of its module.
    """
    plan: dict[str, Initializer] = {}
    for module_name, child in module.named_modules():
        param_init = getattr(child, "param_init", {})
        prefix = f"{module_name}." if module_name else ""
        names = [name for name, _ in child.named_parameters(recurse=False)]
        for name in names:
            if name not in param_init:
                raise ValueError(
                    f"parameter {prefix}{name} has no initialiser; "
                    f"set param_init[{name!r}] in {type(child).__qualname__}.__init__"
                )
            if not isinstance(param_init[name], Initializer):
                raise ValueError(f"the initialiser of {prefix}{name} is {param_init[name]!r}; give an Initializer")
            plan[prefix + name] = param_init[name]
        for name in param_init:
            if name not in names:
                where = module_name or "the model"
                raise ValueError(f"param_init of {where} names {name!r}, which is no parameter of it")
    return plan


def sample(initializer: Initializer, seed: int, fqn: str, shape: tuple[int, ...], dtype: Any) -> "jax.Array":
    """Draws one parameter. Pure: the result is a function of the arguments alone, and may be traced by `jax.jit`.

    Args:
      initializer: the distribution.
      seed: the run's seed; the same for all parameters. May be a traced integer.
      fqn: the parameter's fully qualified name, which makes its draw independent of every other parameter's.
      shape: the whole (unsharded) shape. A padded shape gives other values: pad the result instead.
      dtype: the result's dtype, as JAX takes it. Values are drawn in float32 and rounded once.

    Returns:
      An array of `shape` and `dtype`; under `jax.jit(..., out_shardings=s)` sharded at birth.
    """
    import jax
    import jax.numpy as jnp

    match initializer:
        case Zeros():
            return jnp.zeros(shape, dtype)
        case Ones():
            return jnp.ones(shape, dtype)
    # Both choices are JAX's defaults; pinned here, since changing either changes every initial value of a run.
    with jax.threefry_partitionable(True):
        key = jax.random.key(seed, impl="threefry2x32")
        for word in _hash_words(fqn):
            key = jax.random.fold_in(key, word)
        match initializer:
            case Normal(std):
                values = std * jax.random.normal(key, shape, jnp.float32)
            case TruncatedNormal(std, cutoff):
                values = std * jax.random.truncated_normal(key, -cutoff, cutoff, shape, jnp.float32)
            case Uniform(bound):
                values = jax.random.uniform(key, shape, jnp.float32, -bound, bound)
            case _:
                raise TypeError(f"{initializer!r} is no Initializer")
    return values.astype(dtype)


def _hash_words(fqn: str) -> tuple[int, int]:
    """64 bits that depend on the name alone (Python's own `hash` differs from process to process)."""
    digest = hashlib.blake2b(fqn.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
