"""PyTorch's own ways to run the training step: eager, and the model's loss under `torch.compile`.

Both train titan's plain `nn.Module` with `torch.optim.AdamW` and `clip_grad_norm_`, on one device.

What was tried on two CPU cores with the debug size: CPU seconds of one step of 16 sequences, the least of four, on a
machine with other load, so some tenths mean nothing. Eager: `math` attention 3.2, `sdpa` 2.8 with foreach
AdamW and 3.3 with fused. Compiled as a whole: `sdpa` 2.2, `math` 2.6. Compiled block by block: `sdpa` 2.6.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch

from titan.core.data.packing import IGNORED_LABEL
from titan.train.config.run import Config


class TorchTrainer:
    """A model, its optimizer and how its loss is run."""

    def __init__(self, named: Mapping[str, np.ndarray], config: Config, *, compiled: bool):
        """Initializes the instance.

        Args:
        named: initial weights by fully qualified name.
        config: of the run; its `model.attention` is replaced by PyTorch's fused attention.
        compiled: whether the loss and its backward are compiled; that happens in the first step.
        """
        model_config = dataclasses.replace(config.model, attention="sdpa")
        self._model = model_config.components().build().to_empty(device="cpu")
        self._model.load_state_dict({name: torch.from_numpy(value) for name, value in named.items()})
        self._loss = torch.compile(self._model.loss, fullgraph=True) if compiled else self._model.loss
        self._batch_tensors = model_config.batch_tensors(config.training.sequence_length)
        self._max_grad_norm = config.training.max_grad_norm
        optimizer = config.optimizer
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )

    def step(self, batch: Mapping[str, np.ndarray], learning_rate: float) -> float:
        """One training step; returns the loss before the update, which is skipped where the gradient is not finite."""
        tensors = [torch.from_numpy(batch[tensor.name]) for tensor in self._batch_tensors]
        num_tokens = torch.from_numpy(batch["labels"] != IGNORED_LABEL).sum().clamp(min=1)
        loss = self._loss(*tensors) / num_tokens
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
        if torch.isfinite(grad_norm):
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()
