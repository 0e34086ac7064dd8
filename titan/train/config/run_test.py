"""The run's configuration: flags, cross-section checks, devices, and what its import costs."""

import dataclasses
import json
import subprocess
import sys

import pytest

from titan.core.config.flags import define_flags, one_line_errors, parse
from titan.core.config.serialize import from_json, to_json
from titan.core.config.tree import leaves
from titan.core.config.validate import ConfigError, validate
from titan.models.qwen3.config import Qwen3MoeConfig
from titan.train.config.kernels import GroupedMatmulConfig
from titan.train.config.parallelism import ParallelismConfig
from titan.train.config.run import Config


def run(*arguments):
    return parse(["llama3_debug", *arguments], Config())


def test_defaults_are_valid_and_round_trip():
    validate(Config())
    assert from_json(to_json(Config()), Config) == Config()


def test_every_leaf_is_a_flag_with_help():
    values = define_flags(Config())
    for leaf in leaves(Config()):
        assert values[leaf.path].help == leaf.help
        assert leaf.help.endswith("."), leaf.path


def test_helpfull_describes_every_leaf(capsys):
    with pytest.raises(SystemExit) as end:
        run("--helpfull")
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(f"{leaf.path}: " in text for leaf in leaves(Config()))


def test_documented_flags_reach_the_tree():
    config = run(
        "--training.steps=100",
        "--noparallelism.use_simple_fsdp",
        "--tpu_config.use_graph_trainer=false",
        "--compile.enable=false",
    )
    assert config.training.steps == 100
    assert not config.parallelism.use_simple_fsdp
    assert config.tpu_config == dataclasses.replace(Config().tpu_config, use_graph_trainer=False)
    assert not config.compile.enable
    assert run("--profiler.enable").profiler.enable


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--training.batch_size=6 --training.microbatches=4",
         "--training.batch_size: 6 is not a multiple of training.microbatches=4; give a multiple, e.g. 8"),
        ("--training.batch_size=6 --training.microbatches=2 --parallelism.num_devices=4",
         "--training.batch_size: 6 is not a multiple of 4 devices times 2 microbatches; give a multiple of 8, e.g. 8"),
        ("--optimizer.beta2=1", "--optimizer.beta2: 1 would never forget a gradient; give a number below 1, e.g. 0.95"),
        ("--training.steps=10",
         "--lr_schedule.warmup_steps: 20 are more than training.steps=10; give fewer, or train longer"),
        ("--lr_schedule.kind=constant --lr_schedule.decay_steps=281",
         "--lr_schedule.decay_steps: 281 and warmup_steps=20 are more than training.steps=300; "
         "give fewer, or train longer"),
        ("--parallelism.data_parallel_shard=0",
         "--parallelism.data_parallel_shard: 0 is no number of devices; "
         "give at least 1, or -1 for the rest of the devices"),
        ("--parallelism.num_devices=8 --parallelism.data_parallel_replicate=3",
         "--parallelism.data_parallel_replicate: 3 does not divide 8 devices; "
         "give a divisor of 8, or another --parallelism.num_devices"),
        ("--parallelism.num_devices=8 --parallelism.data_parallel_replicate=2 --parallelism.data_parallel_shard=2",
         "--parallelism.data_parallel_shard: 2 times data_parallel_replicate=2 is 4, not 8 devices; "
         "give 4, or --parallelism.num_devices=4"),
        ("--noparallelism.use_simple_fsdp --parallelism.data_parallel_shard=2",
         "--parallelism.use_simple_fsdp: false means one device, but 2 are asked for; "
         "leave it on, or give --parallelism.num_devices=1"),
        ("--noparallelism.use_simple_fsdp --parallelism.gather_dtype=bfloat16",
         "--parallelism.gather_dtype: it is SimpleFSDP that hands out parameters in another dtype, and it is off; "
         "leave it out, or leave --parallelism.use_simple_fsdp on"),
        ("--distributed --tpu_config.executor=torch",
         "--distributed: the torch executor has a process for each of --parallelism.num_devices, or those of torchrun; "
         "leave it out, or use the xla executor"),
        ("--distributed --aot --hardware=v6e-2x4",
         "--distributed: one process compiles for all hosts of a slice; leave it out"),
        ("--aot", "--aot: --aot and --hardware go together; add --hardware=v6e-2x4, or leave --aot out"),
        ("--hardware=v6e-2x4", "--hardware: --aot and --hardware go together; add --aot, or leave --hardware out"),
        ("--aot.report=x.json", "--aot.report: there is no report without --aot; leave it out, or add --aot"),
        ("--aot.lowering=torch_tpu", "--aot.lowering: only --aot chooses a lowering; leave it out, or add --aot"),
        ("--aot --hardware=v6e-2x4 --aot.compare=/missing",
         "--aot.compare: there is no file or folder '/missing'; correct the path"),
        ("--aot --hardware=v6e-2x4 --tpu_config.executor=torch",
         "--aot: only the xla executor compiles ahead of time, and another is asked for; leave that out"),
        ("--aot --hardware=v5e-2x2 --compile.tpu_flag_bundles=sparse_core_offload",
         "--compile.tpu_flag_bundles: sparse_core_offload is for v6e: on v5e it has no effect; leave it out"),
        ("--aot --hardware=v5e-2x2 --compile.tpu_flags=xla_dump_to=/tmp/x",
         "--compile.tpu_flags: the report reads the compiler's dump itself, and xla_dump_to is given; leave it out"),
        ("--compile.tpu_flags=xla_tpu_rwb_fusion",
         "--compile.tpu_flags: 'xla_tpu_rwb_fusion' is no option with its value; write NAME=VALUE, separated by "
         "commas"),
        ("--compile.tpu_flag_bundles=no_latency_hiding --tpu_config.executor=torch",
         "--compile.tpu_flag_bundles: only the xla executor compiles a whole step; leave it out, or use that executor"),
        ("--aot.save=x --notpu_config.use_graph_trainer",
         "--aot.save: only the xla executor compiles a whole step; leave it out, or use that executor"),
        ("--aot.save=x --aot.load=x",
         "--aot.save: what aot.load gives is saved already; leave out one of the two"),
        ("--aot.load=/missing", "--aot.load: there is no file or folder '/missing'; correct the path"),
        ("--aot --hardware=v6e-2x4 --parallelism.num_devices=4",
         "--parallelism.num_devices: 4 are not the 8 devices of v6e-2x4; leave it out, or name another slice"),
        ("--aot --hardware=tpu7x-2x2x1 --training.batch_size=4",
         "--training.batch_size: 4 is not a multiple of 8 devices times 1 microbatches; give a multiple of 8, e.g. 8"),
        ("--aot --hardware=4*v6e-2x2 --parallelism.data_parallel_replicate=2",
         "--parallelism.data_parallel_replicate: 2 is no multiple of the 4 slices, between which only the sum of "
         "gradients should pass; give 4, or one slice"),
        ("--aot --hardware=v6e-2x2 --noparallelism.use_simple_fsdp",
         "--parallelism.use_simple_fsdp: false means one device, and v6e-2x2 has 4; "
         "leave it on, or give --hardware=v6e-1x1"),
        ("--tpu_config.use_graph_trainer=false --tpu_config.executor=torch --tpu_config.disable_passes=dead_code",
         "--tpu_config.disable_passes: there is no graph without the graph trainer; "
         "leave it out, or use the graph trainer"),
        ("--tpu_config.use_graph_trainer=false --tpu_config.executor=torch --compile.memory_policy=full",
         "--compile.memory_policy: there is no graph without the graph trainer; "
         "leave it out, or use the graph trainer"),
        ("--compile.offload_prefetch=2 --compile.memory_policy=full",
         "--compile.offload_prefetch: compile.memory_policy=full offloads nothing that could be fetched; "
         "leave it out, or give --compile.memory_policy=offload"),
        ("--compile.offload_prefetch=0 --compile.memory_policy=offload --tpu_config.use_graph_split",
         "--tpu_config.use_graph_split: compile.offload_prefetch=0 is for a step in one piece, and between pieces "
         "values come back in a way of their own; leave out one of the two"),
        ("--tpu_config.use_graph_split --tpu_config.use_scan_layers",
         "--tpu_config.use_graph_split: use_scan_layers is on too, and a loop over layers is one program or one for "
         "each iteration; add --notpu_config.use_scan_layers, or leave this out"),
        ("--tpu_config.use_graph_split --tpu_config.executor=torch",
         "--tpu_config.use_graph_split: the torch executor compiles nothing that could be split; "
         "leave it out, or use the xla executor"),
        ("--tpu_config.use_graph_split --aot.save=x",
         "--tpu_config.use_graph_split: a step that is saved is one program; "
         "leave it out, or leave out aot.save and aot.load"),
        ("--compile.enable=false",
         "--compile.enable: the xla executor always compiles; leave it on, or add --tpu_config.executor=torch"),
        ("--training.sequence_length=1",
         "--training.sequence_length: 1 is not admitted; give an integer of at least 2"),
        ("--training.sequence_length=512 --model.max_sequence_length=256",
         "--training.sequence_length: 512 is above model.max_sequence_length=256; "
         "give shorter sequences, or raise the model's limit"),
        ("--tokenizer.vocab_size=5000",
         "--tokenizer.vocab_size: 5000 token ids do not fit model.vocab_size=4096; "
         "give a smaller vocabulary, or a larger --model.vocab_size"),
        ("--profiler.enable --tpu_config.executor=torch",
         "--profiler.enable: the profiler is JAX's and would not see what PyTorch runs; "
         "leave it off, or use the xla executor"),
        ("--profiler.enable --profiler.start_step=299 --profiler.num_steps=2",
         "--profiler.start_step: the profile ends at step 301, training at training.steps=300; "
         "start earlier, profile fewer steps (--profiler.num_steps), or train longer"),
        ("--name=a/b", "--name: 'a/b' cannot name a folder; give a name without slashes, e.g. llama3_debug"),
        ("--data.path=/missing", "--data.path: there is no file or folder '/missing'; correct the path"),
        ("--tokenizer.path=/missing", "--tokenizer.path: there is no file or folder '/missing'; correct the path"),
        ("--training.stpes=3",
         "--training.stpes: there is no such flag; did you mean --training.steps? --helpfull lists all flags"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_exit_code_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_, one_line_errors():
        run(*arguments.split())
    assert exit_.value.code == 2
    assert capsys.readouterr().err == message + "\n"


@pytest.mark.parametrize(
    "flag", ["checkpoint.folder", "profiler.folder", "compile.cache_folder", "tpu_config.dump_graph"]
)
def test_folders_that_cannot_be_made_are_refused(tmp_path, flag):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"^--{flag}: .* cannot be a folder"):
        run(f"--{flag}={tmp_path}/file/folder")


