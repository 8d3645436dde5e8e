"""Ops that move elements without arithmetic: views, joins, indexing. Each gradient is the inverse move.

Reshape, Permute, Expand and GetItem with slices give views of the same memory where NumPy can.
"""

import itertools
import math

import numpy as np

from ..autograd import Function
from ..device import array_module, check_range, is_array, of, put
from .common import check, check_axes, check_axis, check_integer, unbroadcast
from .copy import copied, empty_like_strides, reshaped
from .elementwise import masked
from .embedding import segment_sum


class Reshape(Function):
    """y = x with the same elements in C order under another shape; one entry of it may be -1"""

    def forward(ctx, x, shape):
        known = math.prod(n for n in shape if n != -1)
        unknown = shape.count(-1)
        fits = x.size == known if not unknown else unknown == 1 and known and x.size % known == 0
        check(fits and min(shape, default=0) >= -1, f"reshape: shape must hold {x.size} elements, got {shape}")
        ctx.shape = x.shape
        return reshaped(x, shape)

    def backward(ctx, dy):
        return reshaped(dy, ctx.shape)


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
        fits = extra >= 0 and all(n in (1, m) for n, m in zip(x.shape, full[extra:], strict=False))
        fits = fits and min(full, default=0) >= 0
        check(fits, f"expand: shape must be one that {x.shape} broadcasts to, got {tuple(shape)}")
        ctx.shape = x.shape
        return array_module(x).broadcast_to(x, full)

    def backward(ctx, dy):
        return unbroadcast(dy, ctx.shape)


class Contiguous(Function):
    """y = x with C-contiguous memory: a copy"""

    def forward(ctx, x):
        return copied(x)

    def backward(ctx, dy):
        return dy


class Move(Function):
    """y = x on another device"""

    def forward(ctx, x, device):
        ctx.source = of(x)
        return put(x, device)

    def backward(ctx, dy):
        return put(dy, ctx.source)


def _axes_of(k):
    """How many axes of x a part of a key takes; an Ellipsis takes what the others leave."""
    return 0 if k is None or k is Ellipsis else k.ndim if is_array(k) and k.dtype == bool else 1


def _has_integers(key):
    """Whether a key has an array of integers, which alone can name an element twice."""
    return any(is_array(k) and k.dtype.kind in "iu" for k in key)


def _check_key(name, x, key):
    """IndexError where NumPy would raise one; on a GPU integer arrays are checked at the next synchronisation."""
    if isinstance(x, np.ndarray):
        return
    axis = 0
    for k in key:
        if is_array(k) and k.dtype.kind == "i" and axis < x.ndim:
            check_range(name, "index (counted from the end where negative)", k + (k < 0) * x.shape[axis], x.shape[axis])
        axis += x.ndim - sum(map(_axes_of, key)) if k is Ellipsis else _axes_of(k)


def _positions(xp, shape, key):
    """The position in the flat array of each element that [key] takes from one of `shape`; the key has an array."""
    flat = 0
    for axis in xp.ix_(*map(xp.arange, shape)):
        flat = flat * axis.size + xp.broadcast_to(axis, shape)[key]
    return flat


def _scatter_add(dy, key, shape):
    """Zeros of a shape with dy added at [key], the same bits every time."""
    # The axes that key does not touch are the last ones of dy too: their elements move as one.
    touched = len(shape) if any(k is Ellipsis for k in key) else sum(map(_axes_of, key))
    lead, width = shape[:touched], math.prod(shape[touched:])
    flat = _positions(array_module(dy), lead, key)
    return segment_sum(dy.reshape(flat.size, width), flat.ravel(), math.prod(lead)).reshape(shape)


class GetItem(Function):
    """y = x[key]: ints, slices, None, ..., integer and boolean arrays;  dx = 0 with dy added at the places taken"""

    def forward(ctx, x, key):
        _check_key("getitem", x, key)
        try:
            y = x[key]
            if not is_array(y):  # but a scalar of NumPy, where an Ellipsis gives a view
                y = x[(*key, ...)]
        except (IndexError, TypeError) as error:
            raise IndexError(f"getitem: {error} (shape {x.shape})") from None
        ctx.key, ctx.shape = key, x.shape
        return y

    def backward(ctx, dy):
        if _has_integers(ctx.key):
            return _scatter_add(dy, ctx.key, ctx.shape)
        dx = array_module(dy).zeros(ctx.shape, dy.dtype)
        dx[ctx.key] = dy
        return dx


