"""Dropout's kernel on a GPU against PyTorch's, of which backward is a product with the mask that it stored.

python benchmarks/bench_dropout.py [--keep]
"""

import sys
from pathlib import Path

import cupy

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.harness import Case, as_torch, distance, main  # noqa: E402
from tinygrad_gpu import dtypes  # noqa: E402
from tinygrad_gpu.ops import dropout  # noqa: E402

P, DRAWN = 0.1, (1, 2)


def cases(shape, dtype):
    import torch

    x = cupy.random.standard_normal(shape, dtype=cupy.float32).astype(dtype)
    expected = dropout.fwd(x, dropout.mask_like(x, P, DRAWN), P)
    tx = as_torch(x)
    _, mask = torch.native_dropout(tx, P, True)
    label = f"{shape[0]}x{shape[1]} {dtype}"

    def check():
        return distance(dropout.fwd_kernel(x, P, DRAWN), expected), 0.0

    def ours():
        return dropout.fwd_kernel(x, P, DRAWN)

    peers = {
        "forward": lambda: torch.native_dropout(tx, P, True),
        "backward": lambda: torch.ops.aten.native_dropout_backward(tx, mask, 1 / (1 - P)),
    }
    for name, peer in peers.items():
        yield Case(f"{name} {label}", ours, {"torch": peer}, check, bytes=2 * x.nbytes)
    weights = cupy.random.standard_normal((shape[0], 1023), dtype=cupy.float32).astype(dtype)
    kept = dropout.kept(cupy, cupy.arange(256 * shape[0], dtype=cupy.uint64), P, DRAWN)
    kept = kept.reshape(shape[0], 1024)[:, :1023]
    yield Case(
        f"rows of their own counters {shape[0]}x1023 {dtype}",
        lambda: dropout.rows_kernel(weights, P, DRAWN),
        {},
        lambda: (distance(dropout.rows_kernel(weights, P, DRAWN), dropout.fwd(weights, kept, P)), 0.0),
        bytes=2 * weights.nbytes,
    )


def every():
    for dtype in (dtypes.float32, dtypes.bfloat16):
        yield from cases((32768, 3072), dtype)


if __name__ == "__main__":
    main("bench_dropout", __doc__, every)
