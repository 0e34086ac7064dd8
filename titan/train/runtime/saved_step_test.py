"""The saved training step: a run that loads it compiles nothing and equals one that compiles; all else is refused."""

import json
import pathlib
import re
import shutil

import pytest

from titan.core.config.tree import leaves
from titan.core.config.validate import ConfigError
from titan.train.config.run import Config
from titan.train.config.sampling import SamplingConfig
from titan.train.runtime.saved_step import OUTSIDE_THE_STEP, open_saved_step
from titan.train.testing.runs import Workplace, reported_losses

_STEPS = ("--training.steps=4", "--checkpoint.interval=4")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def saved(workplace) -> pathlib.Path:
    folder = workplace.folder / "step"
    # A run before it fills the compile cache, from which a program must not be saved: XLA:CPU could not load it again.
    workplace.train("compiling", *_STEPS)
    ended = workplace.run("saving", *_STEPS, f"--aot.save={folder}")
    assert ended.code == 0, ended
    (line,) = ended.err
    assert re.fullmatch(rf"training step saved to {folder}: \d\.\d MiB", line)
    return folder


def load(workplace, run, folder, *flags):
    return workplace.run(
        run, *_STEPS, f"--aot.load={folder}", f"--compile.cache_folder={workplace.folder / run}_cache", *flags
    )


def compiled_steps(workplace, run):
    """Entries of the run's compile cache for the training step; the other entry is that of the initial weights."""
    names = [path.name for path in (workplace.folder / f"{run}_cache").iterdir()]
    assert any(name.startswith("jit_make-") for name in names)
    return [name for name in names if name.startswith("jit_run-")]


def test_a_run_that_loads_the_step_compiles_none_and_has_the_same_losses(workplace, saved):
    ended = load(workplace, "loading", saved)
    assert (ended.code, ended.err) == (0, [f"training step loaded from {saved}, not compiled"])
    assert compiled_steps(workplace, "loading") == []
    losses = reported_losses(workplace.folder / "compiling")
    assert len(losses) == 4
    assert reported_losses(workplace.folder / "saving") == losses
    assert reported_losses(workplace.folder / "loading") == losses


def test_another_step_is_refused_in_one_line_that_names_what_differs(workplace, saved):
    ended = load(workplace, "other", saved, "--optimizer.weight_decay=0.2", "--training.batch_size=8")
    assert (ended.code, len(ended.err)) == (2, 1)
    assert ended.err[0] == (
        f"--aot.load: {saved} holds another step: training.batch_size is 8 here and 4 there, optimizer.weight_decay is "
        "0.2 here and 0.1 there; give what it was saved with, or leave this out and save anew with --aot.save"
    )


def test_differences_that_only_digests_show_are_named(saved):
    step = open_saved_step(str(saved))
    step.check(step.fingerprint)
    with pytest.raises(ConfigError, match=r"holds another step: program is 000000000000 here and [0-9a-f]{12} there; "):
        step.check({**step.fingerprint, "program": 64 * "0"})
    with pytest.raises(ConfigError, match=r"holds another step: versions.jax is 0.0.1 here and \S+ there; "):
        step.check({**step.fingerprint, "program": 64 * "0", "versions.jax": "0.0.1"})
    with pytest.raises(
        ConfigError, match=r"holds another step: batch.tokens is int32\[2\] here and int32\[1, 4, 64\] "
    ):
        step.check({**step.fingerprint, "batch.tokens": "int32[2]"})
    with pytest.raises(ConfigError, match=r"step: compiler_options.xla_a is true here and not set there; "):
        step.check({**step.fingerprint, "compiler_options.xla_a": "true"})


@pytest.mark.parametrize("damage", ["empty", "manifest", "field", "format", "missing", "cut"])
def test_what_is_no_whole_step_is_refused_in_one_line(tmp_path, saved, damage):
    folder = tmp_path / "step"
    if damage == "empty":
        folder.mkdir()
    else:
        shutil.copytree(saved, folder)
    manifest, executables = folder / "step.json", list(folder.glob("*.bin"))
    line = {
        "empty": r"'\S+' holds no saved step; give a folder of --aot.save",
        "manifest": r"\S+/step.json is damaged: JSONDecodeError.*; save it anew with --aot.save",
        "field": r"\S+/step.json is damaged: KeyError\('sha256'\); save it anew with --aot.save",
        "format": r"'\S+' is of another version of titan \(format 0\); save it anew with --aot.save",
        "missing": r"\S+\.bin cannot be read \(No such file or directory\); save it anew with --aot.save",
        "cut": r"\S+\.bin is damaged: its digest is not that of step.json; save it anew with --aot.save",
    }[damage]
    if damage == "manifest":
        manifest.write_text(manifest.read_text()[:100])
    if damage == "field":
        manifest.write_text(
            json.dumps({**json.loads(manifest.read_text()), "sha256": None}).replace('"sha256"', '"md5"')
        )
    if damage == "format":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 0}))
    if damage == "missing":
        executables[0].unlink()
    if damage == "cut":
        executables[0].write_bytes(executables[0].read_bytes()[:-1])
    with pytest.raises(ConfigError, match=f"^--aot.load: {line}$"):
        open_saved_step(str(folder))


def test_what_is_outside_the_step_is_in_the_tree():
    paths = [leaf.path for leaf in leaves(Config(sampling=SamplingConfig()))]
    for name in OUTSIDE_THE_STEP:
        assert any(path == name or path.startswith(f"{name}.") for path in paths), name
