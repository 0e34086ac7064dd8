"""The mask of attention where each device has some tokens of each sequence as queries, and all of them as keys.

Shapes: B batch, T tokens on this device (queries), S tokens of a sequence (keys), C chunks of neighbours in T.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from titan.parallel.context_parallel import chunk_starts, gather_set, gather_tokens
from titan.parallel.mesh_axis import MeshAxis


class SplitMask(NamedTuple):
    """An `AttentionMask` of this device's queries; a token's place is its index in the sequence.

    Attributes:
      segment_ids_BT: integer document ids of the queries.
      kv_segment_ids_BS: those of the keys, in the order of the sequence.
      query_starts_C: int32, place of the first query of each chunk; 0 where places do not matter.
      allowed_BTS: bool, true where query t sees key s.
    """

    segment_ids_BT: Tensor
    kv_segment_ids_BS: Tensor
    query_starts_C: Tensor
    allowed_BTS: Tensor

    def allowed_within(self, window: int) -> Tensor:
        """`allowed_BTS` without the pairs where query t is `window` or more after key s; 0: no window."""
        if not window:
            return self.allowed_BTS
        return self.allowed_BTS & (_places_before(self.query_starts_C, *self.allowed_BTS.shape[1:]) < window)


def _places_before(query_starts_C: Tensor, num_queries: int, num_keys: int) -> Tensor:
    """How many places key s is before query t, [T, S]; negative: after."""
    num_chunks = query_starts_C.shape[0]
    offset = torch.arange(num_queries // num_chunks, dtype=torch.int32, device=query_starts_C.device)
    query_T = (query_starts_C.unsqueeze(1) + offset).flatten()
    return query_T.unsqueeze(1) - torch.arange(num_keys, dtype=torch.int32, device=query_starts_C.device)


@dataclasses.dataclass(frozen=True)
class SplitMaskConfig:
    """Configuration of `SplitCausalSegmentMask`.

    Attributes:
      axis: the mesh axis that splits sequences.
    """

    axis: str

    def build(self) -> "SplitCausalSegmentMask":
        """The module, which has no parameters; it runs on a mesh with that axis alone."""
        return SplitCausalSegmentMask(self)


class SplitCausalSegmentMask(nn.Module):
    """`CausalSegmentMask` of the sequences that are split along a mesh axis."""

    def __init__(self, config: SplitMaskConfig):
        super().__init__()
        self.config = config

    def bind_axes(self, axes: Mapping[str, MeshAxis]) -> None:
        """Takes the axes of the mesh that it runs on."""
        self._axis = axes[self.config.axis]

    def forward(self, segment_ids_BT: Tensor) -> SplitMask:
        """The mask of this device's part of a batch."""
        num_queries = segment_ids_BT.shape[1]
        starts_C = chunk_starts(self._axis, num_queries)
        ids_BS = gather_tokens(segment_ids_BT, self._axis, dim=1)
        causal_TS = _places_before(starts_C, num_queries, ids_BS.shape[1]) >= 0
        allowed_BTS = causal_TS & (segment_ids_BT.unsqueeze(2) == ids_BS.unsqueeze(1))
        return SplitMask(segment_ids_BT, ids_BS, starts_C, allowed_BTS)


@dataclasses.dataclass(frozen=True)
class SplitSegmentMaskConfig:
    """Configuration of `SplitSegmentMask`.

    Attributes:
      axis: the mesh axis that splits rows.
    """

    axis: str

    def build(self) -> "SplitSegmentMask":
        """The module, which has no parameters; it runs on a mesh with that axis alone."""
        return SplitSegmentMask(self)


class SplitSegmentMask(nn.Module):
    """`SegmentMask` of rows whose tokens are split along a mesh axis; keys are in the order of `gather_set`."""

    def __init__(self, config: SplitSegmentMaskConfig):
        super().__init__()
        self.config = config

    def bind_axes(self, axes: Mapping[str, MeshAxis]) -> None:
        """Takes the axes of the mesh that it runs on."""
        self._axis = axes[self.config.axis]

    def forward(self, segment_ids_BT: Tensor) -> SplitMask:
        """The mask of this device's part of a batch."""
        ids_BS = gather_set(segment_ids_BT, self._axis, dim=1)
        starts_C = torch.zeros(1, dtype=torch.int32, device=segment_ids_BT.device)
        return SplitMask(segment_ids_BT, ids_BS, starts_C, segment_ids_BT.unsqueeze(2) == ids_BS.unsqueeze(1))
