"""Matrix products, batched and broadcast as numpy.matmul's, and the linear layer.

C = A B:  dA = dC B^T,  dB = A^T dC, each summed back over broadcast batch axes.
          A (..., M, K), B (..., K, N), C (..., M, N)
y = x W^T + b:  dx = dy W,  dW = dy^T x,  db = sum(dy).
          x (..., C), W (O, C), b (O,), y (..., O)
Half types are multiplied and summed in float32 and rounded once, at the end.
"""

import math

import numpy as np

from ..autograd import Function
from ..device import array_module
from ..dtypes import accumulator
from .common import check, check_float, narrow, unbroadcast, widen


def product(a, b, *, out=None, alpha=1.0, beta=0.0, bias=None, dtype=None):
    """alpha a @ b + beta out + bias, as numpy.matmul, for arrays of one dtype with at least one axis each.

    Goes to `out` (..., M, N), of any strides and of a's dtype or that of the arithmetic, which is read only if beta is
    not 0; with no `out` to a new array of `dtype`, that of the arithmetic by default. bias (N,) of a's dtype.
    """
    xp = array_module(a)
    y = xp.matmul(widen(a), widen(b))
    if alpha != 1:
        y *= alpha
    if bias is not None:
        y += bias
    if out is None:
        return narrow(y, dtype or y.dtype)
    if beta:
        y += out * beta
    out[...] = y
    return out


def rows(a):
    """a (..., C) as (R, C); -1 for R would not do where C is 0."""
    return a.reshape(math.prod(a.shape[:-1]), a.shape[-1])


def product_into(place, a, b):
    """Add a @ b to a Place; the float32 product of half arrays is not rounded on its way."""
    out = place.array
    if place.filled or out.dtype != accumulator(a.dtype) or not out.flags.c_contiguous:
        place.add(product(a, b))
    else:
        array_module(a).matmul(widen(a), widen(b), out=out)
        place.filled = True
    return place


def product_grad(ctx, i, a, b):
    """a @ b as the gradient of input i: summed in the input's place if it has one."""
    place = ctx.grad_place(i)
    return product(a, b) if place is None else product_into(place, a, b)


def column_sum(a):
    """The sum of a (..., C) over all axes but the last, in the arithmetic dtype; by BLAS, which sums in blocks."""
    wide = widen(rows(a))
    return array_module(a).ones(len(wide), wide.dtype) @ wide


class MatMul(Function):
    def forward(ctx, a, b):
        check_float("matmul", a=a, b=b)
        check(a.ndim > 0 and b.ndim > 0, f"matmul: operands need at least one axis, got shapes {a.shape} and {b.shape}")
        fits = a.shape[-1] == b.shape[max(-2, -b.ndim)]
        try:
            np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        except ValueError:
            fits = False
        wanted = "(..., M, K) and (..., K, N) with axes before these that broadcast"
        check(fits, f"matmul: shapes must be {wanted}, got {a.shape} and {b.shape}")
        need_a, need_b = ctx.needs_input_grad
        ctx.shapes = a.shape, b.shape
        ctx.save_for_backward(a if need_b else None, b if need_a else None)
        if b.ndim <= 2:  # one product for all batches
            return narrow(product(rows(a), b), a.dtype).reshape((*a.shape[:-1], *b.shape[1:]))
        return narrow(product(a, b), a.dtype)

    def backward(ctx, dy):
        (a, b), (a_shape, b_shape) = ctx.saved_arrays, ctx.shapes
        da = db = None
        if len(b_shape) <= 2:
            dy = dy.reshape(math.prod(a_shape[:-1]), *b_shape[1:])
            if ctx.needs_input_grad[0]:
                da = (product(dy, b.T) if b.ndim == 2 else widen(dy)[:, None] * b).reshape(a_shape)
            if ctx.needs_input_grad[1]:
                db = product_grad(ctx, 1, rows(a).T, dy)
            return da, db
        # A vector a is a matrix of one row, which the result leaves out.
        if len(a_shape) == 1:
            dy, a_shape = dy[..., None, :], (1, *a_shape)
        if ctx.needs_input_grad[0]:
            da = unbroadcast(product(dy, b.swapaxes(-1, -2)), a_shape).reshape(ctx.shapes[0])
        if ctx.needs_input_grad[1]:
            db = unbroadcast(product(a.reshape(a_shape).swapaxes(-1, -2), dy), b_shape)
        return da, db


class Linear(Function):
    def forward(ctx, x, weight, bias):
        check_float("linear", x=x, weight=weight, bias=bias)
        check(weight.ndim == 2, f"linear: weight must have shape (out, in), got {weight.shape}")
        out, width = weight.shape
        check(x.shape[-1:] == (width,), f"linear: x must have shape (..., in) = (..., {width}), got {x.shape}")
        if bias is not None:
            check(bias.shape == (out,), f"linear: bias must have shape (out,) = ({out},), got {bias.shape}")
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        ctx.shape = x.shape
        y = product(rows(x), weight.T)
        if bias is not None:
            y += bias
        return narrow(y, x.dtype).reshape(*x.shape[:-1], out)

    def backward(ctx, dy):
        x, weight = ctx.saved_arrays
        dy = rows(dy)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = product(dy, weight).reshape(ctx.shape)
        if ctx.needs_input_grad[1]:
            dweight = product_grad(ctx, 1, dy.T, rows(x))
        if ctx.needs_input_grad[2]:
            dbias = column_sum(dy)
        return dx, dweight, dbias
