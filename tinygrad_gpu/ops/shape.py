"""Ops that move elements without arithmetic: views, joins, indexing. Each gradient is the inverse move.

Reshape, Permute, Expand and GetItem with slices give views of the same memory where NumPy can.
"""

import math

import numpy as np

from ..autograd import Function
from ..device import array_module, check_range, is_array, of, put
from .common import check, check_axes, check_axis, check_integer, unbroadcast
from .embedding import segment_sum


class Reshape(Function):
    """y = x with the same elements in C order under another shape; one entry of it may be -1"""

    def forward(ctx, x, shape):
        known = math.prod(n for n in shape if n != -1)
        unknown = shape.count(-1)
        fits = x.size == known if not unknown else unknown == 1 and known and x.size % known == 0
        check(fits and min(shape, default=0) >= -1, f"reshape: shape must hold {x.size} elements, got {shape}")
        ctx.shape = x.shape
        return x.reshape(shape)

    def backward(ctx, dy):
        return dy.reshape(ctx.shape)


class Permute(Function):
    """y = x with its axes in another order"""

    def forward(ctx, x, axes):
        order = tuple(check_axis("permute", a, x.ndim) for a in axes)
        check(sorted(order) == list(range(x.ndim)), f"permute: axes must name each of {x.ndim} axes once, got {axes}")
        ctx.inverse = tuple(int(i) for i in np.argsort(order))
        return x.transpose(order)

    def backward(ctx, dy):
        return dy.transpose(ctx.inverse)


class Expand(Function):
    """y = x broadcast to a shape, with no copy; -1 keeps the length of an axis"""

    def forward(ctx, x, shape):
        extra = len(shape) - x.ndim
        full = tuple(x.shape[i - extra] if n == -1 and i >= extra else n for i, n in enumerate(shape))
        fits = extra >= 0 and all(n in (1, m) for n, m in zip(x.shape, full[extra:], strict=False)) and min(full, default=0) >= 0
        check(fits, f"expand: shape must be one that {x.shape} broadcasts to, got {tuple(shape)}")
        ctx.shape = x.shape
        return array_module(x).broadcast_to(x, full)

    def backward(ctx, dy):
        return unbroadcast(dy, ctx.shape)


class Contiguous(Function):
    """y = x with C-contiguous memory: a copy"""

    def forward(ctx, x):
        return x.copy(order="C")

    def backward(ctx, dy):
        return dy


class Move(Function):
    """y = x on another device"""

    def forward(ctx, x, device):
        ctx.source = of(x)
        return put(x, device)

    def backward(ctx, dy):
        return put(dy, ctx.source)


def _is_basic(key):
    return not any(is_array(k) or isinstance(k, list) for k in key)


def _check_key(name, x, key):
    """IndexError where NumPy would raise one; on a GPU integer arrays are checked at the next synchronisation."""
    if isinstance(x, np.ndarray):
        return
    axis = 0
    for k in key:
        if k is None:
            continue
        if k is Ellipsis:
            axis = x.ndim - sum(_axes_of(j) for j in key[key.index(Ellipsis) + 1 :])
            continue
        if is_array(k) and k.dtype.kind == "i" and axis < x.ndim:
            check_range(name, "index (counted from the end where negative)", k + (k < 0) * x.shape[axis], x.shape[axis])
        axis += _axes_of(k)


def _axes_of(k):
    return 0 if k is None else k.ndim if is_array(k) and k.dtype == bool else 1


class GetItem(Function):
    """y = x[key]: ints, slices, None, ..., integer and boolean arrays;  dx = 0 with dy added at the places taken"""

    def forward(ctx, x, key):
        _check_key("getitem", x, key)
        try:
            y = x[key]
        except (IndexError, TypeError) as error:
            raise IndexError(f"getitem: {error} (shape {x.shape})") from None
        ctx.key, ctx.shape = key, x.shape
        return y

    def backward(ctx, dy):
        xp, size = array_module(dy), math.prod(ctx.shape)
        if _is_basic(ctx.key):
            dx = xp.zeros(ctx.shape, dy.dtype)
            dx[ctx.key] = dy
            return dx
        taken = xp.arange(size).reshape(ctx.shape)[ctx.key]
        return segment_sum(dy.reshape(-1, 1), taken.ravel(), size).reshape(ctx.shape)


