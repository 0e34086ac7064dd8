"""The private names of PyTorch that this package uses. Checked with torch 2.13.0, which its wheel requires."""

from torch.distributed.distributed_c10d import _resolve_process_group as resolve_process_group
from torch.distributed.tensor.debug import _clear_sharding_prop_cache as clear_dtensor_caches
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["FakeStore", "clear_dtensor_caches", "resolve_process_group"]
