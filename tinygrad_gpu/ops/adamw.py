"""One AdamW step (arXiv:1711.05101, algorithm 2; the moments of arXiv:1412.6980, algorithm 1), in place.

g = factor * gradient                         factor: the inverse loss scale times the clipping coefficient
w = w - lr * decay * w
m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
w = w - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)
Shapes: w, gradient, m, v (n,), all float32 or all float64; t counts from 1.
"""

import math

from ..device import array_module
from .common import blocks


def step(w, gradient, m, v, *, t, lr, betas, eps, weight_decay, factor):
    """Update w, m and v; the gradient is left as it was."""
    xp, (b1, b2) = array_module(w), betas
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
        if weight_decay:
            w[part] *= 1 - lr * weight_decay
        w[part] -= g


def square_sum(xp, g):
    """The sum of squares of g (n,) in float64: for float32 gradients up to 1e154 of them would not overflow."""
    total = xp.zeros((), "float64")
    for part in blocks(xp, g.size):
        wide = g[part].astype("float64")
        total += wide @ wide
    return total
