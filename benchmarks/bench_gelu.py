"""GELU's kernels on a GPU against PyTorch's.

python benchmarks/bench_gelu.py [--keep]
"""

import sys
from pathlib import Path

import cupy

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.harness import Case, as_torch, distance, main  # noqa: E402
from tinygrad_gpu import dtypes  # noqa: E402
from tinygrad_gpu.ops import gelu  # noqa: E402


def cases(shape, dtype, form):
    import torch

    x, dy = (cupy.random.standard_normal(shape, dtype=cupy.float32).astype(dtype) for _ in range(2))
    wide = x.astype(cupy.float64), dy.astype(cupy.float64)
    bound = 2.0**-7 if dtype == dtypes.bfloat16 else 1e-6
    tx, tdy = as_torch(x), as_torch(dy)
    label = f"{form} {shape[0]}x{shape[1]} {dtype}"
    yield Case(
        f"forward {label}",
        lambda: gelu.fwd_kernel(x, form),
        {"torch": lambda: torch.nn.functional.gelu(tx, approximate=form)},
        lambda: (distance(gelu.fwd_kernel(x, form), gelu.fwd(wide[0], form)), bound),
        bytes=2 * x.nbytes,
    )
    yield Case(
        f"backward {label}",
        lambda: gelu.bwd_kernel(dy, x, form),
        {"torch": lambda: torch.ops.aten.gelu_backward(tdy, tx, approximate=form)},
        lambda: (distance(gelu.bwd_kernel(dy, x, form), gelu.bwd(wide[1], wide[0], form)), bound),
        bytes=3 * x.nbytes,
    )


def every():
    for dtype in (dtypes.float32, dtypes.bfloat16):
        for form in ("none", "tanh"):
            yield from cases((32768, 3072), dtype, form)


if __name__ == "__main__":
    main("bench_gelu", __doc__, every)