@pytest.mark.parametrize(
    ("given", "num_present", "expected"),
    [
        ({}, 8, (8, 8, 1)),
        ({}, 1, (1, 1, 1)),
        ({"num_devices": 4}, 8, (4, 4, 1)),
        ({"data_parallel_replicate": 2}, 8, (8, 4, 2)),
        ({"data_parallel_replicate": 8}, 8, (8, 1, 8)),
        ({"data_parallel_shard": 2, "data_parallel_replicate": 4}, 8, (8, 2, 4)),
        ({"use_simple_fsdp": False}, 8, (1, 1, 1)),
    ],
)
def test_resolve_gives_numbers(given, num_present, expected):
    resolved = ParallelismConfig(**given).resolve(num_present)
    assert (resolved.num_devices, resolved.data_parallel_shard, resolved.data_parallel_replicate) == expected
    assert resolved.resolve(num_present) == resolved


def test_resolve_refuses_more_devices_than_present():
    with pytest.raises(
        ConfigError, match="--parallelism.num_devices: 4 devices are asked for, 2 are present; give fewer, or on CPUs"
    ):
        ParallelismConfig(num_devices=4).resolve(2)


def test_resolve_devices_checks_the_batch():
    assert Config().resolve_devices(8).parallelism.data_parallel_shard == 8
    with pytest.raises(
        ConfigError, match="16 is not a multiple of 3 devices times 1 microbatches; give a multiple of 3, e.g. 18"
    ):
        Config().resolve_devices(3)


