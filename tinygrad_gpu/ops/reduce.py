"""Reductions over one axis, several or all. Half types are summed in float32, integers in int64.

With g the gradient dy put back on the reduced axes (length 1) and n the number of elements that one result covers:
sum: dx = g.  mean: g / n.  var: g 2 (x - mean) / (n - correction).  max, min: g where x is the extreme, shared by ties.
logsumexp: g softmax(x).
"""

import math

from ..autograd import Function
from ..device import array_module
from ..dtypes import accumulator, is_float
from .common import check, check_axes, check_axis, check_float, narrow, widen


def _kept(shape, axes):
    return tuple(1 if i in axes else n for i, n in enumerate(shape))


def _count(shape, axes):
    return math.prod(shape[i] for i in axes)


class Sum(Function):
    """y = sum of x over `axis`"""

    def forward(ctx, x, axis, keepdims):
        axes = check_axes("sum", axis, x.ndim)
        ctx.shape, ctx.kept = x.shape, _kept(x.shape, axes)
        if not is_float(x.dtype):
            return x.sum(axis=axes, keepdims=keepdims, dtype="int64")
        return narrow(array_module(x).sum(x, axis=axes, keepdims=keepdims, dtype=accumulator(x.dtype)), x.dtype)

    def backward(ctx, dy):
        return array_module(dy).broadcast_to(dy.reshape(ctx.kept), ctx.shape)


class Mean(Function):
    """y = mean of x over `axis`; NaN over no element"""

    def forward(ctx, x, axis, keepdims):
        check_float("mean", x=x)
        axes = check_axes("mean", axis, x.ndim)
        ctx.shape, ctx.kept, ctx.n = x.shape, _kept(x.shape, axes), _count(x.shape, axes)
        xp = array_module(x)
        total = xp.sum(x, axis=axes, keepdims=keepdims, dtype=accumulator(x.dtype))
        return narrow(total / xp.asarray(ctx.n, total.dtype), x.dtype)

    def backward(ctx, dy):
        g = narrow(dy.reshape(ctx.kept) / dy.dtype.type(max(ctx.n, 1)), dy.dtype)
        return array_module(dy).broadcast_to(g, ctx.shape)


class Var(Function):
    """y = sum((x - mean)^2) / (n - correction) over `axis`, in two passes; NaN or inf where n <= correction"""

    def forward(ctx, x, axis, keepdims, correction):
        check_float("var", x=x)
        axes = check_axes("var", axis, x.ndim)
        ctx.kept, ctx.axes = _kept(x.shape, axes), axes
        ctx.freedom = max(_count(x.shape, axes) - correction, 0)
        ctx.save_for_backward(x)
        xp, wide = array_module(x), widen(x)
        centred = wide - wide.mean(axis=axes, keepdims=True)
        total = xp.sum(centred * centred, axis=axes, keepdims=keepdims)
        return narrow(total / xp.asarray(ctx.freedom, total.dtype), x.dtype)

    def backward(ctx, dy):
        (x,) = ctx.saved_arrays
        wide = widen(x)
        centred = wide - wide.mean(axis=ctx.axes, keepdims=True)
        factor = array_module(x).asarray(2 / ctx.freedom if ctx.freedom else math.nan, wide.dtype)
        return narrow(dy.reshape(ctx.kept) * factor * centred, dy.dtype)


class Max(Function):
    """y = largest element of x over `axis`, NaN if one is; elements that tie share the gradient"""

    largest = True

    def forward(ctx, x, axis, keepdims):
        name = "max" if ctx.largest else "min"
        axes = check_axes(name, axis, x.ndim)
        check(_count(x.shape, axes) > 0 or 0 in [n for i, n in enumerate(x.shape) if i not in axes],
              f"{name}: cannot reduce over no element, got shape {x.shape}, axis {axis}")  # fmt: skip
        ctx.axes, ctx.kept = axes, _kept(x.shape, axes)
        xp = array_module(x)
        y = (xp.amax if ctx.largest else xp.amin)(x, axis=axes, keepdims=True, **ctx._initial(x, axes))
        ctx.save_for_backward(x, y)
        return y if keepdims else y.reshape(tuple(n for i, n in enumerate(x.shape) if i not in axes))

    def _initial(ctx, x, axes):
        """NumPy refuses a maximum over an empty axis even where there is no result to fill."""
        return {"initial": 0} if _count(x.shape, axes) == 0 else {}

    def backward(ctx, dy):
        x, y = ctx.saved_arrays
        hit = x == y
        ties = hit.sum(axis=ctx.axes, keepdims=True)
        return narrow(hit * (dy.reshape(ctx.kept) / widen(ties.astype(dy.dtype))), dy.dtype)


class Min(Max):
    """y = smallest element of x over `axis`; as Max"""

    largest = False


def arg(name, x, axis, keepdims):
    """Where the extreme is: `name` is argmax or argmin, axis an int or None; int64."""
    axis = None if axis is None else check_axis(name, axis, x.ndim)
    n = x.size if axis is None else x.shape[axis]
    check(n > 0, f"{name}: cannot reduce over no element, got shape {x.shape}, axis {axis}")
    xp = array_module(x)
    return xp.asarray(getattr(xp, name)(widen(x), axis=axis, keepdims=keepdims)).astype("int64", copy=False)


def logsumexp(x, axes, keepdims):
    """log(sum(exp(x))) over `axes`, shifted by the maximum (0 where that is infinite); -inf over no element."""
    xp, wide = array_module(x), widen(x)
    top = xp.amax(wide, axis=axes, keepdims=True, initial=-math.inf)
    top = xp.where(xp.isfinite(top), top, 0)
    powers = wide - top
    total = xp.log(xp.sum(xp.exp(powers, out=powers), axis=axes, keepdims=True)) + top
    return total if keepdims else xp.squeeze(total, axes)


class LogSumExp(Function):
    """y = log(sum(exp(x))) over `axis`;  dx = dy exp(x - y)"""

    def forward(ctx, x, axis, keepdims):
        check_float("logsumexp", x=x)
        axes = check_axes("logsumexp", axis, x.ndim)
        ctx.kept = _kept(x.shape, axes)
        y = logsumexp(x, axes, keepdims)
        ctx.save_for_backward(x, y)
        return narrow(y, x.dtype)

    def backward(ctx, dy):
        x, y = ctx.saved_arrays
        xp, y = array_module(x), y.reshape(ctx.kept)
        p = xp.where(xp.isneginf(y), 0, xp.exp(widen(x) - y))
        return narrow(dy.reshape(ctx.kept) * p, dy.dtype)
