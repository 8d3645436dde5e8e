"""How far products are from float64's, ours and the vendor's library's, over random shapes and layouts on a GPU.

python benchmarks/errors_gemm.py [--keep]

Of each dtype and that of the result: the largest error of an element in parts of sum |a||b|, and the distance of all
elements, |c - exact| / |exact|, on the root mean square over the shapes.
"""

import argparse
import sys
from pathlib import Path

import cupy
import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import tinygrad_gpu as tg  # noqa: E402
from benchmarks.harness import distance, gpu, keep  # noqa: E402
from tinygrad_gpu.ops.gemm import product  # noqa: E402

SHAPES = 40
KINDS = [(tg.float32, tg.float32, False), (tg.float32, tg.float32, True)]
KINDS += [(dtype, out, False) for dtype in (tg.float16, tg.bfloat16) for out in (dtype, tg.float32)]


def matrix(draw, shape, dtype):
    """Normal numbers along the last axis or the first."""
    turn = draw.integers(2)
    x = cupy.asarray(draw.standard_normal(shape[::-1] if turn else shape, np.float32)).astype(dtype)
    return x.T if turn else x


def errors(dtype, out, tf32):
    """{engine: (largest, distance)}."""
    draw, found = np.random.default_rng(0), {"kernel": [], "blas": []}
    tg.config.allow_tf32 = tf32
    for _ in range(SHAPES):
        m, n, k = (int(2 ** draw.uniform(0, most)) for most in (11, 11, 15))
        a, b = (matrix(draw, shape, dtype) for shape in ((m, k), (k, n)))
        wide = a.astype(cupy.float64), b.astype(cupy.float64)
        exact, scale = wide[0] @ wide[1], abs(wide[0]) @ abs(wide[1])
        for engine, results in found.items():
            tg.config.gemm = engine
            c = product(a, b, dtype=out)
            results.append((float((abs(c - exact) / scale).max()), distance(c, exact)))
    tg.config.gemm, tg.config.allow_tf32 = "auto", False
    return {engine: (max(e for e, _ in r), float(np.mean([d * d for _, d in r]) ** 0.5)) for engine, r in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/errors_gemm.json")
    keep_results, lines = parser.parse_args().keep, []
    for dtype, out, tf32 in KINDS:
        label = f"{dtype} into {out}" + (" by TF32" if tf32 else "")
        found = errors(dtype, out, tf32)
        (ours, ours_all), (library, library_all) = found["kernel"], found["blas"]
        text = (
            f"{label:32} largest {ours:.2e}, library {library:.2e} | distance {ours_all:.2e}, library {library_all:.2e}"
        )
        print(text, flush=True)
        lines.append({"products": label, **{engine: list(each) for engine, each in found.items()}})
    if keep_results:
        print("kept in", keep("errors_gemm", {"gpu": gpu(), "shapes": SHAPES, "products": lines}))
