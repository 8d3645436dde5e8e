"""The elementwise kernels on a GPU against PyTorch's and CuPy's own: large arrays, and one so small that what counts is
the launch.

python benchmarks/bench_elementwise.py [--keep]
"""

import sys
from pathlib import Path

import cupy

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.harness import Case, as_torch, distance, main  # noqa: E402
from tinygrad_gpu import dtypes  # noqa: E402
from tinygrad_gpu.ops import elementwise  # noqa: E402


def cases(shape, dtype):
    import torch

    a, b = (cupy.random.standard_normal(shape, dtype=cupy.float32).astype(dtype) for _ in range(2))
    aten, ta, tb = torch.ops.aten, as_torch(a), as_torch(b)
    # name in the kernel's source: second operand, PyTorch's function
    operations = {
        "add": (b, lambda: ta + tb),
        "add row": (b[0], lambda: ta + tb[0]),
        "mul": (b, lambda: ta * tb),
        "mul number": (0.7, lambda: ta * 0.7),
        "relu": (None, lambda: aten.relu(ta)),
        "relu_bwd": (b, lambda: aten.threshold_backward(ta, tb, 0)),
        "tanh": (None, lambda: aten.tanh(ta)),
        "tanh_bwd": (b, lambda: aten.tanh_backward(ta, tb)),
        "sigmoid": (None, lambda: aten.sigmoid(ta)),
        "sigmoid_bwd": (b, lambda: aten.sigmoid_backward(ta, tb)),
        "silu": (None, lambda: aten.silu(ta)),
        "silu_bwd": (b, lambda: aten.silu_backward(ta, tb)),
    }
    bound = 2.0**-7 if dtype == dtypes.bfloat16 else 1e-6
    for label, (second, peer) in operations.items():
        name = label.split()[0]
        operands = (a,) if second is None else (a, second)

        def check(name=name, operands=operands):
            wide = [x if isinstance(x, float) else x.astype(cupy.float64) for x in operands]
            return distance(elementwise.compute_kernel(name, *operands), elementwise.FORMULAS[name](*wide)), bound

        yield Case(
            f"{label} {shape[0]}x{shape[1]} {dtype}",
            lambda name=name, operands=operands: elementwise.compute(name, *operands),
            {"torch": peer, "cupy": lambda name=name, operands=operands: elementwise.FORMULAS[name](*operands)},
            check,
            bytes=a.nbytes * (3 if isinstance(second, cupy.ndarray) and second.ndim > 1 else 2),
        )


def every():
    large, small = (32768, 3072), (1024, 768)
    for shape, dtype in ((large, dtypes.float32), (large, dtypes.bfloat16), (small, dtypes.bfloat16)):
        yield from cases(shape, dtype)


if __name__ == "__main__":
    main("bench_elementwise", __doc__, every)
