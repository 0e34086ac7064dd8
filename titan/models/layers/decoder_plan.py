"""How tensor parallelism splits the decoder that several families are. Imports no torch.

Attention has its heads split, the feed-forward and each expert their inner dim, embedding and head the vocabulary.
Heads of keys and values may be fewer than the devices, which then share them.
Norms of the residual stream, and the router, which every device runs on all tokens, are whole.
"""

from titan.parallel.parallel_plan import Border, ModulePlan, ParallelPlan, SharedParts, Split, Whole

_ROWS = ModulePlan({"weight": Split(0)})  # of a projection [out, in] from the residual stream
_KV_ROWS = ModulePlan({"weight": Split(0)}, Border.SHARED)
_COLUMNS = ModulePlan({"weight": Split(1)})  # of one to it
_NORM_OF_HEADS = ModulePlan({"weight": Whole.ON_PARTS})
_NORM_OF_TOKENS = ModulePlan({"weight": Whole.ON_TOKENS})

_MODULES = {
    "embedding": ModulePlan({"weight": Split(0)}, Border.VOCABULARY),
    "layers.*.attention_norm": _NORM_OF_TOKENS,
    "layers.*.attention": ModulePlan(border=Border.BLOCK),
    "layers.*.attention.wq": _ROWS,
    "layers.*.attention.wk": _KV_ROWS,
    "layers.*.attention.wv": _KV_ROWS,
    "layers.*.attention.o_gate": _ROWS,
    "layers.*.attention.q_norm": _NORM_OF_HEADS,
    "layers.*.attention.k_norm": _NORM_OF_HEADS,
    "layers.*.attention.wo": _COLUMNS,
    "layers.*.attention_post_norm": _NORM_OF_TOKENS,
    "layers.*.feed_forward_norm": _NORM_OF_TOKENS,
    "layers.*.feed_forward": ModulePlan(border=Border.BLOCK),
    "layers.*.feed_forward.w1": _ROWS,
    "layers.*.feed_forward.w3": _ROWS,
    "layers.*.feed_forward.w2": _COLUMNS,
    # Gradients reach the router through the weights of the experts' results, of which each device has a part.
    "layers.*.feed_forward.router": ModulePlan({"weight": Whole.ON_PARTS}),
    "layers.*.feed_forward.experts": ModulePlan({"w1": Split(2), "w2": Split(1), "w3": Split(2)}),
    "layers.*.feed_forward_post_norm": _NORM_OF_TOKENS,
    "norm": _NORM_OF_TOKENS,
    "head": _ROWS,
    "cross_entropy": ModulePlan(border=Border.LOSS),
}


def decoder_plan(*, inner_dim: str, num_kv_heads: int, head_dim: int) -> ParallelPlan:
    """The plan of a family of decoders.

    Args:
      inner_dim: the field of the configuration with the inner dim of the feed-forward, or of one expert.
      num_kv_heads: heads of keys and values.
      head_dim: elements of a head.
    """
    shared = SharedParts("num_kv_heads", num_kv_heads, head_dim)
    return ParallelPlan(_MODULES, ("num_heads", inner_dim, "vocab_size"), shared)