class SetItem(Function):
    """y = x with x[key] = value;  dx = dy with 0 at key,  dvalue = dy[key]"""

    def forward(ctx, x, value, key):
        _check_key("setitem", x, key)
        y = x.copy()
        try:
            y[key] = value
        except (IndexError, ValueError, TypeError) as error:
            kind = IndexError if isinstance(error, IndexError) else ValueError
            raise kind(f"setitem: {error} (shape {x.shape})") from None
        ctx.key, ctx.shape = key, np.shape(value)
        return y

    def backward(ctx, dy):
        dx = dvalue = None
        if ctx.needs_input_grad[1]:
            dvalue = unbroadcast(dy[ctx.key], ctx.shape)
        if ctx.needs_input_grad[0]:
            dx = dy.copy()
            dx[ctx.key] = 0
        return dx, dvalue


class Concat(Function):
    """y = the inputs one after another along an axis"""

    def forward(ctx, *xs, axis):
        ctx.axis = axis = check_axis("concat", axis, xs[0].ndim)
        for x in xs[1:]:
            same = x.ndim == xs[0].ndim and all(
                n == m for i, (n, m) in enumerate(zip(x.shape, xs[0].shape, strict=True)) if i != axis
            )
            check(same, f"concat: shapes must agree but for axis {axis}, got {xs[0].shape} and {x.shape}")
        ctx.ends = np.cumsum([x.shape[axis] for x in xs])[:-1].tolist()
        return array_module(xs[0]).concatenate(xs, axis)

    def backward(ctx, dy):
        return tuple(array_module(dy).split(dy, ctx.ends, ctx.axis))


class Split(Function):
    """several views of x, of the given lengths along an axis;  dx = their gradients one after another"""

    def forward(ctx, x, sizes, axis):
        ctx.axis = axis = check_axis("split", axis, x.ndim)
        fits = sum(sizes) == x.shape[axis] and min(sizes, default=0) >= 0
        check(fits, f"split: sizes must sum to {x.shape[axis]}, the length of axis {axis}, got {sizes}")
        return tuple(array_module(x).split(x, np.cumsum(sizes)[:-1].tolist(), axis))

    def backward(ctx, *grads):
        return array_module(grads[0]).concatenate(grads, ctx.axis)


class Gather(Function):
    """y[i][j][k] = x[i][index[i][j][k]][k] (for axis 1);  dx = dy added where it was taken"""

    def forward(ctx, x, index, axis):
        check_integer("gather", "index", index)
        axis = check_axis("gather", axis, x.ndim)
        fits = index.ndim == x.ndim and all(
            n <= m for i, (n, m) in enumerate(zip(index.shape, x.shape, strict=True)) if i != axis
        )
        check(fits, f"gather: index must have {x.ndim} axes no longer than those of {x.shape} but for axis {axis}, got {index.shape}")
        check_range("gather", "index", index, x.shape[axis])
        xp = array_module(x)
        ctx.shape, ctx.key = x.shape, _gather_key(xp, index, axis)
        ctx.save_for_backward(index)
        return x[ctx.key]

    def backward(ctx, dy):
        xp, size = array_module(dy), math.prod(ctx.shape)
        taken = xp.arange(size).reshape(ctx.shape)[ctx.key]
        return segment_sum(dy.reshape(-1, 1), taken.ravel(), size).reshape(ctx.shape), None


def _gather_key(xp, index, axis):
    grid = [xp.arange(n).reshape([-1 if j == i else 1 for j in range(index.ndim)]) for i, n in enumerate(index.shape)]
    grid[axis] = index
    return tuple(grid)


class Triangle(Function):
    """y = x with 0 above (lower) or below (upper) the k-th diagonal of its last two axes;  dx likewise of dy"""

    def forward(ctx, x, lower, k):
        name = "tril" if lower else "triu"
        check(x.ndim >= 2, f"{name}: x must have at least 2 axes, got shape {x.shape}")
        ctx.lower, ctx.k = lower, k
        return _triangle(x, lower, k)

    def backward(ctx, dy):
        return _triangle(dy, ctx.lower, ctx.k)


def _triangle(x, lower, k):
    xp = array_module(x)
    mask = xp.tri(*x.shape[-2:], k if lower else k - 1, dtype=bool)
    return xp.where(mask if lower else ~mask, x, x.dtype.type(0))


def squeezed(name, shape, axis):
    """`shape` without its axes of length 1: those in `axis`, or all; ValueError for another length."""
    if axis is None:
        return tuple(n for n in shape if n != 1)
    axes = check_axes(name, axis, len(shape))
    return tuple(n for i, n in enumerate(shape) if i not in axes or n != 1)
