"""Softmax and its logarithm along one axis, in float32 for half types, shifted by the maximum: nothing overflows.

softmax:      y = exp(x - m) / sum(exp(x - m)),  m = max(x);   dx = y (dy - sum(dy y))
log_softmax:  y = x - m - log(sum(exp(x - m)));                dx = dy - exp(y) sum(dy)
A row of nothing but -inf gives NaN, as in PyTorch: no distribution has that limit.

Attention, of scores s with z = scale s where a key is seen, else -inf:
causal_fwd:   p = exp(z - lse),  lse = log(sum(exp(z)))
causal_bwd:   p again;  ds = p (dp - d) scale,  d = sum(p dp)
"""

import functools
import math

from .. import kernel
from ..autograd import Function
from ..device import array_module
from ..dtypes import float32
from .common import by_rows, check_axis, check_float, narrow, pick, vector, widen
from .copy import contiguous
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


# ---- launch

_ALL = 2**31 - 1  # a window that leaves out nothing


@functools.cache
def config(name, shape, given, made, vec, limits, log=False):
    """The Launch for rows of the last axis of `shape`, of arrays of the dtypes `given` and `made`."""
    size, most = max(given.itemsize, made.itemsize), 1024 if name == "softmax_fwd" else 512
    rows = by_rows(shape[-1], size, vec, limits.warp_size, most)
    grid, block = (-(-math.prod(shape[:-1]) // rows["ROWS"]),), (rows["THREADS"], rows["ROWS"])
    return kernel.Launch("softmax.cu", name, grid, block, S=given, T=made, VEC=vec, **rows, LOG=int(log))


def _sizes(shape):
    """The number of rows, and of columns."""
    return math.prod(shape[:-1]), shape[-1]


def fwd_kernel(x, axis, log=False):
    xp = array_module(x)
    (x,) = contiguous(xp.moveaxis(x, axis, -1))
    y = xp.empty(x.shape, x.dtype)
    what = config("softmax_fwd", x.shape, x.dtype, x.dtype, vector(x.shape[-1], y, x), kernel.limits(x), log)
    kernel.launch(what, y, None, x, *_sizes(x.shape), *_mask(x.shape, None, None), 1.0)
    return xp.moveaxis(y, -1, axis)


def bwd_kernel(dy, y, axis, log=False):
    xp = array_module(y)
    dy, y = contiguous(xp.moveaxis(dy, axis, -1), xp.moveaxis(y, axis, -1))
    dx = xp.empty(y.shape, y.dtype)
    what = config("softmax_bwd", y.shape, y.dtype, y.dtype, vector(y.shape[-1], dx, dy, y), kernel.limits(y), log)
    kernel.launch(what, dx, dy, y, *_sizes(y.shape))
    return xp.moveaxis(dx, -1, axis)


log_fwd_kernel, log_bwd_kernel = (functools.partial(f, log=True) for f in (fwd_kernel, bwd_kernel))


def _mask(shape, offset, window):
    """The kernels' queries, offset and window."""
    if offset is None:
        return 1, shape[-1], _ALL
    return shape[-2], offset, _ALL if window is None else min(window, _ALL)


def causal_fwd(s, scale, offset=None, window=None, out=None):
    """p and lse (..., Tq) in float32 for scores s (..., Tq, Tk), contiguous ones.

    Query i sees the keys j with i + offset - window < j <= i + offset, all of these with no window, all keys with no
    offset. Elsewhere p is 0, whatever s holds; a query that sees no key, or none but -inf, has lse = inf. p goes to
    `out`: an array of s's shape and another dtype, or s itself; with none to a new one like s.
    """
    xp = array_module(s)
    p = xp.empty(s.shape, s.dtype) if out is None else out
    lse = xp.empty(s.shape[:-1], float32)
    what = config("softmax_fwd", s.shape, s.dtype, p.dtype, vector(s.shape[-1], p, s), kernel.limits(s))
    kernel.launch(what, p, lse, s, *_sizes(s.shape), *_mask(s.shape, offset, window), scale)
    return p, lse


def causal_bwd(s, lse, dp, scale, offset=None, window=None, p=None, ds=None):
    """Write p and ds, those that are given, of one dtype: p may be s, and ds may be dp, if that is theirs.

    s, scale, offset and window as given to `causal_fwd`, lse (..., Tq) as it came; dp like s, None for p alone.
    """
    made = (ds if p is None else p).dtype
    what = config("softmax_bwd_lse", s.shape, s.dtype, made, vector(s.shape[-1], p, ds, s, dp), kernel.limits(s))
    kernel.launch(what, p, ds, s, lse, dp, *_sizes(s.shape), *_mask(s.shape, offset, window), scale)


# ---- rule


class Softmax(Function):
    name, forward_by, backward_by = "softmax", (fwd, fwd_kernel), (bwd, bwd_kernel)

    def forward(ctx, x, axis):
        check_float(ctx.name, x=x)
        ctx.axis = check_axis(ctx.name, axis, x.ndim)
        y = pick(x, *ctx.forward_by)(x, ctx.axis)
        ctx.save_for_backward(y)
        return y

    def backward(ctx, dy):
        (y,) = ctx.saved_arrays
        return pick(y, *ctx.backward_by)(dy, y, ctx.axis)


class LogSoftmax(Softmax):
    name, forward_by, backward_by = "log_softmax", (log_fwd, log_fwd_kernel), (log_bwd, log_bwd_kernel)
