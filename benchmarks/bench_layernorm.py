"""The kernels of layer norm, its fusion with a residual addition, and RMS norm on a GPU against PyTorch's.

python benchmarks/bench_layernorm.py [--keep]
"""

import sys
from pathlib import Path

import cupy

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.harness import Case, as_torch, distance, main  # noqa: E402
from tinygrad_gpu import dtypes  # noqa: E402
from tinygrad_gpu.ops import layernorm  # noqa: E402

EPS = 1e-5
FORMS = {"layer_norm": (True, False), "add_layer_norm": (True, True), "rms_norm": (False, False)}  # centred, fused


def cases(name, shape, dtype):
    import torch
    from torch.nn import functional

    centred, fused = FORMS[name]
    new = cupy.random.standard_normal
    x, residual, dy, ds = (new(shape, dtype=cupy.float32).astype(dtype) for _ in range(4))
    w, b = (new(shape[1], dtype=cupy.float32).astype(dtype) for _ in range(2))
    residual, ds = (residual, ds) if fused else (None, None)
    b = b if centred else None
    needs = True, True, centred
    _, mean, rstd = layernorm.fwd_kernel(x, w, b, EPS, centred)

    def wide(*arrays):
        return [None if a is None else a.astype(cupy.float64) for a in arrays]

    def forward():
        y, s, *_ = layernorm.add_fwd_kernel(x, residual, w, b, EPS, centred)
        return y, s

    def backward():
        return layernorm.bwd_kernel(dy, x, w, mean, rstd, needs, ds)

    def exact_forward():
        s, r, *others = wide(x, residual, w, b)
        s = s if r is None else s + r
        return layernorm.fwd(s, *others, EPS, centred)[0], s

    def exact_backward():
        statistics = layernorm.fwd(*wide(x, None, None), EPS, centred)[1:]
        return layernorm.bwd(*wide(dy, x, w), *statistics, needs, *wide(ds))

    def check(found, exact):
        pairs = zip(found(), exact(), strict=True)
        error = max(distance(a, b) for a, b in pairs if a is not None)
        return error, 2.0**-7 if dtype == dtypes.bfloat16 else 1e-5

    def torch_forward(x, w, b=None):
        s = x + as_torch(residual) if fused else x
        if centred:
            return functional.layer_norm(s, shape[1:], w, b, EPS), s
        return functional.rms_norm(s, shape[1:], w, EPS), s

    leaves = [as_torch(a).requires_grad_() for a in (x, w, b) if a is not None]
    results = torch_forward(*leaves)[: 1 + fused]
    upstream = [as_torch(a) for a in (dy, ds) if a is not None]

    def torch_backward():
        return torch.autograd.grad(results, leaves, upstream, retain_graph=True)

    label = f"{name} {shape[0]}x{shape[1]} {dtype}"
    yield Case(
        f"forward {label}",
        forward,
        {"torch": torch.no_grad()(lambda: torch_forward(*leaves))},
        lambda: check(forward, exact_forward),
        bytes=(4 if fused else 2) * x.nbytes,
    )
    yield Case(
        f"backward {label}",
        backward,
        {"torch": torch_backward},
        lambda: check(backward, exact_backward),
        bytes=(4 if fused else 3) * x.nbytes,
    )


def every():
    for shape in ((32768, 768), (16384, 4096)):
        for dtype in (dtypes.float32, dtypes.bfloat16):
            for name in FORMS:
                yield from cases(name, shape, dtype)


if __name__ == "__main__":
    main("bench_layernorm", __doc__, every)
