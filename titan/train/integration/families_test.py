"""The model families in training: the step on devices as on one and by XLA as by PyTorch, weights of another family."""

import pytest
import torch

from titan.core.checkpoint import CheckpointConfig
from titan.core.config.validate import ConfigError
from titan.models.family import ModelConfig
from titan.train.config.run import Config
from titan.train.inputs.hf_weights import check_hf
from titan.train.testing.case import FSDP, HSDP, Case
from titan.train.testing.executed import run_torch, run_xla
from titan.train.testing.grid import grid
from titan.train.testing.models import CONFIGS
from titan.train.testing.outcome import assert_same

TOLERANCE = 1e-5  # of the largest value: float32 sums in another order

CASES = {
    "tied_fsdp2": Case("qwen3_tied", FSDP),
    "moe_hsdp4": Case("qwen3_moe_six", HSDP),
    "moe_odd_fsdp2": Case("qwen3_moe_three", FSDP),
    "muse_fsdp2": Case("muse_glimmer", FSDP),
    "muse_hsdp4": Case("muse_glimmer", HSDP),
}


@pytest.mark.parametrize("case", grid(CASES, {"muse_fsdp2"}))
def test_a_mesh_equals_one_device(case):
    assert_same(run_xla(case), run_xla(Case(case.model)), TOLERANCE)


@pytest.mark.parametrize("model", sorted({case.model for case in CASES.values()}))
def test_xla_equals_torch_and_the_loss_falls(model):
    got = run_xla(Case(model))
    assert_same(got, run_torch(Case(model)), TOLERANCE)
    assert got.metrics[2]["loss"] < got.metrics[0]["loss"] - 1e-3


def saved(config: ModelConfig, folder) -> str:
    config.hf().save_hf(
        {n: torch.zeros(p.shape) for n, p in config.components().build().named_parameters()}, config, folder
    )
    return str(folder)


@pytest.mark.parametrize(
    "theirs, ours, message",
    [
        (
            "qwen3_tied",
            "qwen3_moe_six",
            "--checkpoint.load_hf: the weights in {} are those of a Qwen3Config, the model is a ",
        ),
        (
            "qwen3_moe_six",
            "qwen3_tied",
            "--checkpoint.load_hf: the weights in {} are those of a Qwen3MoeConfig, the model ",
        ),
        (
            "qwen3_moe_six",
            "qwen3_moe_three",
            "--model.num_experts: 3 is not the 6 of the weights in {}; give --model.num_",
        ),
        (
            "qwen3_moe_six",
            "llama3",
            "--checkpoint.load_hf: {}/config.json: model_type is 'qwen3_moe', a Llama 3 has 'llama'",
        ),
        (
            "llama3",
            "qwen3_moe_six",
            "--checkpoint.load_hf: {}/config.json: model_type is 'llama', a Qwen3 has 'qwen3' or ",
        ),
        ("llama3", "muse_glimmer", "--checkpoint.load_hf: {}/config.json: model_type is 'llama', a Muse Glimmer has "),
    ],
)
def test_weights_of_another_model_are_refused(theirs, ours, message, tmp_path):
    models = {name: config.model for name, config in CONFIGS.items()}
    folder = saved(models[theirs], tmp_path)
    check_hf(Config(model=models[theirs], checkpoint=CheckpointConfig(load_hf=folder)))
    with pytest.raises(ConfigError) as error:
        check_hf(Config(model=models[ours], checkpoint=CheckpointConfig(load_hf=folder)))
    assert str(error.value).startswith(message.format(folder)) and "\n" not in str(error.value)
