import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titan.core import checkpoint as checkpoint_module
from titan.core.checkpoint import CheckpointConfig, Checkpointer, CheckpointError
from titan.core.config.validate import ConfigError


def _state(step: int) -> dict:
    """Arrays of several dtypes and ranks, different at every step, with bits that do not compress."""
    key = jax.random.fold_in(jax.random.key(7), step)
    return {
        "params": {
            "layers.0.weight": jax.random.normal(key, (64, 32)),
            "norm.weight": jax.random.normal(key, (32,), jnp.bfloat16),
            "scale": jax.random.normal(key, (4, 8)).astype(jnp.float8_e4m3fn),
        },
        "mask": jax.random.bernoulli(key, 0.5, (5, 3)),
        "step": jnp.int32(step),
    }


def _abstract(state: dict) -> dict:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def _bits(state: dict) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def _save_steps(folder, *steps: int, **config) -> None:
    with Checkpointer(CheckpointConfig(**config), folder) as checkpointer:
        for step in steps:
            assert checkpointer.save(step, _state(step), {"position": step}, force=True)


def _restore(folder, step=None):
    with Checkpointer(CheckpointConfig(), folder) as checkpointer:
        return checkpointer.restore(_abstract(_state(0)), step)


def test_restores_exact_bits_and_host_values(tmp_path):
    host = {"position": "AAEC", "nested": {"ratio": 0.1, "seen": [1, 2]}, "name": "é"}
    with Checkpointer(CheckpointConfig(interval=5), tmp_path) as checkpointer:
        assert checkpointer.restore(_abstract(_state(0))) is None
        assert checkpointer.steps() == []
        assert not checkpointer.save(4, _state(4), host)
        assert checkpointer.save(5, _state(5), host)
        assert not checkpointer.save(5, _state(5), host, force=True)  # saved already
    step, arrays, restored_host = _restore(tmp_path)
    assert step == 5
    assert restored_host == host
    assert jax.tree.structure(arrays) == jax.tree.structure(_state(5))
    assert _bits(arrays) == _bits(_state(5))
    assert arrays["params"]["norm.weight"].dtype == jnp.bfloat16


def test_keeps_the_newest(tmp_path):
    _save_steps(tmp_path, 1, 2, 3, 4, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["3", "4"]
    assert _restore(tmp_path, step=3)[0] == 3


def test_what_a_killed_save_left_is_removed(tmp_path):
    _save_steps(tmp_path, 1)
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
    (tmp_path / "2.orbax-checkpoint-tmp" / "host" / "metadata").unlink()
    with Checkpointer(CheckpointConfig(), tmp_path) as checkpointer:
        assert checkpointer.steps()[-1] == 1
        checkpointer.restore(_abstract(_state(0)))
        checkpointer.save(3, _state(3), {}, force=True)
    assert sorted(os.listdir(tmp_path)) == ["1", "3"]


def test_synchronous_save_is_finished_on_return(tmp_path):
    with Checkpointer(CheckpointConfig(asynchronous=False), tmp_path) as checkpointer:
        checkpointer.save(1, _state(1), {}, force=True)
        assert checkpointer.steps()[-1] == 1


def test_saved_arrays_may_be_donated_at_once(tmp_path):
    state = {"w": jnp.arange(4_000_000, dtype=jnp.uint32)}
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x * jnp.uint32(5) + jnp.uint32(1), state), donate_argnums=0)
    expected = []
    with Checkpointer(CheckpointConfig(), tmp_path) as checkpointer:
        for step in range(1, 4):
            expected.append(np.array(state["w"]).tobytes())
            state_before = state
            checkpointer.save(step, state, {}, force=True)
            for _ in range(3):
                state = advance(state)
            assert state_before["w"].is_deleted()
        abstract = _abstract(state)
        for step in range(1, 4):
            assert _bits(checkpointer.restore(abstract, step)[1]) == [expected[step - 1]]


