"""Matrix products on a GPU, plain and with what training does beside them, as our kernels do it in one launch: against
the vendor's library and a launch for each of the rest, as the engine has them, and against PyTorch's.

python benchmarks/bench_gemm.py [--no-peers] [--keep]
"""

import sys
from pathlib import Path

import cupy

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import tinygrad_gpu as tg  # noqa: E402
from benchmarks.harness import Case, as_torch, gemm_ceiling, main  # noqa: E402
from tinygrad_gpu import blas  # noqa: E402
from tinygrad_gpu.ops import elementwise, gelu, gemm  # noqa: E402
from tinygrad_gpu.ops.gemm_config import ADD, GELU, SLOPE  # noqa: E402

TOKENS = 32768
# The layers of GPT-2 124M, (K, N), and what goes with their products in training: forward, dX, dW.
LAYERS = {
    (768, 2304): ("bias", None, "accumulate and bias gradient"),
    (768, 768): ("bias", None, "accumulate and bias gradient"),
    (768, 3072): ("bias and GELU", None, "accumulate and bias gradient"),
    (3072, 768): ("bias and residual", "GELU's slope", "accumulate and bias gradient"),
    (768, 50304): (None, None, "accumulate"),
}
ROUNDING = {tg.float32: 2.0**-24, tg.float16: 2.0**-11, tg.bfloat16: 2.0**-8}


def normal(*shape, dtype, scale=1.0):
    """Normal numbers, a part at a time: float32 takes twice the room."""
    x = cupy.empty(shape, dtype)
    for i in range(0, len(x), 4096):
        x[i : i + 4096] = cupy.random.standard_normal(x[i : i + 4096].shape, dtype=cupy.float32) * scale
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


class Extra:
    """What goes with a product: `ours` in one launch, `library` after the library's product, `torch` as PyTorch has it,
    each a function of nothing; `exact(rows, product)` of the rows of a product in float64."""

    def __init__(self, what, a, b, c):
        import torch

        (m, k), n, dtype = a.shape, b.shape[1], a.dtype
        ta, tb, tc, scale = turned(a), turned(b), as_torch(c), k**-0.5
        plain = {"alpha": scale}
        self.exact = lambda rows, y: y * scale
        self.results = [c]
        if what is None:
            self.ours = lambda: gemm.product_kernel(c, a, b, **plain)
            self.library = lambda: blas.product(c, a, b, scale, 0.0)
            self.torch = lambda: torch.matmul(ta, tb, out=tc)
            return
        bias, other, form = normal(n, dtype=dtype), normal(m, n, dtype=c.dtype), {"TANH": 1}
        t_bias, t_other = as_torch(bias), as_torch(other)
        wide = lambda rows, y: y * scale + bias.astype(cupy.float64)  # noqa: E731
        if what == "bias":
            self.ours = lambda: gemm.product_kernel(c, a, b, scale, bias=bias)
            self.library = lambda: gemm._begin_with(c, bias, 0.0) or blas.product(c, a, b, scale, 1.0)
            self.torch = lambda: torch.addmm(t_bias, ta, tb, alpha=scale, out=tc)
            self.exact = wide
        elif what == "bias and GELU":
            pre = cupy.empty_like(c)
            self.ours = lambda: gemm.product_kernel(c, a, b, scale, bias=bias, epilogue=GELU, pre=pre, **form)
            self.library = lambda: (
                gemm._begin_with(pre, bias, 0.0) or blas.product(pre, a, b, scale, 1.0),
                gelu.fwd_kernel(pre, "tanh"),
            )
            self.torch = lambda: torch.nn.functional.gelu(torch.addmm(t_bias, ta, tb, alpha=scale), approximate="tanh")
            self.exact = lambda rows, y: gelu.fwd(wide(rows, y), "tanh")
        elif what == "bias and residual":
            self.ours = lambda: gemm.product_kernel(c, a, b, scale, 1.0, bias, epilogue=ADD, other=other)
            self.library = lambda: (
                gemm._begin_with(c, bias, 0.0) or blas.product(c, a, b, scale, 1.0),
                elementwise.compute_kernel("add", c, other),
            )
            self.torch = lambda: torch.addmm(t_bias, ta, tb, alpha=scale).add_(t_other)
            self.exact = lambda rows, y: wide(rows, y) + other[rows].astype(cupy.float64)
        elif what == "GELU's slope":
            self.ours = lambda: gemm.product_kernel(c, a, b, scale, epilogue=SLOPE, other=other, **form)
            self.library = lambda: (blas.product(c, a, b, scale, 0.0), gelu.bwd_kernel(c, other, "tanh"))
            self.torch = lambda: torch.ops.aten.gelu_backward(torch.matmul(ta, tb), t_other, approximate="tanh")
            self.exact = lambda rows, y: gelu.bwd(y * scale, other[rows].astype(cupy.float64), "tanh")
        else:
            sums = cupy.empty(m, cupy.float32) if "bias" in what else None
            c[...] = 0
            self.ours = lambda: gemm.product_kernel(c, a, b, scale, 1.0, sums=sums)
            self.library = lambda: (
                blas.product(c, a, b, scale, 1.0),
                None if sums is None else gemm.column_sum(a.T),
            )
            self.torch = lambda: (tc.add_(ta @ tb), None if sums is None else ta.sum(1, dtype=torch.float32))


def case(kind, k, n, what, dtype):
    a, b = operands(kind, k, n, dtype)
    c = cupy.empty((a.shape[0], b.shape[1]), tg.float32 if what and "accumulate" in what else dtype)
    extra = Extra(what, a, b, c)

    def check():
        """Some rows against float64, relative to the size of what is summed."""
        extra.ours()
        rows = cupy.arange(0, len(c), max(len(c) // 64, 1))
        some, whole = a[rows].astype(cupy.float64), b.astype(cupy.float64)
        error = abs(c[rows] - extra.exact(rows, some @ whole)) / (abs(some) @ abs(whole) * a.shape[1] ** -0.5 + 1)
        return float(error.max()), 2 * ROUNDING[c.dtype] + 2 * a.shape[1] ** 0.5 * 2.0**-24

    return Case(
        f"{kind} {k} x {n} {dtype}" + (f", {what}" if what else ""),
        extra.ours,
        {"library": extra.library, "torch": extra.torch},
        check,
        flops=2.0 * a.shape[0] * a.shape[1] * b.shape[1],
        group="with what training adds" if what else "plain",
    )


def every():
    for added in (False, True):
        for (k, n), whats in LAYERS.items():
            for kind, what in zip(("forward", "dX", "dW"), whats, strict=True):
                if what or not added:
                    yield case(kind, k, n, what if added else None, tg.bfloat16)


if __name__ == "__main__":
    main("bench_gemm", __doc__, every, lambda: gemm_ceiling(tg.bfloat16))
