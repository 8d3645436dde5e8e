"""One AdamW step (arXiv:1711.05101, algorithm 2; the moments of arXiv:1412.6980, algorithm 1), in place.

norm = sqrt(square_sum) / grad_scale          of all gradients of the optimiser; where it is not finite nothing changes
t = t + 1
g = gradient * min(1, max_norm / (norm + 1e-6)) / grad_scale
w = w - lr * decay * w
m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
w = w - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)
Shapes: w, gradient, m, v (n,), all float32 or all float64; copy (n,), w in a half type, or None; steps (k,) int32, the
t of each parameter in w, all equal; options (7,) float64: grad_scale, max_norm, lr, b1, b2, eps, decay; total (1,)
float64, the square sum. What differs from step to step is in arrays, so that kernels find it where they run: the host
need not wait for the norm, and a replayed graph takes a new lr and the next t.
"""

import functools
import math

from .. import kernel
from ..device import array_module
from ..dtypes import float32
from .common import blocks, vector
from .copy import contiguous


def begin(steps, options, total):
    """Count a step: gives the factor of the gradients, None where their norm is not finite and the step does not count,
    and the options after max_norm."""
    grad_scale, max_norm, *options = options.tolist()
    norm = math.sqrt(total.item()) / grad_scale
    if not math.isfinite(norm):
        return None, *options
    steps += 1
    return clip_factor(norm, max_norm) / grad_scale, *options


def clip_factor(norm, max_norm):
    """What gradients are multiplied by, as torch.nn.utils.clip_grad_norm_ does it."""
    return min(1.0, max_norm / (norm + 1e-6))


def step(w, m, v, copy, gradient, steps, options, total):
    """Update all before the gradient, and steps."""
    factor, lr, b1, b2, eps, decay = begin(steps, options, total)
    if factor is None:
        return
    xp, t = array_module(w), steps[0].item()
    step_size, root = lr / (1 - b1**t), math.sqrt(1 - b2**t)
    for part in blocks(xp, w.size):
        g = gradient[part] * factor
        a = g * (1 - b1)
        m[part] *= b1
        m[part] += a
        g *= g
        g *= 1 - b2
        v[part] *= b2
        v[part] += g
        xp.sqrt(v[part], out=g)
        g /= root
        g += eps
        xp.divide(m[part], g, out=g)
        g *= step_size
        if decay:
            w[part] *= 1 - lr * decay
        w[part] -= g
    if copy is not None:
        copy[...] = w


def square_sum(arrays):
    """The sum of squares of all the arrays, (1,) in float64: for float32 gradients up to 1e154 of them would not
    overflow."""
    xp = array_module(arrays[0])
    total = xp.zeros(1, "float64")
    for g in arrays:
        g, own = g.ravel(), 0
        for part in blocks(xp, g.size):
            wide = g[part].astype("float64")
            own += wide @ wide
        total += own
    return total


_THREADS = 256
_TILE = 16 * _THREADS  # as the kernel has it
_BLOCKS = 1024  # a multiprocessor holds 8 blocks: on an H200 all run at once, each with 16 KiB on their way
_PLAN = 10  # numbers that adamw_begin gives to adamw


@functools.cache
def config(name, grid, block, vec=1, dtype=float32):
    return kernel.Launch("adamw.cu", name, (grid,), (block,), T=dtype, VEC=vec, THREADS=_THREADS)


def square_sum_kernel(arrays, most=_BLOCKS):
    """In two stages, and an order that the sizes of the arrays and `most`, the blocks for one, fix."""
    xp = array_module(arrays[0])
    counts = [min(-(-g.size // _TILE), most) for g in arrays]
    partial, total, start = xp.empty(sum(counts), "float64"), xp.empty(1, "float64"), 0
    for g, count in zip(contiguous(*arrays), counts, strict=True):
        what = config("adamw_square_sum", count, _THREADS, vector(0, g), g.dtype)
        kernel.launch(what, partial[start : start + count], g, g.size)
        start += count
    kernel.launch(config("adamw_square_sum_total", 1, _THREADS), total, partial, partial.size)
    return total


def step_kernel(w, m, v, copy, gradient, steps, options, total):
    plan = array_module(w).empty(_PLAN, float32)
    kernel.launch(config("adamw_begin", 1, 64), plan, steps, options, total, steps.size)
    vec, dtype = vector(0, w, m, v, copy, gradient), float32 if copy is None else copy.dtype
    what = config("adamw", -(-w.size // (vec * _THREADS)), _THREADS, vec, dtype)
    kernel.launch(what, w, m, v, copy, gradient, plan, w.size)
