"""GPU queries, under PyTorch's name (a ROCm GPU counts too)."""

from .device import is_available

__all__ = ["is_available"]
