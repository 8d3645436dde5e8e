"""Softmax and its logarithm along one axis, in float32 for half types, shifted by the maximum: nothing overflows.

softmax:      y = exp(x - m) / sum(exp(x - m)),  m = max(x);   dx = y (dy - sum(dy y))
log_softmax:  y = x - m - log(sum(exp(x - m)));                dx = dy - exp(y) sum(dy)
A row of nothing but -inf gives NaN, as in PyTorch: no distribution has that limit.
"""

from ..autograd import Function
from ..device import array_module
from .common import check_axis, check_float, narrow, widen
from .reduce import top, total


def _shifted(x, axis):
    wide = widen(x)
    return wide - top(wide, (axis,))


def fwd(x, axis):
    xp, y = array_module(x), _shifted(x, axis)
    xp.exp(y, out=y)
    y /= total(y, (axis,), keepdims=True)
    return narrow(y, x.dtype)


def bwd(dy, y, axis):
    wide = widen(dy) * widen(y)
    wide -= widen(y) * total(wide, (axis,), keepdims=True)
    return wide


def log_fwd(x, axis):
    xp, y = array_module(x), _shifted(x, axis)
    y -= xp.log(total(xp.exp(y), (axis,), keepdims=True))
    return narrow(y, x.dtype)


def log_bwd(dy, y, axis):
    g, p = widen(dy), array_module(y).exp(widen(y))
    p *= total(g, (axis,), keepdims=True)
    return g - p


class Softmax(Function):
    name, fwd, bwd = "softmax", staticmethod(fwd), staticmethod(bwd)

    def forward(ctx, x, axis):
        check_float(ctx.name, x=x)
        ctx.axis = check_axis(ctx.name, axis, x.ndim)
        y = ctx.fwd(x, ctx.axis)
        ctx.save_for_backward(y)
        return y

    def backward(ctx, dy):
        (y,) = ctx.saved_arrays
        return ctx.bwd(dy, y, ctx.axis)


class LogSoftmax(Softmax):
    name, fwd, bwd = "log_softmax", staticmethod(log_fwd), staticmethod(log_bwd)
