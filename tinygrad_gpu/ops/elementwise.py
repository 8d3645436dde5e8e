"""Ops that treat each element by itself, operands broadcast as in NumPy.

With dy the gradient of y, each rule is dy times the derivative, summed back over broadcast axes. Operands are arrays of
one dtype, or Python numbers, which never widen it. Half types go through float32 where a formula has several steps.
"""

import numpy as np

from ..autograd import Function
from ..device import array_module, is_array
from .common import check, narrow, unbroadcast, widen


def check_broadcast(name, *operands):
    """ValueError unless the shapes of the operands (arrays or numbers) broadcast."""
    shapes = [np.shape(x) for x in operands]
    try:
        np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(f"{name}: shapes must broadcast, got {' and '.join(map(str, shapes))}") from None


def _operands(name, a, b):
    """Check the operands of a binary op; gives the dtype of its result."""
    check_broadcast(name, a, b)
    return (a if is_array(a) else b).dtype


def _module(*operands):
    return array_module(next(a for a in operands if is_array(a)))


class Add(Function):
    """y = a + b"""

    def forward(ctx, a, b):
        dtype = _operands("add", a, b)
        ctx.shapes = np.shape(a), np.shape(b)
        return narrow(a + b, dtype)

    def backward(ctx, dy):
        return tuple(unbroadcast(dy, s) if need else None for s, need in zip(ctx.shapes, ctx.needs_input_grad, strict=True))


class Sub(Function):
    """y = a - b"""

    def forward(ctx, a, b):
        dtype = _operands("sub", a, b)
        ctx.shapes = np.shape(a), np.shape(b)
        return narrow(a - b, dtype)

    def backward(ctx, dy):
        da = unbroadcast(dy, ctx.shapes[0]) if ctx.needs_input_grad[0] else None
        db = unbroadcast(-dy, ctx.shapes[1]) if ctx.needs_input_grad[1] else None
        return da, db


class Mul(Function):
    """y = a b;  da = dy b,  db = dy a"""

    def forward(ctx, a, b):
        dtype = _operands("mul", a, b)
        need_a, need_b = ctx.needs_input_grad
        ctx.shapes = np.shape(a), np.shape(b)
        ctx.save_for_backward(a if need_b else None, b if need_a else None)
        return narrow(a * b, dtype)

    def backward(ctx, dy):
        a, b = ctx.saved_arrays
        da = unbroadcast(narrow(dy * b, dy.dtype), ctx.shapes[0]) if ctx.needs_input_grad[0] else None
        db = unbroadcast(narrow(dy * a, dy.dtype), ctx.shapes[1]) if ctx.needs_input_grad[1] else None
        return da, db


class Div(Function):
    """y = a / b;  da = dy / b,  db = -dy a / b^2"""

    def forward(ctx, a, b):
        dtype = _operands("div", a, b)
        ctx.shapes = np.shape(a), np.shape(b)
        ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b)
        return narrow(a / b, dtype)

    def backward(ctx, dy):
        a, b = ctx.saved_arrays
        da = unbroadcast(narrow(dy / b, dy.dtype), ctx.shapes[0]) if ctx.needs_input_grad[0] else None
        db = None
        if ctx.needs_input_grad[1]:
            wide = widen(b)
            db = unbroadcast(narrow(-dy * a / (wide * wide), dy.dtype), ctx.shapes[1])
        return da, db


