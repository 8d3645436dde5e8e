"""Rotary position embedding (arXiv:2104.09864, section 3.2.2), halves rotated against one another.

With a = position / base^(2 i / D), i = 0 … D/2 - 1:
y[:D/2] = x[:D/2] cos a - x[D/2:] sin a,   y[D/2:] = x[D/2:] cos a + x[:D/2] sin a;   dx is dy rotated by -a.
Shapes: x, y (..., T, D) with D even; positions integer, (T,) or any shape that broadcasts to (..., T).
"""

from ..autograd import Function
from ..device import array_module
from .common import check, check_float, check_integer, narrow, widen


def rotate(x, cos, sin):
    xp, half, wide = array_module(x), x.shape[-1] // 2, widen(x)
    a, b = wide[..., :half], wide[..., half:]
    return narrow(xp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1), x.dtype)


class Rotary(Function):
    def forward(ctx, x, positions, base):
        check_float("rotary_embedding", x=x)
        check_integer("rotary_embedding", "positions", positions)
        check(
            x.ndim >= 2 and x.shape[-1] % 2 == 0,
            f"rotary_embedding: x must have shape (..., T, D), D even, got {x.shape}",
        )
        rows = x.shape[:-1]
        fits = positions.ndim <= len(rows) and all(
            n in (1, m) for n, m in zip(positions.shape[::-1], rows[::-1], strict=False)
        )
        check(fits, f"rotary_embedding: positions must broadcast to x's {rows}, got {positions.shape}")
        check(base > 0, f"rotary_embedding: base must be positive, got {base}")
        xp, dtype = array_module(x), widen(x[:0]).dtype
        half = x.shape[-1] // 2
        angle = positions[..., None] * base ** (-xp.arange(half, dtype="float64") / max(half, 1))
        cos, sin = xp.cos(angle).astype(dtype), xp.sin(angle).astype(dtype)
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    def backward(ctx, dy):
        cos, sin = ctx.saved_arrays
        return rotate(dy, cos, -sin), None