def test_import_loads_nothing_heavy():
    """Flags are parsed and refused before torch or jax is there."""
    code = (
        "import sys, titan.train.config.run, titan.core.config.flags; "
        "heavy = 'torch jax numpy grain orbax transformers tensorboard'.split(); "
        "print([name for name in heavy if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--use_grouped_mm", ["grouped_matmul.enable"]),
        ("--use_pallas_paired_grouped_mm", ["grouped_matmul.enable", "grouped_matmul.paired"]),
        ("--grouped_mm_implementation=xla", ["grouped_matmul.implementation"]),
        ("--splash_attention_kernel.use_splash_attention_kernel=true", ["splash_attention_kernel.enable"]),
        ("--profiler.enable_profiling", ["profiler.enable"]),
    ],
)
def test_old_names_of_flags_are_understood_for_a_version(old, new, capsys):
    recipe = Config(model=Qwen3MoeConfig())
    value = old.partition("=")[2] or "true"
    assert parse(["run", old], recipe) == parse(["run", *(f"--{name}={value}" for name in new)], recipe)
    assert f"{old.partition('=')[0]} is now {' '.join('--' + name for name in new)}" in capsys.readouterr().err


def test_old_names_of_switches_can_be_off():
    recipe = Config(model=Qwen3MoeConfig(), grouped_matmul=GroupedMatmulConfig(enable=True, paired=True))
    assert parse(["run", "--nouse_pallas_paired_grouped_mm"], recipe).grouped_matmul == GroupedMatmulConfig(enable=True)
    assert not parse(["run", "--use_pallas_paired_grouped_mm=false"], recipe).grouped_matmul.paired


def test_a_file_of_the_version_before_is_read():
    plain = json.loads(to_json(Config(model=Qwen3MoeConfig())))
    del plain["grouped_matmul"], plain["plugins"]
    plain["splash_attention_kernel"]["use_splash_attention_kernel"] = True
    del plain["splash_attention_kernel"]["enable"]
    plain |= {"use_grouped_mm": False, "use_pallas_paired_grouped_mm": True, "grouped_mm_implementation": "xla"}
    config = from_json(json.dumps(plain), Config)
    assert config.grouped_matmul == GroupedMatmulConfig(enable=True, paired=True, implementation="xla")
    assert config.splash_attention_kernel.enable
