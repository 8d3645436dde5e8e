"""Matrix products on a GPU, plain and with what training does beside them, as our kernels do it in one launch: against
the vendor's library and a launch for each of the rest, as the engine has them, and against PyTorch's.

python benchmarks/bench_gemm.py [--no-peers] [--keep]
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import cupy
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import tinygrad_gpu as tg  # noqa: E402
from benchmarks.harness import Case, as_torch, gemm_ceiling, main  # noqa: E402
from tinygrad_gpu import blas  # noqa: E402
from tinygrad_gpu.ops import elementwise, gelu, gemm  # noqa: E402
from tinygrad_gpu.ops.copy import copied  # noqa: E402
from tinygrad_gpu.ops.gemm_config import ADD, GELU, SLOPE  # noqa: E402

TOKENS = 32768
ROUNDING = {tg.float32: 2.0**-24, tg.float16: 2.0**-11, tg.bfloat16: 2.0**-8}


def normal(*shape, dtype):
    """Normal numbers, a part at a time: float32 takes twice the room."""
    x = cupy.empty(shape, dtype)
    for i in range(0, len(x), 4096):
        x[i : i + 4096] = cupy.random.standard_normal(x[i : i + 4096].shape, dtype=cupy.float32)
    return x


def operands(kind, k, n, dtype):
    """a and b as training has them: transposed views for the forward's weight, and for dW's first factor."""
    if kind == "forward":
        return normal(TOKENS, k, dtype=dtype), normal(n, k, dtype=dtype).T
    if kind == "dX":
        return normal(TOKENS, n, dtype=dtype), normal(n, k, dtype=dtype)
    return normal(TOKENS, n, dtype=dtype).T, normal(TOKENS, k, dtype=dtype)


def turned(a):
    """A CuPy matrix as a PyTorch tensor of the same memory, transposed ones too."""
    return as_torch(a) if a.flags.c_contiguous else as_torch(a.T).T


class Ways(NamedTuple):
    """A product and what goes with it: ours in one launch, the library's product and a launch for each of the rest, as
    PyTorch has it, each a function of nothing; and `exact(rows, y)`, of rows y of a @ b in float64."""

    ours: Callable
    library: Callable
    torch: Callable
    exact: Callable


def plain(c, a, b, scale):
    ta, tb, tc = map(turned, (a, b, c))
    return Ways(
        lambda: gemm.product_kernel(c, a, b, scale),
        lambda: blas.product(c, a, b, scale, 0.0),
        lambda: torch.matmul(ta, tb, out=tc),
        lambda rows, y: y * scale,
    )


def by_library(c, a, b, scale, bias):
    """alpha a b + bias by the library, which adds to what it finds (and rounds the product before, if it likes)."""
    copied(cupy.broadcast_to(bias, c.shape), c)
    blas.product(c, a, b, scale, 1.0)


def with_bias(c, a, b, scale):
    bias, ta, tb, tc = normal(c.shape[1], dtype=a.dtype), *map(turned, (a, b, c))
    t_bias = turned(bias)
    return Ways(
        lambda: gemm.product_kernel(c, a, b, scale, bias=bias),
        lambda: by_library(c, a, b, scale, bias),
        lambda: torch.addmm(t_bias, ta, tb, alpha=scale, out=tc),
        lambda rows, y: y * scale + bias.astype(cupy.float64),
    )


def with_gelu(c, a, b, scale):
    bias, pre, ta, tb = normal(c.shape[1], dtype=a.dtype), cupy.empty_like(c), turned(a), turned(b)
    t_bias, tanh = turned(bias), {"approximate": "tanh"}
    return Ways(
        lambda: gemm.product_kernel(c, a, b, scale, bias=bias, epilogue=GELU, pre=pre, TANH=1),
        lambda: by_library(pre, a, b, scale, bias) or gelu.fwd_kernel(pre, "tanh"),
        lambda: torch.nn.functional.gelu(torch.addmm(t_bias, ta, tb, alpha=scale), **tanh),
        lambda rows, y: gelu.fwd(y * scale + bias.astype(cupy.float64), "tanh"),
    )


def with_residual(c, a, b, scale):
    bias, other, ta, tb = normal(c.shape[1], dtype=a.dtype), normal(*c.shape, dtype=c.dtype), turned(a), turned(b)
    t_bias, t_other = turned(bias), turned(other)
    return Ways(
        lambda: gemm.product_kernel(c, a, b, scale, 1.0, bias, epilogue=ADD, other=other),
        lambda: by_library(c, a, b, scale, bias) or elementwise.compute_kernel("add", c, other),
        lambda: torch.addmm(t_bias, ta, tb, alpha=scale).add_(t_other),
        lambda rows, y: y * scale + bias.astype(cupy.float64) + other[rows].astype(cupy.float64),
    )


def with_slope(c, a, b, scale):
    other, ta, tb = normal(*c.shape, dtype=c.dtype), turned(a), turned(b)
    t_other = turned(other)
    return Ways(
        lambda: gemm.product_kernel(c, a, b, scale, epilogue=SLOPE, other=other, TANH=1),
        lambda: blas.product(c, a, b, scale, 0.0) or gelu.bwd_kernel(c, other, "tanh"),
        lambda: torch.ops.aten.gelu_backward(torch.matmul(ta, tb) * scale, t_other, approximate="tanh"),
        lambda rows, y: gelu.bwd(y * scale, other[rows].astype(cupy.float64), "tanh"),
    )


def accumulated(c, a, b, scale, sums=None):
    c[...] = 0
    ta, tb, tc = map(turned, (a, b, c))
    return Ways(
        lambda: gemm.product_kernel(c, a, b, scale, 1.0, sums=sums),
        lambda: blas.product(c, a, b, scale, 1.0),
        lambda: tc.add_(ta @ tb),
        lambda rows, y: y * scale,
    )


def accumulated_with_sums(c, a, b, scale):
    """The bias's gradient by the library: a product with ones."""
    sums, ones = cupy.empty((1, len(a)), cupy.float32), cupy.ones((1, a.shape[1]), a.dtype)
    ways, ta = accumulated(c, a, b, scale, sums[0]), turned(a)
    return ways._replace(
        library=lambda: ways.library() or blas.product(sums, ones, a.T, 1.0, 0.0),
        torch=lambda: (ways.torch(), ta.sum(1, dtype=torch.float32)),
    )


