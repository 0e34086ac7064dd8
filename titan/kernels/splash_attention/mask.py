"""Which keys a query sees by position alone: causal and sliding-window masks, as rules instead of arrays."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class PositionMask:
    """A rule on positions; segment ids come on top of it, at run time.

    Attributes:
      causal: query t sees key s only if s <= t.
      window: query t sees key s only if t - s < window and, if not causal, s - t < window; 0: no window.
    """

    causal: bool
    window: int

    def within(self, length: int) -> "PositionMask":
        """The same mask for sequences of `length`, without a window that never excludes anything there."""
        return PositionMask(self.causal, self.window if self.window < length else 0)

    def visible(self, query: Any, key: Any) -> Any:
        """Whether each query sees each key, given broadcastable arrays of positions of any library.

        Returns:
          A bool array, or None if the mask excludes nothing anywhere.
        """
        visible = query >= key if self.causal else None
        if self.window:
            recent = query - key < self.window
            visible = recent if visible is None else visible & recent
            if not self.causal:
                visible = visible & (key - query < self.window)
        return visible

    def key_range(self, begin: Any, end: Any, length: int) -> tuple[Any, Any]:
        """The half-open range of keys, of `length`, that any of the queries `begin` to `end` (exclusive) sees.

        Takes integers and arrays of any library.
        """
        first = _at_least_zero(begin - self.window + 1) if self.window else 0 * begin
        if self.causal:
            return first, end
        return first, length - _at_least_zero(length - (end + self.window - 1)) if self.window else length + 0 * end

    def num_visible(self, length: int) -> int:
        """Number of (query, key) pairs, of `length` squared, that the mask lets through."""
        window = min(self.window or length, length)
        causal_pairs = window * (window + 1) // 2 + (length - window) * window
        return causal_pairs if self.causal else 2 * causal_pairs - length


def _at_least_zero(value: Any) -> Any:
    return value * (value > 0)
