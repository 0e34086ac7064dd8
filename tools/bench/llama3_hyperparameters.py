"""The sizes of a Llama 3 and the constants of AdamW as the benchmarks' hand-written peers take them."""

from typing import Any

from titan.train.config.run import Config


def llama3_hyperparameters(config: Config) -> dict[str, Any]:
    """The fields of `jax_llama3.Hyperparameters`, from a configuration whose model is a Llama 3."""
    model, optimizer = config.model, config.optimizer
    return {
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.resolved_head_dim,
        "norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "beta1": optimizer.beta1,
        "beta2": optimizer.beta2,
        "epsilon": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": config.training.max_grad_norm,
    }