class Pow(Function):
    """y = a ** b;  da = dy b a^(b-1) (0 where b = 0),  db = dy y log(a) (0 where a = 0 <= b)"""

    def forward(ctx, a, b):
        dtype = _operands("pow", a, b)
        y = narrow(a * a if np.isscalar(b) and b == 2 else a**b, dtype)
        ctx.shapes = np.shape(a), np.shape(b)
        ctx.save_for_backward(a, b, y if ctx.needs_input_grad[1] else None)
        return y

    def backward(ctx, dy):
        a, b, y = ctx.saved_arrays
        xp = array_module(dy)
        da = db = None
        if ctx.needs_input_grad[0]:
            if np.isscalar(b):
                slope = b * a ** (b - 1) if b else xp.zeros_like(a)
            else:
                slope = xp.where(b == 0, 0, b * a ** xp.where(b == 0, xp.ones_like(b), b - 1))
            da = unbroadcast(narrow(dy * slope, dy.dtype), ctx.shapes[0])
        if ctx.needs_input_grad[1]:
            base = xp.asarray(a, dtype=dy.dtype)
            log = xp.where((base == 0) & (b >= 0), 0, xp.log(base))
            db = unbroadcast(narrow(dy * y * log, dy.dtype), ctx.shapes[1])
        return da, db


class Maximum(Function):
    """y = max(a, b), NaN if either is; the gradient goes to the larger, half to each where they are equal"""

    larger = True

    def forward(ctx, a, b):
        dtype = _operands("maximum" if ctx.larger else "minimum", a, b)
        ctx.shapes = np.shape(a), np.shape(b)
        ctx.save_for_backward(a, b)
        xp = _module(a, b)
        return narrow((xp.maximum if ctx.larger else xp.minimum)(a, b), dtype)

    def backward(ctx, dy):
        a, b = ctx.saved_arrays
        xp = array_module(dy)
        wins = (a > b) if ctx.larger else (a < b)
        share = narrow(xp.where(a == b, 0.5, wins), dy.dtype)  # of a
        da = unbroadcast(dy * share, ctx.shapes[0]) if ctx.needs_input_grad[0] else None
        db = unbroadcast(narrow(dy * (1 - share), dy.dtype), ctx.shapes[1]) if ctx.needs_input_grad[1] else None
        return da, db


class Minimum(Maximum):
    """y = min(a, b); as Maximum"""

    larger = False


class Where(Function):
    """y = a where the condition holds, else b; each gets dy where it was taken"""

    def forward(ctx, condition, a, b):
        check(condition.dtype == bool, f"where: condition must have dtype bool, got {condition.dtype}", TypeError)
        check_broadcast("where", condition, a, b)
        ctx.shapes = condition.shape, np.shape(a), np.shape(b)
        ctx.save_for_backward(condition)
        return narrow(array_module(condition).where(condition, a, b), (a if is_array(a) else b).dtype)

    def backward(ctx, dy):
        (condition,) = ctx.saved_arrays
        xp, zero = array_module(dy), dy.dtype.type(0)
        da = unbroadcast(xp.where(condition, dy, zero), ctx.shapes[1]) if ctx.needs_input_grad[1] else None
        db = unbroadcast(xp.where(condition, zero, dy), ctx.shapes[2]) if ctx.needs_input_grad[2] else None
        return None, da, db


class Cast(Function):
    """y = x in another dtype; dx = dy in that of x"""

    def forward(ctx, x, dtype):
        ctx.source = x.dtype
        return x.astype(dtype)

    def backward(ctx, dy):
        return dy.astype(ctx.source)


class Neg(Function):
    """y = -x"""

    def forward(ctx, x):
        return -x

    def backward(ctx, dy):
        return -dy


class Abs(Function):
    """y = |x|;  dx = dy sign(x), 0 at 0"""

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return abs(x)

    def backward(ctx, dy):
        (x,) = ctx.saved_arrays
        return dy * array_module(x).sign(x)


class Exp(Function):
    """y = e^x;  dx = dy y"""

    def forward(ctx, x):
        y = array_module(x).exp(x)
        ctx.save_for_backward(y)
        return y

    def backward(ctx, dy):
        (y,) = ctx.saved_arrays
        return dy * y


class Log(Function):
    """y = ln x;  dx = dy / x"""

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return array_module(x).log(x)

    def backward(ctx, dy):
        (x,) = ctx.saved_arrays
        return dy / x


