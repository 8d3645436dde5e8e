"""Matrix products on a GPU: our kernel, the vendor's library as the engine calls it, CuPy's matmul and PyTorch's.

python benchmarks/bench_gemm.py [--keep]
"""

import sys
from pathlib import Path

import cupy

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import tinygrad_gpu as tg  # noqa: E402
from benchmarks.harness import Case, as_torch, gemm_ceiling, main  # noqa: E402
from tinygrad_gpu import blas  # noqa: E402
from tinygrad_gpu.ops import gemm  # noqa: E402

# The layers of GPT-2 124M at 32,768 tokens (K, N), and a square.
LAYERS = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
ROUNDING = {tg.float32: 2.0**-24, tg.float16: 2.0**-11, tg.bfloat16: 2.0**-8}


def shapes(tokens, size):
    """(label, shape of a, shape of b, whether each is the transpose of its memory)."""
    for k, n in LAYERS:
        yield f"forward {tokens}x{k} {k}x{n}", (tokens, k), (k, n), (False, True)
        yield f"dX {tokens}x{n} {n}x{k}", (tokens, n), (n, k), (False, False)
        yield f"dW {n}x{tokens} {tokens}x{k}", (n, tokens), (tokens, k), (True, False)
    yield f"square {size}", (size, size), (size, size), (False, False)


def case(label, a_shape, b_shape, turned, dtype):
    import torch

    a, b = (
        cupy.random.standard_normal(shape[::-1] if turn else shape, dtype=cupy.float32).astype(dtype)
        for shape, turn in zip((a_shape, b_shape), turned, strict=True)
    )
    a, b = (x.T if turn else x for x, turn in zip((a, b), turned, strict=True))
    c = cupy.empty((a_shape[0], b_shape[1]), dtype)
    ta, tb, tc = as_torch(a), as_torch(b), as_torch(c)

    def check():
        """Some rows against float64, relative to the size of what is summed."""
        gemm.product_kernel(c, a, b, 1.0, 0.0)
        rows = cupy.arange(0, c.shape[0], max(c.shape[0] // 64, 1))
        some, exact = a[rows].astype(cupy.float64), b.astype(cupy.float64)
        error = abs(c[rows] - some @ exact) / (abs(some) @ abs(exact))
        return float(error.max()), 2 * ROUNDING[dtype] + 2 * a.shape[1] ** 0.5 * 2.0**-24

    return Case(
        f"{label} {dtype}",
        lambda: gemm.product_kernel(c, a, b, 1.0, 0.0),
        {
            "library": lambda: blas.product(c, a, b, 1.0, 0.0),
            "cupy": lambda: cupy.matmul(a, b, out=c),
            "torch": lambda: torch.matmul(ta, tb, out=tc),
        },
        check,
        flops=2.0 * a.shape[0] * a.shape[1] * b.shape[1],
    )


def every():
    for shape in shapes(32768, 8192):
        yield case(*shape, tg.float32)


if __name__ == "__main__":
    main("bench_gemm", __doc__, every, lambda: gemm_ceiling(cupy.dtype("float32")))
