"""Matrix products, batched and broadcast as numpy.matmul's, and the linear layer.

C = A B:  dA = dC B^T,  dB = A^T dC, each summed back over broadcast batch axes.   A (..., M, K), B (..., K, N), C (..., M, N)
y = x W^T + b:  dx = dy W,  dW = dy^T x,  db = sum(dy).   x (..., C), W (O, C), b (O,), y (..., O)
Half types are multiplied and summed in float32 and rounded once, at the end.
"""

import numpy as np

from ..autograd import Function
from ..device import array_module
from .common import check, check_float, narrow, unbroadcast, widen


def product(a, b, dtype=None):
    """a @ b for arrays of at least one axis each, as numpy.matmul, with wide accumulation; the result has `dtype`."""
    return narrow(array_module(a).matmul(widen(a), widen(b)), dtype or a.dtype)


def product_into(place, a, b):
    """Add a @ b (two axes each) to a Place; the float32 product of half arrays is not rounded on its way."""
    xp, out = array_module(a), place.array
    if place.filled or out.dtype != widen(a).dtype or not out.flags.c_contiguous:
        place.add(xp.matmul(widen(a), widen(b)))
    else:
        xp.matmul(widen(a), widen(b), out=out)
        place.filled = True
    return place


def product_grad(ctx, i, a, b):
    """a @ b (two axes each) as the gradient of input i: summed in the input's place if it has one."""
    place = ctx.grad_place(i)
    return product(a, b) if place is None else product_into(place, a, b)


def column_sum(a):
    """The sum of a (..., C) over all but its last axis, in the arithmetic dtype; as a product, since BLAS sums in blocks."""
    rows = widen(a).reshape(-1, a.shape[-1])
    return array_module(a).ones(len(rows), rows.dtype) @ rows


class MatMul(Function):
    def forward(ctx, a, b):
        check_float("matmul", a=a, b=b)
        check(a.ndim > 0 and b.ndim > 0, f"matmul: operands need at least one axis, got shapes {a.shape} and {b.shape}")
        fits = a.shape[-1] == b.shape[max(-2, -b.ndim)]
        try:
            np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        except ValueError:
            fits = False
        check(fits, f"matmul: shapes must be (..., M, K) and (..., K, N) with axes before that broadcast, got {a.shape} and {b.shape}")
        ctx.save_for_backward(a, b)
        return product(a, b)

    def backward(ctx, dy):
        a, b = ctx.saved_arrays
        # A vector operand is a matrix of one row (a) or column (b), which the result leaves out.
        a2 = a[None, :] if a.ndim == 1 else a
        b2 = b[:, None] if b.ndim == 1 else b
        dy = dy[..., None] if b.ndim == 1 else dy
        dy = dy[..., None, :] if a.ndim == 1 else dy
        da = db = None
        if ctx.needs_input_grad[0]:
            da = unbroadcast(product(dy, b2.swapaxes(-1, -2)), a2.shape).reshape(a.shape)
        if ctx.needs_input_grad[1]:
            if b.ndim == 2 and a.ndim >= 2:  # one product over all batches, straight into the place of a weight
                db = product_grad(ctx, 1, a2.reshape(-1, a2.shape[-1]).T, dy.reshape(-1, dy.shape[-1]))
            else:
                db = unbroadcast(product(a2.swapaxes(-1, -2), dy), b2.shape).reshape(b.shape)
        return da, db


class Linear(Function):
    def forward(ctx, x, weight, bias):
        check_float("linear", x=x, weight=weight, bias=bias)
        check(weight.ndim == 2, f"linear: weight must have shape (out, in), got {weight.shape}")
        out, width = weight.shape
        check(x.ndim > 0 and x.shape[-1] == width, f"linear: x must have shape (..., in) = (..., {width}), got {x.shape}")
        check(bias is None or bias.shape == (out,), f"linear: bias must have shape (out,) = ({out},), got {getattr(bias, 'shape', None)}")
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        ctx.shape = x.shape
        rows = widen(x.reshape(-1, width))
        y = array_module(x).matmul(rows, widen(weight).T)
        if bias is not None:
            y += bias
        return narrow(y, x.dtype).reshape(*x.shape[:-1], out)

    def backward(ctx, dy):
        x, weight = ctx.saved_arrays
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = product(rows, weight).reshape(ctx.shape)
        if ctx.needs_input_grad[1]:
            dweight = product_grad(ctx, 1, rows.T, x.reshape(-1, ctx.shape[-1]))
        if ctx.needs_input_grad[2]:
            dbias = column_sum(rows)
        return dx, dweight, dbias
