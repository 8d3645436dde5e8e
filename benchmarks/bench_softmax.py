"""The kernels of softmax and log-softmax on a GPU against PyTorch's, and those of attention by their bandwidth.

python benchmarks/bench_softmax.py [--keep]
"""

import sys
from pathlib import Path

import cupy

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.harness import Case, as_torch, distance, main  # noqa: E402
from tinygrad_gpu import dtypes  # noqa: E402
from tinygrad_gpu.ops import softmax  # noqa: E402

FORMS = {
    "softmax": (softmax.fwd, softmax.fwd_kernel, softmax.bwd, softmax.bwd_kernel),
    "log_softmax": (softmax.log_fwd, softmax.log_fwd_kernel, softmax.log_bwd, softmax.log_bwd_kernel),
}


def cases(name, shape, dtype):
    import torch

    fwd, fwd_kernel, bwd, bwd_kernel = FORMS[name]
    x, dy = (cupy.random.standard_normal(shape, dtype=cupy.float32).astype(dtype) for _ in range(2))
    y = fwd_kernel(x, -1)
    tx, tdy, ty = (as_torch(a) for a in (x, dy, y))
    torch_bwd = getattr(torch.ops.aten, f"_{name}_backward_data")
    bound = 2.0**-7 if dtype == dtypes.bfloat16 else 1e-5
    label = f"{name} {shape[0]}x{shape[1]} {dtype}"

    def error(found, f, *arrays):
        return distance(found, f(*(a.astype(cupy.float64) for a in arrays), -1)), bound

    yield Case(
        f"forward {label}",
        lambda: fwd_kernel(x, -1),
        {"torch": lambda: getattr(torch, name)(tx, -1)},
        lambda: error(fwd_kernel(x, -1), fwd, x),
        bytes=2 * x.nbytes,
    )
    yield Case(
        f"backward {label}",
        lambda: bwd_kernel(dy, y, -1),
        {"torch": lambda: torch_bwd(tdy, ty, -1, tx.dtype)},
        lambda: error(bwd_kernel(dy, y, -1), bwd, dy, y),
        bytes=3 * x.nbytes,
    )


def causal_cases(heads, length, dtype):
    """Scores in float32, half of which are read, and probabilities in dtype, all of which are written."""
    s, dp = (cupy.random.standard_normal((heads, length, length), dtype=cupy.float32) for _ in range(2))
    p, ds = (cupy.empty(s.shape, dtype) for _ in range(2))
    scale, bound = 0.125, 2.0**-7
    seen = cupy.tri(length, dtype=bool)
    lse = softmax.causal_fwd(s, scale, 0, out=p)[1]
    label = f"causal {heads}x{length}x{length} {dtype}"

    def exact():
        """p and ds of two heads."""
        y = softmax.fwd(cupy.where(seen, s[:2].astype(cupy.float64) * scale, -cupy.inf), -1)
        return y, softmax.bwd(dp[:2].astype(cupy.float64), y, -1) * scale

    def backward():
        softmax.causal_bwd(s, lse, dp, scale, 0, p=p, ds=ds)
        return p, ds

    yield Case(
        f"forward {label}",
        lambda: softmax.causal_fwd(s, scale, 0, out=p),
        {},
        lambda: (distance(softmax.causal_fwd(s, scale, 0, out=p)[0][:2], exact()[0]), bound),
        bytes=s.nbytes / 2 + p.nbytes,
    )
    yield Case(
        f"backward {label}",
        backward,
        {},
        lambda: (distance(backward()[1][:2], exact()[1]), bound),
        bytes=s.nbytes / 2 + dp.nbytes / 2 + p.nbytes + ds.nbytes,
    )


def every():
    for dtype in (dtypes.float32, dtypes.bfloat16):
        for name in FORMS:
            yield from cases(name, (16384, 4096), dtype)
    yield from causal_cases(384, 1024, dtypes.bfloat16)


if __name__ == "__main__":
    main("bench_softmax", __doc__, every)
