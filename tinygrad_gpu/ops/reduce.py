"""Reductions over one axis, several or all. Half types are summed in float32, integers in int64.

With g the gradient dy put back on the reduced axes (length 1) and n the number of elements that one result covers:
sum: dx = g.  mean: g / n.  var: g 2 (x - mean) / (n - correction).  std: g (x - mean) / ((n - correction) y), 0 where
y = 0.  max, min: g where x is the extreme, shared by ties.  logsumexp: g softmax(x).
"""

import math

import numpy as np

from ..autograd import Function
from ..device import array_module, as_array
from ..dtypes import accumulator, float64, is_float
from .common import check, check_axes, check_axis, check_float, narrow, widen
from .elementwise import masked


def _kept(shape, axes):
    return tuple(1 if i in axes else n for i, n in enumerate(shape))


def _count(shape, axes):
    return math.prod(shape[i] for i in axes)


def total(x, axes, keepdims):
    """The sum of x over `axes`, in its arithmetic dtype.

    NumPy sums pairwise along contiguous memory, but across it row after row, whose error grows with their number (300
    roundings for 10^6 rows): there a long sum is taken in float64, in twice the time.
    """
    dtype = accumulator(x.dtype)
    along = x.flags.c_contiguous and axes == tuple(range(x.ndim - len(axes), x.ndim))
    exact = isinstance(x, np.ndarray) and not along and _count(x.shape, axes) > 1024
    return narrow(array_module(x).sum(x, axis=axes, keepdims=keepdims, dtype=float64 if exact else dtype), dtype)


def top(x, axes):
    """The largest elements of x over `axes`, which keep length 1; -inf over none."""
    if x.size == 0:
        return array_module(x).full(_kept(x.shape, axes), -math.inf, x.dtype)
    return array_module(x).amax(x, axis=axes, keepdims=True)


class Sum(Function):
    """y = sum of x over `axis`"""

    def forward(ctx, x, axis, keepdims):
        axes = check_axes("sum", axis, x.ndim)
        ctx.shape, ctx.kept = x.shape, _kept(x.shape, axes)
        if not is_float(x.dtype):
            return x.sum(axis=axes, keepdims=keepdims, dtype="int64")
        return narrow(total(x, axes, keepdims), x.dtype)

    def backward(ctx, dy):
        return array_module(dy).broadcast_to(dy.reshape(ctx.kept), ctx.shape)


class Mean(Function):
    """y = mean of x over `axis`; NaN over no element"""

    def forward(ctx, x, axis, keepdims):
        check_float("mean", x=x)
        axes = check_axes("mean", axis, x.ndim)
        ctx.shape, ctx.kept, ctx.n = x.shape, _kept(x.shape, axes), float(_count(x.shape, axes))
        return narrow(total(x, axes, keepdims) / ctx.n, x.dtype)

    def backward(ctx, dy):
        return array_module(dy).broadcast_to(widen(dy).reshape(ctx.kept) / ctx.n, ctx.shape)


class Var(Function):
    """y = sum((x - mean)^2) / (n - correction) over `axis`, in two passes; NaN or inf where n <= correction"""

    name = "var"

    def forward(ctx, x, axis, keepdims, correction):
        check_float(ctx.name, x=x)
        number = isinstance(correction, (int, float))
        check(number, f"{ctx.name}: correction must be a number, got {correction!r}", TypeError)
        ctx.axes = axes = check_axes(ctx.name, axis, x.ndim)
        ctx.kept, ctx.n = _kept(x.shape, axes), float(_count(x.shape, axes))
        ctx.freedom = max(ctx.n - correction, 0.0)
        centred = ctx._centred(x)
        y = ctx._finish(total(centred * centred, axes, keepdims) / ctx.freedom)
        ctx.save_for_backward(x, y)
        return narrow(y, x.dtype)

    def backward(ctx, dy):
        x, y = ctx.saved_arrays
        g = ctx._factor(widen(dy).reshape(ctx.kept), y.reshape(ctx.kept)) / ctx.freedom
        return g * ctx._centred(x)

    def _centred(ctx, x):
        wide = widen(x)
        return wide - total(wide, ctx.axes, keepdims=True) / ctx.n

    def _finish(ctx, variance):
        return variance

    def _factor(ctx, g, y):
        return 2 * g


