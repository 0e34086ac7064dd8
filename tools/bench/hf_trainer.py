"""Hugging Face's own training step on one CPU: the loop of `transformers.Trainer` without its bookkeeping."""

from collections.abc import Mapping

import numpy as np

from titan.train.config.training import OptimizerConfig


class HfTrainer:
    """A model from a Hugging Face folder, in float32, and how it is trained.

    As in the Trainer: the model computes the loss from the labels, `clip_grad_norm_` clips, PyTorch's fused AdamW
    updates, and with `torch_compile=True` it is the model's forward that is compiled. Other than there, norms are
    decayed too, since titan decays them.
    """

    def __init__(self, folder: str, optimizer: OptimizerConfig, max_grad_norm: float, *, compiled: bool):
        """Initializes the instance.

        Args:
        folder: a folder that `AutoModelForCausalLM` reads.
        optimizer, max_grad_norm: of the run.
        compiled: whether the model is compiled, with Inductor; that happens in the first step.
        """
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self._model.train()
        self._forward = torch.compile(self._model) if compiled else self._model
        self._max_grad_norm = max_grad_norm
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )

    def step(self, batch: Mapping[str, np.ndarray], learning_rate: float) -> float:
        """One training step on `tokens` int [B, T], each row one document; returns the loss before the update."""
        import torch

        tokens = torch.from_numpy(batch["tokens"]).long()
        loss = self._forward(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()
