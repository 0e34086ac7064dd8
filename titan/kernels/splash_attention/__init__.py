"""Splash attention: masked, grouped-query attention with O(T) memory, on TPU by a kernel."""