class Std(Var):
    """y = sqrt(var(x))"""

    name = "std"

    def _finish(ctx, variance):
        return array_module(variance).sqrt(variance)

    def _factor(ctx, g, y):
        return masked(g / y, y != 0)


class Max(Function):
    """y = largest element of x over `axis`; elements that tie share the gradient. NaN if one is, with no gradient"""

    name, extreme = "max", "amax"

    def forward(ctx, x, axis, keepdims):
        ctx.axes = axes = check_axes(ctx.name, axis, x.ndim)
        ctx.kept = kept = _kept(x.shape, axes)
        possible = x.size or not math.prod(kept)  # over no element there may be no result to find
        check(possible, f"{ctx.name}: cannot reduce over no element, got shape {x.shape}, axis {axis}")
        xp = array_module(x)
        y = getattr(xp, ctx.extreme)(x, axis=axes, keepdims=True) if x.size else xp.empty(kept, x.dtype)
        ctx.save_for_backward(x, y)
        return y if keepdims else y.reshape(tuple(n for i, n in enumerate(x.shape) if i not in axes))

    def backward(ctx, dy):
        x, y = ctx.saved_arrays
        hit = x == y
        ties = hit.sum(axis=ctx.axes, keepdims=True, dtype=accumulator(x.dtype))
        return masked(dy.reshape(ctx.kept) / ties, hit)


class Min(Max):
    """y = smallest element of x over `axis`; as Max"""

    name, extreme = "min", "amin"


def arg(name, x, axis, keepdims):
    """Where the extreme is: `name` is argmax or argmin, axis an int or None; int64."""
    axis = None if axis is None else check_axis(name, axis, x.ndim)
    n = x.size if axis is None else x.shape[axis]
    check(n > 0, f"{name}: cannot reduce over no element, got shape {x.shape}, axis {axis}")
    xp = array_module(x)
    return xp.asarray(getattr(xp, name)(widen(x), axis=axis, keepdims=keepdims)).astype("int64", copy=False)


def _exponentials(x, axes):
    """exp(x - m) with m the maximum over `axes` (0 where that is infinite), its sum over `axes`, and m."""
    xp, wide = array_module(x), widen(x)
    shift = top(wide, axes)
    shift = xp.where(xp.isfinite(shift), shift, 0)
    powers = as_array(wide - shift)
    xp.exp(powers, out=powers)
    return powers, total(powers, axes, keepdims=True), shift


def logsumexp(x, axes, keepdims):
    """log(sum(exp(x))) over `axes`, in the arithmetic dtype, without overflow; -inf over no element."""
    _, sums, shift = _exponentials(x, axes)
    y = array_module(x).log(sums) + shift
    return y if keepdims else y.squeeze(axes)


class LogSumExp(Function):
    """y = log(sum(exp(x))) over `axis`;  dx = dy exp(x) / sum(exp(x)), 0 where the sum is"""

    def forward(ctx, x, axis, keepdims):
        check_float("logsumexp", x=x)
        ctx.axes = axes = check_axes("logsumexp", axis, x.ndim)
        ctx.kept = _kept(x.shape, axes)
        ctx.save_for_backward(x)
        return narrow(logsumexp(x, axes, keepdims), x.dtype)

    def backward(ctx, dy):
        (x,) = ctx.saved_arrays
        # Not exp(x - y), which carries the rounding of a large y.
        powers, sums, _ = _exponentials(x, ctx.axes)
        powers *= widen(dy).reshape(ctx.kept) / (sums + (sums == 0))
        return powers
