"""How tensor parallelism splits the transformer of FLUX.1. Imports no torch.

Attention has its heads split, each feed-forward its inner dim, and modulations their rows, whose vectors are put
together for all devices. Devices have all tokens between the blocks.
"""

from titan.parallel.parallel_plan import Border, ModulePlan, ParallelPlan, Split, Whole

_QKV = 3  # queries, keys and values: matrices one below the other, of each of which a device has a slice


def _linear(weight: Split | Whole, bias: Split | Whole, border: Border | None = None) -> ModulePlan:
    return ModulePlan({"weight": weight, "bias": bias}, border)


def _rows(segments: int = 1, border: Border | None = None) -> ModulePlan:
    """Of a projection [out, in] from the residual stream."""
    return _linear(Split(0, segments), Split(0, segments), border)


def _columns(segments: int = 1, border: Border | None = None) -> ModulePlan:
    """Of one to it."""
    return _linear(Split(1, segments), Whole.ON_SUM, border)


_MODULATION = _rows(border=Border.FEATURES)
_NORM_OF_HEADS = ModulePlan({"weight": Whole.ON_PARTS})
_ON_TOKENS = _linear(Whole.ON_TOKENS, Whole.ON_TOKENS)
# Gradients reach the embedders through the modulations, of whose rows each device has a part.
_EMBEDDER = _linear(Whole.ON_PARTS, Whole.ON_PARTS)

_STREAM = {
    "modulation.linear": _MODULATION,
    "projection": _rows(_QKV, Border.BEGIN),
    "qkv.q_norm": _NORM_OF_HEADS,
    "qkv.k_norm": _NORM_OF_HEADS,
    "out": _columns(border=Border.END),
    "feed_forward": ModulePlan(border=Border.BLOCK),
    "feed_forward.w_in": _rows(),
    "feed_forward.w_out": _columns(),
}


def flux_plan(*, mlp_ratio: int) -> ParallelPlan:
    """The plan of every size and form of the transformer.

    Args:
      mlp_ratio: inner dim of each feed-forward, in units of the model dim.
    """
    # The inner dim of the feed-forward lies beside the heads in a single block's output matrix, and may lie so in its
    # projection. Both are whole numbers of model dims, so that all of it is equal segments.
    single_block = {
        "modulation.linear": _MODULATION,
        "projection": ModulePlan(border=Border.BEGIN),
        "projection.linear": _rows(_QKV + mlp_ratio),
        "projection.qkv": _rows(_QKV),
        "projection.feed_forward": _rows(mlp_ratio),
        "qkv.q_norm": _NORM_OF_HEADS,
        "qkv.k_norm": _NORM_OF_HEADS,
        "out": _columns(1 + mlp_ratio, Border.END),
    }
    modules = {
        "image_in": _ON_TOKENS,
        "text_in": _ON_TOKENS,
        "time_in.*": _EMBEDDER,
        "pooled_in.*": _EMBEDDER,
        "guidance_in.*": _EMBEDDER,
        **{f"double_blocks.*.{kind}.{name}": plan for kind in ("text", "image") for name, plan in _STREAM.items()},
        **{f"single_blocks.*.{name}": plan for name, plan in single_block.items()},
        "final_modulation.linear": _MODULATION,
        "head": _ON_TOKENS,
    }
    return ParallelPlan(modules, ("num_heads",), splits_tokens=False)
