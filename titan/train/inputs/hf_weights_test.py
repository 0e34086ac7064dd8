"""Hugging Face weights in and out of runs, by their flags, and the executors held against one another on the way."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from titan.core.checkpoint import CheckpointConfig
from titan.core.config.validate import ConfigError
from titan.models.llama3.config import Llama3Config
from titan.train.config.run import Config
from titan.train.inputs.hf_weights import check_hf
from titan.train.step.state import PARAMS
from titan.train.testing.grid import grid
from titan.train.testing.runs import Workplace, reported_losses, saved_state

STEPS = ("--training.steps=3", "--checkpoint.interval=100", "--training.validation_interval=3")

# Losses of float32 training over three steps, whose sums are taken in other orders.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Workplace:
    return Workplace(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def exported(workplace):
    folder = workplace.folder / "hf"
    workplace.train("first", *STEPS, f"--checkpoint.save_hf={folder}")
    return folder


def test_saved_weights_are_the_checkpoints_and_load_in_transformers(workplace, exported):
    from transformers import LlamaForCausalLM

    state = saved_state(workplace.folder / "first", 3)
    model = LlamaForCausalLM.from_pretrained(exported, dtype=torch.float32)
    theirs = model.state_dict()
    assert len(theirs) == sum(name.startswith(PARAMS) for name in state)
    wq = torch.from_numpy(state[f"{PARAMS}layers.0.attention.wq.weight"])
    assert torch.equal(theirs["model.layers.0.self_attn.q_proj.weight"], wq)


def test_a_run_that_begins_from_weights_and_does_not_learn_writes_the_same_bits(workplace, exported):
    again = workplace.folder / "hf_again"
    frozen = ("--optimizer.learning_rate=0", f"--checkpoint.load_hf={exported}", f"--checkpoint.save_hf={again}")
    for number, executor in enumerate(("xla", "torch")):
        folder = f"{again}{number}"
        workplace.train(
            f"frozen{number}",
            *STEPS,
            *frozen,
            f"--checkpoint.save_hf={folder}",
            f"--tpu_config.executor={executor}",
            "--parallelism.num_devices=2",
        )
        index = json.loads((exported / "model.safetensors.index.json").read_text())
        for shard in set(index["weight_map"].values()):
            first, second = load_file(exported / shard), load_file(f"{folder}/{shard}")
            assert first.keys() == second.keys()
            assert all(torch.equal(first[name], second[name]) for name in first), executor


def test_weights_of_another_model_and_a_full_folder_are_refused(workplace, exported):
    ended = workplace.run("other", f"--checkpoint.load_hf={exported}", "--model.ffn_dim=256")
    assert (ended.code, ended.out) == (2, [])
    assert ended.err == [
        f"--model.ffn_dim: 256 is not the 128 of the weights in {exported}; give --model.ffn_dim=128, or other weights"
    ]
    ended = workplace.run("other", f"--checkpoint.save_hf={exported}")
    assert (ended.code, ended.out) == (2, [])
    assert ended.err == [f"--checkpoint.save_hf: {exported} holds weights already; give an empty or new folder"]


@pytest.mark.parametrize(
    "flags",
    # Of eager processes resume_test holds the same in every run.
    grid(
        {
            "interpreted": (
                "--tpu_config.executor=torch",
                "--parallelism.num_devices=2",
                "--training.microbatches=2",
            ),
            "eager": (
                "--tpu_config.use_graph_trainer=false",
                "--compile.enable=false",
                "--parallelism.num_devices=2",
            ),
            "compiled_blocks": ("--tpu_config.use_graph_trainer=false",),
            "hsdp_sdpa": (
                "--parallelism.num_devices=4",
                "--parallelism.data_parallel_replicate=2",
                "--model.attention=sdpa",
            ),
        },
        {"eager", "hsdp_sdpa"},
    ),
)
def test_every_way_to_run_gives_the_same_losses(workplace, exported, flags, request):
    name = request.node.callspec.id
    workplace.train(name, *STEPS, *flags)
    expected, actual = (reported_losses(workplace.folder / run) for run in ("first", name))
    assert expected.keys() == actual.keys() == {1, 2, 3}
    for step, losses in expected.items():
        assert max(actual[step]) == pytest.approx(max(losses), rel=TOLERANCE)
    summaries = [json.loads((workplace.folder / run / "summary.json").read_text()) for run in ("first", name)]
    assert summaries[1]["validation_loss"] == pytest.approx(summaries[0]["validation_loss"], rel=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "checkpoint"), [("load_hf", CheckpointConfig(load_hf="x")), ("save_hf", CheckpointConfig(save_hf="x"))]
)
def test_a_family_without_such_weights_says_so_before_anything_is_compiled(name, checkpoint):
    class Own(Llama3Config):
        hf_format = ""

    config = dataclasses.replace(Config(), model=Own(), checkpoint=checkpoint)
    with pytest.raises(
        ConfigError, match=f"^--checkpoint.{name}: Own has no weights in Hugging Face's format; leave it out"
    ):
        check_hf(config)
