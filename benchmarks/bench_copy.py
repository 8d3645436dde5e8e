"""Copies between memory layouts on a GPU, against PyTorch's and CuPy's: heads of attention apart and together.

python benchmarks/bench_copy.py [--keep]
"""

import sys
from pathlib import Path

import cupy

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.harness import Case, as_torch, main  # noqa: E402
from tinygrad_gpu import dtypes  # noqa: E402
from tinygrad_gpu.ops.copy import copied  # noqa: E402


def cases(dtype):
    b, t, h, d = 32, 1024, 12, 64
    whole = cupy.random.standard_normal((b, t, 3, h, d), dtype=cupy.float32).astype(dtype)
    for label, x in {
        "queries out of (B, T, 3, H, D)": whole[:, :, 0].transpose(0, 2, 1, 3),
        "a transpose of 16384 x 4096": whole.reshape(-1)[: 16384 * 4096].reshape(16384, 4096).T,
    }.items():
        tx = as_torch(x)
        yield Case(
            f"{label}, {dtype}",
            lambda x=x: copied(x),
            {
                "torch": lambda tx=tx: tx.clone(memory_format=__import__("torch").contiguous_format),
                "cupy": lambda x=x: x.copy(),
            },
            lambda x=x: (0.0 if (copied(x) == x).all() else 1.0, 0.0),
            bytes=2 * x.nbytes,
        )


def every():
    for dtype in (dtypes.float32, dtypes.bfloat16):
        yield from cases(dtype)


if __name__ == "__main__":
    main("bench_copy", __doc__, every)