def _damage(path: str, how: str) -> None:
    if how == "missing":
        os.remove(path)
        return
    with open(path, "r+b") as file:
        data = bytearray(file.read())
        file.seek(0)
        if how == "truncated":
            data = data[: len(data) // 2]
        else:
            data[random.Random(path[-8:]).randrange(len(data))] ^= 0x10
        file.write(data)
        file.truncate()


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
def test_damage_to_any_file_is_found_or_harmless(tmp_path, how, caplog):
    pristine = tmp_path / "pristine"
    _save_steps(pristine, 1, 2)
    files = sorted(
        os.path.relpath(os.path.join(folder, name), pristine / "2")
        for folder, _, names in os.walk(pristine / "2")
        for name in names
    )
    found = {}
    for number, name in enumerate(files):
        folder = tmp_path / str(number)
        shutil.copytree(pristine, folder)
        if os.path.getsize(folder / "2" / name) == 0:
            continue
        _damage(str(folder / "2" / name), how)
        caplog.clear()
        step, arrays, host = _restore(folder)
        assert (_bits(arrays), host) == (_bits(_state(step)), {"position": step}), name
        warnings = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
        assert len(warnings) == 2 - step
        for warning in warnings:
            assert warning.startswith(f"checkpoint {folder}/2 is damaged and not used: ")
            assert "\n" not in warning
        found[name] = step == 1
    assert found["host/metadata"]
    assert any(is_found for name, is_found in found.items() if name.startswith("arrays/d/"))


def test_wrong_values_in_a_well_formed_checkpoint_are_found_by_their_digest(tmp_path, monkeypatch, caplog):
    _save_steps(tmp_path, 1)
    detach = checkpoint_module._detach

    def detach_wrongly(array):
        array = detach(array)
        return array.at[3].set(array[2]) if array.shape == (32,) else array

    monkeypatch.setattr(checkpoint_module, "_detach", detach_wrongly)
    with Checkpointer(CheckpointConfig(), tmp_path) as checkpointer:
        checkpointer.restore(_abstract(_state(0)))
        checkpointer.save(2, _state(2), {}, force=True)
    step, arrays, _ = _restore(tmp_path)
    assert step == 1
    assert _bits(arrays) == _bits(_state(1))
    assert "1 of 5 arrays do not match their digest, the first is ['params']['norm.weight']" in caplog.text


def test_no_intact_checkpoint_is_an_error(tmp_path):
    _save_steps(tmp_path, 1, 2)
    for step in ("1", "2"):
        shutil.rmtree(tmp_path / step / "arrays")
    with pytest.raises(
        CheckpointError, match=r"^none of the 2 checkpoints in .* is intact; .*--checkpoint.resume=false"
    ):
        _restore(tmp_path)
    with pytest.raises(CheckpointError, match=r"/2 is missing or damaged; choose out of \[1, 2\]$"):
        _restore(tmp_path, step=2)


def test_another_models_checkpoint_is_an_error_and_not_damage(tmp_path):
    _save_steps(tmp_path, 1)
    for change, message in (
        (
            {"step": jax.ShapeDtypeStruct((2,), jnp.int32)},
            r"has \['step'\] as int32\[\], this run as int32\[2\]; run with",
        ),
        ({"bias": jax.ShapeDtypeStruct((), jnp.int32)}, r"lacks the array \['bias'\] of this run"),
    ):
        with Checkpointer(CheckpointConfig(), tmp_path) as checkpointer:
            with pytest.raises(ValueError, match=message):
                checkpointer.restore(_abstract(_state(0)) | change)


def test_damaged_and_abandoned_checkpoints_are_set_aside_by_the_next_save(tmp_path):
    _save_steps(tmp_path, 1, 2, 3)
    shutil.rmtree(tmp_path / "3" / "arrays")
    with Checkpointer(CheckpointConfig(), tmp_path) as checkpointer:
        assert checkpointer.restore(_abstract(_state(0)))[0] == 2
        assert checkpointer.steps() == [1, 2, 3]  # reading changes nothing
        assert checkpointer.save(3, _state(3), {}, force=True)
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2, 3]
    assert _restore(tmp_path)[0] == 3
    with Checkpointer(CheckpointConfig(), tmp_path) as checkpointer:  # a run that does not resume
        assert checkpointer.save(3, _state(30), {}, force=True)
    assert sorted(os.listdir(tmp_path)) == ["3", "set_aside"]
    assert sorted(os.listdir(tmp_path / "set_aside")) == ["1", "2", "3", "3.1"]
    assert _bits(_restore(tmp_path)[1]) == _bits(_state(30))


def test_a_failed_save_is_reported(tmp_path):
    checkpointer = Checkpointer(CheckpointConfig(), tmp_path / "run")
    checkpointer.save(1, _state(1), {}, force=True)
    checkpointer.wait()
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("a file where the folder was")
    with pytest.raises(CheckpointError, match=r"^saving a checkpoint in .*run failed: .*; check the disk"):
        checkpointer.save(2, _state(2), {}, force=True)
        checkpointer.wait()


def test_a_leaf_that_is_no_array_is_an_error(tmp_path):
    with Checkpointer(CheckpointConfig(), tmp_path) as checkpointer:
        with pytest.raises(TypeError, match=r"leaf \['step'\] is a int, not a jax.Array; save it among `host`"):
            checkpointer.save(1, {"step": 3}, {}, force=True)


def test_orbax_is_quiet(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="absl"):
        _save_steps(tmp_path, 1, 2, 3, 4)
        _restore(tmp_path)
    assert caplog.text == ""


