"""Embedding's kernels on a GPU against PyTorch's: a table of bytes, where hundreds of rows share an id, and GPT-2's.

python benchmarks/bench_embedding.py [--keep]
"""

import math
import sys
from pathlib import Path

import cupy

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.harness import Case, as_torch, distance, main  # noqa: E402
from tinygrad_gpu import dtypes  # noqa: E402
from tinygrad_gpu.ops import embedding  # noqa: E402


def frequent(n, vocabulary):
    """n ids distributed as words are: id v about 1 / (v + 1) as often as the first (Zipf's law)."""
    ids = cupy.exp(cupy.random.uniform(0, math.log(vocabulary + 1), n)).astype(cupy.int64) - 1
    return cupy.random.permutation(vocabulary)[ids.clip(0, vocabulary - 1)]


def cases(vocabulary, ids, width, dtype, label):
    import torch

    n = len(ids)
    weight, dy = (cupy.random.standard_normal((r, width), dtype=cupy.float32).astype(dtype) for r in (vocabulary, n))
    grad = cupy.zeros((vocabulary, width), cupy.float32)
    exact = cupy.zeros((vocabulary, width), cupy.float64)
    cupy.add.at(exact, ids, dy.astype(cupy.float64))
    tids, tweight, tdy = as_torch(ids), as_torch(weight), as_torch(dy)
    touched = int(cupy.unique(ids).size) * width
    label = f"{label}, {n}x{width} {dtype}"

    def check():
        grad.fill(0)
        embedding.scatter_add(grad, dy, ids)
        return distance(grad, exact), 1e-6

    yield Case(
        f"forward {label}",
        lambda: embedding.fwd_kernel(ids, weight),
        {"torch": lambda: torch.nn.functional.embedding(tids, tweight)},
        lambda: (distance(embedding.fwd_kernel(ids, weight), weight[ids]), 0.0),
        bytes=dy.nbytes + min(dy.nbytes, touched * weight.itemsize),
    )
    yield Case(
        f"backward {label}",
        lambda: embedding.scatter_add(grad, dy, ids),  # into a gradient that is there: no zeros to write
        {"torch": lambda: torch.ops.aten.embedding_dense_backward(tdy, tids, vocabulary, -1, False)},
        check,
        bytes=dy.nbytes + 2 * touched * grad.itemsize,
    )


def every():
    n, width = 32768, 768
    inputs = {
        "bytes": (256, frequent(n, 256)),
        "GPT-2": (50257, frequent(n, 50257)),
        "one id": (256, cupy.zeros(n, cupy.int64)),
    }
    for dtype in (dtypes.float32, dtypes.bfloat16):
        for label, (vocabulary, ids) in inputs.items():
            yield from cases(vocabulary, ids, width, dtype, label)


if __name__ == "__main__":
    main("bench_embedding", __doc__, every)
