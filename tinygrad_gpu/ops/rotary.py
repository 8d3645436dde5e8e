"""Rotary position embedding (arXiv:2104.09864, section 3.2.2), halves rotated against one another.

With a = position / base^(2 i / D), i = 0 … D/2 - 1, in float64:
y[:D/2] = x[:D/2] cos a - x[D/2:] sin a,   y[D/2:] = x[D/2:] cos a + x[:D/2] sin a;   dx is dy rotated by -a.
Shapes: x, y (..., T, D) with D even; positions integer, (T,) or any shape that broadcasts to (..., T).
"""

from ..autograd import Function
from ..device import array_module
from ..dtypes import accumulator
from .common import check, check_float, check_integer, narrow, widen


def rotate(x, cos, sin):
    y, half, wide = array_module(x).empty_like(x), x.shape[-1] // 2, widen(x)
    a, b = wide[..., :half], wide[..., half:]
    y[..., :half] = a * cos - b * sin
    y[..., half:] = b * cos + a * sin
    return y


class Rotary(Function):
    def forward(ctx, x, positions, base):
        name = "rotary_embedding"
        check_float(name, x=x)
        check_integer(name, "positions", positions)
        check(x.ndim >= 2 and x.shape[-1] % 2 == 0, f"{name}: x must have shape (..., T, D), D even, got {x.shape}")
        rows = x.shape[:-1]
        pairs = zip(positions.shape[::-1], rows[::-1], strict=False)
        fits = positions.ndim <= len(rows) and all(n in (1, m) for n, m in pairs)
        check(fits, f"{name}: positions must broadcast to x's {rows}, got {positions.shape}")
        xp, half = array_module(x), x.shape[-1] // 2
        angle = positions[..., None] * base ** (-xp.arange(half, dtype="float64") / max(half, 1))
        cos, sin = (narrow(f(angle), accumulator(x.dtype)) for f in (xp.cos, xp.sin))
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    def backward(ctx, dy):
        cos, sin = ctx.saved_arrays
        return rotate(dy, cos, -sin), None