@pytest.mark.parametrize("field", ["folder", "load_hf", "save_hf"])
def test_config_errors_name_the_flag(field):
    with pytest.raises(ConfigError, match=f"^--checkpoint.{field}: "):
        CheckpointConfig(**{field: "/dev/null/run"}).validate()


def _environment(num_devices: int) -> dict[str, str]:
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


_RESHARD_SCRIPT = """
    import sys
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from titan.core.checkpoint import CheckpointConfig, Checkpointer

    devices = np.array(jax.devices())
    values = np.random.default_rng(0).standard_normal((8, 12)).astype(np.float32)
    layouts = [
        (devices, ("fsdp",), P("fsdp")),
        (devices.reshape(2, 4), ("replicate", "shard"), P("shard")),
        (devices.reshape(2, 4), ("a", "b"), P("a", "b")),
        (devices[:4].reshape(2, 2), ("a", "b"), P(("b", "a"))),
        (devices[:2], ("fsdp",), P(None, "fsdp")),
        (devices[3:4], ("fsdp",), P()),
    ]
    shardings = [NamedSharding(Mesh(subset, axes), spec) for subset, axes, spec in layouts]
    for number, saved in enumerate(shardings):
        with Checkpointer(CheckpointConfig(), f"{sys.argv[1]}/{number}") as checkpointer:
            checkpointer.save(1, {"w": jax.device_put(values, saved)}, {}, force=True)
            for asked in shardings:
                abstract = {"w": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=asked)}
                _, arrays, _ = checkpointer.restore(abstract)
                assert arrays["w"].sharding == asked
                assert np.asarray(arrays["w"]).tobytes() == values.tobytes()
    print("IDENTICAL")
"""


def test_restores_onto_any_other_mesh(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(_RESHARD_SCRIPT), str(tmp_path)]
    done = subprocess.run(command, env=_environment(8), capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout == "IDENTICAL\n", done.stderr
    assert done.stderr == ""


# Counts steps in an array of 16 MiB, saves every second one, and prints what it does. The value after each step is
# known in closed form, so that every restored bit can be checked.
_COUNTER_SCRIPT = """
    import json, sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from titan.core.checkpoint import CheckpointConfig, Checkpointer

    SHAPE = (2048, 2048)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("fsdp",)), P("fsdp"))

    def value_after(step):
        start = np.arange(SHAPE[0] * SHAPE[1], dtype=np.uint32).reshape(SHAPE) * np.uint32(0x9E3779B1)
        return start + np.uint32(step * 0x01000193 % 2**32)

    def report(**values):
        print(json.dumps(values), flush=True)

    advance = jax.jit(lambda w: w + jnp.uint32(0x01000193), donate_argnums=0)
    checkpointer = Checkpointer(CheckpointConfig(interval=2, keep=2), sys.argv[1])
    restored = checkpointer.restore({"w": jax.ShapeDtypeStruct(SHAPE, jnp.uint32, sharding=sharding)})
    if restored is None:
        step, w = 0, jax.device_put(value_after(0), sharding)
    else:
        step, arrays, host = restored
        w = arrays["w"]
        assert host == {"position": step}
    report(restored=step, exact=bool(np.array_equal(np.asarray(w), value_after(step))))
    finished = step
    while True:
        w, step = advance(w), step + 1
        checkpointer.save(step, {"w": w}, {"position": step})
        if (latest := max(checkpointer.steps(), default=0)) != finished:
            finished = latest
            report(finished=finished)
"""


def test_kill_at_any_moment_loses_no_finished_checkpoint(tmp_path):
    chance = random.Random(20)
    newest_finished = 0
    num_restored = num_killed_in_save = 0
    for attempt in range(10):
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_COUNTER_SCRIPT), str(tmp_path)],
            env=_environment(1 + attempt % 2),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            first = process.stdout.readline()
            assert first, process.stderr.read()
            begun = json.loads(first)
            assert begun["exact"]
            assert begun["restored"] >= newest_finished
            num_restored += begun["restored"] > 0
            # A random number of checkpoints later, at a random point of the next one.
            reports = [json.loads(process.stdout.readline()) for _ in range(chance.randrange(4))]
            time.sleep(chance.uniform(0.0, 0.1))
            process.send_signal(signal.SIGKILL)
            reports += [json.loads(line) for line in process.stdout]
            assert process.stderr.read() == ""
        newest_finished = max([begun["restored"], *(report["finished"] for report in reports)])
        leftovers = [name for name in os.listdir(tmp_path) if not name.isdigit()]
        assert len(leftovers) <= 1  # those of earlier kills are gone
        num_killed_in_save += len(leftovers)
    assert num_restored >= 5
    assert num_killed_in_save >= 3
    assert newest_finished >= 20
