"""The recipes that have a program of their own, `//titan/train:NAME`: each a file of this folder."""

RECIPES = [
    "llama3_debug",
    "llama3_8b",
    "llama3_70b",
    "llama3_405b",
    "qwen3_debug",
    "qwen3_0_6b",
    "qwen3_8b",
    "qwen3_32b",
    "qwen3_moe_debug",
    "qwen3_30b_a3b",
    "qwen3_235b_a22b",
    "muse_glimmer_debug",
    "muse_glimmer_30b",
    "flux_debug",
    "flux_dev",
]