class SetItem(Function):
    """y = x with x[key] = value, the last of several for an element;  dx = dy with 0 at key,  dvalue = dy[key], 0 for a
    value that another replaced"""

    def forward(ctx, x, value, key):
        _check_key("setitem", x, key)
        ctx.key, ctx.shape, y = key, np.shape(value), x.copy()
        # A value may have axes of length 1 that y[key] lacks; without them it broadcasts as well.
        ctx.value_shape = tuple(itertools.dropwhile(lambda n: n == 1, ctx.shape))
        try:
            if not is_array(value):
                y[key] = value
            elif not _has_integers(key):
                y[key] = value.reshape(ctx.value_shape)
            else:
                ctx.taken, ctx.places, ctx.last = _last_places(x, key)
                values = array_module(x).broadcast_to(value.reshape(ctx.value_shape), ctx.taken)
                y.reshape(-1)[ctx.places] = values.reshape(-1)[ctx.last]
        except (IndexError, ValueError, TypeError) as error:
            kind = IndexError if isinstance(error, IndexError) else ValueError
            raise kind(f"setitem: {error} (shape {x.shape})") from None
        return y

    def backward(ctx, dy):
        dx = dvalue = None
        if ctx.needs_input_grad[1]:
            if _has_integers(ctx.key):
                g = array_module(dy).zeros(ctx.taken, dy.dtype)
                g.reshape(-1)[ctx.last] = dy.reshape(-1)[ctx.places]
            else:
                g = dy[ctx.key]
            dvalue = unbroadcast(g, ctx.value_shape).reshape(ctx.shape)
        if ctx.needs_input_grad[0]:
            dx = dy.copy()
            dx[ctx.key] = 0
        return dx, dvalue


def _last_places(x, key):
    """The shape of x[key], the flat positions in x that it names, once each, and for each the last element of x[key]
    there (CuPy by itself would let any of several win)."""
    xp = array_module(x)
    taken = _positions(xp, x.shape, key)
    order = xp.argsort(taken.ravel(), kind="stable")
    places = taken.ravel()[order]
    last = xp.diff(places, append=-1) != 0
    return taken.shape, places[last], order[last]


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
        check(all(isinstance(n, int) for n in sizes), f"split: sizes must be ints, got {sizes}", TypeError)
        fits = sum(sizes) == x.shape[axis] and min(sizes, default=-1) >= 0
        check(fits, f"split: sizes must be lengths that sum to {x.shape[axis]}, that of axis {axis}, got {sizes}")
        ctx.shape, ctx.strides = x.shape, x.strides
        return tuple(array_module(x).split(x, np.cumsum(sizes)[:-1].tolist(), axis))

    def backward(ctx, *grads):
        dx = empty_like_strides(array_module(grads[0]), ctx.shape, ctx.strides, grads[0].dtype)
        parts = array_module(dx).split(dx, np.cumsum([g.shape[ctx.axis] for g in grads])[:-1].tolist(), ctx.axis)
        for g, part in zip(grads, parts, strict=True):
            copied(g, part)
        return dx


class Gather(Function):
    """y[i][j][k] = x[i][index[i][j][k]][k] (for axis 1);  dx = dy added where it was taken"""

    def forward(ctx, x, index, axis):
        check_integer("gather", "index", index)
        axis = check_axis("gather", axis, x.ndim)
        fits = index.ndim == x.ndim and all(
            n <= m for i, (n, m) in enumerate(zip(index.shape, x.shape, strict=True)) if i != axis
        )
        wanted = f"{x.ndim} axes, all but axis {axis} no longer than those of {x.shape}"
        check(fits, f"gather: index must have {wanted}, got {index.shape}")
        check_range("gather", "index", index, x.shape[axis])
        ctx.shape, ctx.axis = x.shape, axis
        ctx.save_for_backward(index)
        return x[ctx._key(index)]

    def backward(ctx, dy):
        return _scatter_add(dy, ctx._key(*ctx.saved_arrays), ctx.shape), None

    def _key(ctx, index):
        """index as a key of [...]: with the numbers along each other axis."""
        grid = array_module(index).ix_(*map(array_module(index).arange, index.shape))
        return (*grid[: ctx.axis], index, *grid[ctx.axis + 1 :])


class Triangle(Function):
    """y = x with 0 above (lower) or below (upper) the k-th diagonal of its last two axes;  dx likewise of dy"""

    def forward(ctx, x, lower, k):
        name = "tril" if lower else "triu"
        check(x.ndim >= 2, f"{name}: x must have at least 2 axes, got shape {x.shape}")
        check(isinstance(k, int), f"{name}: diagonal must be an int, got {k!r}", TypeError)
        ctx.lower, ctx.k = lower, k
        return _triangle(x, lower, k)

    def backward(ctx, dy):
        return _triangle(dy, ctx.lower, ctx.k)


def _triangle(x, lower, k):
    below = array_module(x).tri(*x.shape[-2:], k if lower else k - 1, dtype=bool)
    return masked(x, below if lower else ~below)


def squeezed(name, shape, axis):
    """`shape` without its axes of length 1: all of them, or those in `axis`, of which the longer ones stay."""
    if axis is None:
        return tuple(n for n in shape if n != 1)
    axes = check_axes(name, axis, len(shape))
    return tuple(n for i, n in enumerate(shape) if i not in axes or n != 1)