# The layers of GPT-2 124M, (K, N), and what goes with their products in training: forward, dX, dW.
LAYERS = {
    (768, 2304): ("bias", None, "accumulate and bias gradient"),
    (768, 768): ("bias", None, "accumulate and bias gradient"),
    (768, 3072): ("bias and GELU", None, "accumulate and bias gradient"),
    (3072, 768): ("bias and residual", "GELU's slope", "accumulate and bias gradient"),
    (768, 50304): (None, None, "accumulate"),
}
WAYS = {
    None: plain,
    "bias": with_bias,
    "bias and GELU": with_gelu,
    "bias and residual": with_residual,
    "GELU's slope": with_slope,
    "accumulate": accumulated,
    "accumulate and bias gradient": accumulated_with_sums,
}


def case(kind, k, n, what, dtype):
    a, b = operands(kind, k, n, dtype)
    c = cupy.empty((a.shape[0], b.shape[1]), tg.float32 if what and "accumulate" in what else dtype)
    label = f"{kind} {k} x {n} {dtype}" + (f", {what}" if what else "")
    return case_of(label, a, b, c, WAYS[what], "with what training adds" if what else "plain")


def case_of(label, a, b, c, ways, group):
    scale = a.shape[1] ** -0.5
    ways = ways(c, a, b, scale)

    def check():
        """Some rows against float64, relative to the size of what is summed."""
        ways.ours()
        rows = cupy.arange(0, len(c), max(len(c) // 64, 1))
        some, whole = a[rows].astype(cupy.float64), b.astype(cupy.float64)
        error = abs(c[rows] - ways.exact(rows, some @ whole)) / (abs(some) @ abs(whole) * scale + 1)
        return float(error.max()), 2 * ROUNDING[c.dtype] + 2 * a.shape[1] ** 0.5 * 2.0**-24

    peers = {"library": ways.library, "torch": ways.torch}
    operations = 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
    return Case(label, ways.ours, peers, check, flops=operations, group=group)


def square(size, dtype):
    """A product of squares, both along their last axis."""
    a, b, c = (normal(size, size, dtype=dtype) for _ in range(3))
    return case_of(f"square {size} {dtype}", a, b, c, plain, "squares")


def every():
    for added in (False, True):
        for (k, n), whats in LAYERS.items():
            for kind, what in zip(("forward", "dX", "dW"), whats, strict=True):
                if what or not added:
                    yield case(kind, k, n, what if added else None, tg.bfloat16)
    for size, dtype in ((4096, tg.bfloat16), (8192, tg.bfloat16), (8192, tg.float16), (8192, tg.float32)):
        yield square(size, dtype)


if __name__ == "__main__":
    main("bench_gemm", __doc__, every, lambda: gemm_ceiling(tg.bfloat16))