class Sqrt(Function):
    """y = sqrt(x);  dx = dy / (2 y)"""

    def forward(ctx, x):
        y = array_module(x).sqrt(x)
        ctx.save_for_backward(y)
        return y

    def backward(ctx, dy):
        (y,) = ctx.saved_arrays
        return dy / (y + y)


class Rsqrt(Function):
    """y = 1 / sqrt(x);  dx = -dy y^3 / 2"""

    def forward(ctx, x):
        y = narrow(1 / array_module(x).sqrt(widen(x)), x.dtype)
        ctx.save_for_backward(y)
        return y

    def backward(ctx, dy):
        (y,) = ctx.saved_arrays
        wide = widen(y)
        return narrow(dy * (-0.5 * wide * wide * wide), dy.dtype)


class Tanh(Function):
    """y = tanh(x);  dx = dy (1 - y^2)"""

    def forward(ctx, x):
        y = array_module(x).tanh(x)
        ctx.save_for_backward(y)
        return y

    def backward(ctx, dy):
        (y,) = ctx.saved_arrays
        wide = widen(y)
        return narrow(dy * (1 - wide * wide), dy.dtype)


def sigmoid(x):
    """1 / (1 + e^-x) of an array in its arithmetic dtype."""
    return 1 / (1 + array_module(x).exp(-x))


class Sigmoid(Function):
    """y = 1 / (1 + e^-x);  dx = dy y (1 - y)"""

    def forward(ctx, x):
        y = narrow(sigmoid(widen(x)), x.dtype)
        ctx.save_for_backward(y)
        return y

    def backward(ctx, dy):
        (y,) = ctx.saved_arrays
        wide = widen(y)
        return narrow(dy * (wide * (1 - wide)), dy.dtype)


class Silu(Function):
    """y = x s,  s = sigmoid(x);  dx = dy s (1 + x (1 - s))   (arXiv:1702.03118)"""

    def forward(ctx, x):
        ctx.save_for_backward(x)
        wide = widen(x)
        return narrow(wide * sigmoid(wide), x.dtype)

    def backward(ctx, dy):
        (x,) = ctx.saved_arrays
        wide = widen(x)
        s = sigmoid(wide)
        return narrow(dy * (s * (1 + wide * (1 - s))), dy.dtype)


class Relu(Function):
    """y = max(x, 0);  dx = dy where x > 0, 0 at 0"""

    def forward(ctx, x):
        y = array_module(x).maximum(x, x.dtype.type(0))
        ctx.save_for_backward(y)
        return y

    def backward(ctx, dy):
        (y,) = ctx.saved_arrays
        return dy * (y > 0)


class Sin(Function):
    """y = sin(x);  dx = dy cos(x)"""

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return array_module(x).sin(x)

    def backward(ctx, dy):
        (x,) = ctx.saved_arrays
        return dy * array_module(x).cos(x)


class Cos(Function):
    """y = cos(x);  dx = -dy sin(x)"""

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return array_module(x).cos(x)

    def backward(ctx, dy):
        (x,) = ctx.saved_arrays
        return -dy * array_module(x).sin(x)


class Clamp(Function):
    """y = min(max(x, low), high), either bound may be None;  dx = dy where low <= x <= high"""

    def forward(ctx, x, low, high):
        check(low is not None or high is not None, "clamp: min or max must be given, got neither")
        ctx.bounds = low, high
        ctx.save_for_backward(x)
        xp, y = array_module(x), x
        if low is not None:
            y = xp.maximum(y, x.dtype.type(low))
        if high is not None:
            y = xp.minimum(y, x.dtype.type(high))
        return y

    def backward(ctx, dy):
        (x,) = ctx.saved_arrays
        low, high = ctx.bounds
        inside = array_module(x).ones(x.shape, bool)
        if low is not None:
            inside &= x >= low
        if high is not None:
            inside &= x <= high
        return dy * inside
