"""Tests against PyTorch, skipped where it is not installed."""

import contextlib

with contextlib.suppress(ImportError):
    import torch

    torch.set_num_threads(1)  # on arrays this small threads would mostly wait for one another
