"""Small decoders with random weights and a batch for them, which the tests of all families share."""

import torch

from titan.models.family import ModelConfig

VOCAB_SIZE = 61


def build(config: ModelConfig, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The model with random weights, on the CPU."""
    model = config.components().build()
    generator = torch.Generator().manual_seed(0)
    weights = {n: (torch.randn(p.shape, generator=generator) * 0.3).to(dtype) for n, p in model.named_parameters()}
    model.load_state_dict(weights, assign=True)
    return model


def batch(length: int = 24) -> dict[str, torch.Tensor]:
    """Two rows of one document each, as the arguments of `model.loss`."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB_SIZE, (2, length), generator=generator, dtype=torch.int32)
    return {
        "tokens_BT": tokens,
        "labels_BT": tokens.roll(-1, 1),
        "positions_BT": torch.arange(length, dtype=torch.int32).repeat(2, 1),
        "segment_ids_BT": torch.ones(2, length, dtype=torch.int32),
    }


class LossOf(torch.nn.Module):
    """Makes `model.loss` the forward, which is what functional_call calls."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        return self.model.loss(**inputs)


def loss_and_gradients(model, weights, inputs):
    """The loss, and its gradient for each of `weights`, which take the place of the model's own."""
    weights = {f"model.{name}": weight.detach().requires_grad_() for name, weight in weights.items()}
    loss = torch.func.functional_call(LossOf(model), weights, kwargs=inputs, args=())
    return [loss, *torch.autograd.grad(loss, list(weights.values()))]
