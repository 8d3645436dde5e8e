"""Normalisation over the last axis: layer norm, its fusion with a residual addition, and RMS norm.

layer_norm (arXiv:1607.06450, eqs. 3 and 4), var biased:
    y  = xhat * w + b,  xhat = (x - mean) * rstd,  rstd = 1 / sqrt(var + eps)
    dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),  g = dy * w;   dw = sum(dy * xhat);   db = sum(dy)
rms_norm (arXiv:1910.07467, eq. 4):
    y  = xhat * w,  xhat = x * rstd,  rstd = 1 / sqrt(mean(x^2) + eps)
    dx = rstd * (g - xhat * mean(g * xhat));   dw = sum(dy * xhat)
add_layer_norm: s = x + residual, y = layer_norm(s);  dx = dresidual = dlayer_norm + ds

Shapes: x, y, s and their gradients (..., C); w, b (C,), either may be None; mean, rstd (..., 1) in float32, in float64 for
float64. The variance is taken in a second pass: mean(x^2) - mean^2 would cancel where the mean is large.
"""

from ..autograd import Function
from ..device import array_module
from .common import check, check_float, narrow, widen
from .gemm import column_sum


def _mean(a):
    """The mean of each row of a (..., C), as (..., 1); by BLAS, in half the time of mean() on a CPU."""
    c = a.shape[-1]
    return (a @ array_module(a).ones(c, a.dtype))[..., None] / a.dtype.type(c)


def _mean_of_product(a, b):
    """The mean of each row of a * b, with no array for the product."""
    return array_module(a).einsum("...c,...c->...", a, b)[..., None] / a.dtype.type(a.shape[-1])


def fwd(x, w, b, eps):
    """y, mean, rstd."""
    wide = widen(x)
    mean = _mean(wide)
    y = wide - mean
    rstd = 1 / array_module(x).sqrt(_mean_of_product(y, y) + wide.dtype.type(eps))
    y *= rstd
    if w is not None:
        y *= w
    if b is not None:
        y += b
    return narrow(y, x.dtype), mean, rstd


def bwd(dy, x, w, mean, rstd):
    """dx, dw, db; the last two in the dtype of the arithmetic."""
    dy, xhat = widen(dy), widen(x) - mean
    xhat *= rstd
    dw, db = column_sum(dy * xhat), column_sum(dy)
    dx = dy.copy() if w is None else dy * w  # g
    xhat *= _mean_of_product(dx, xhat)
    xhat += _mean(dx)
    dx -= xhat
    dx *= rstd
    return narrow(dx, x.dtype), dw, db


def rms_fwd(x, w, eps):
    """y, rstd."""
    wide = widen(x)
    rstd = 1 / array_module(x).sqrt(_mean_of_product(wide, wide) + wide.dtype.type(eps))
    y = wide * rstd
    if w is not None:
        y *= w
    return narrow(y, x.dtype), rstd


def rms_bwd(dy, x, w, rstd):
    """dx, dw."""
    dy, xhat = widen(dy), widen(x) * rstd
    dw = column_sum(dy * xhat)
    dx = dy.copy() if w is None else dy * w  # g
    xhat *= _mean_of_product(dx, xhat)
    dx -= xhat
    dx *= rstd
    return narrow(dx, x.dtype), dw


def _check(name, x, w, b):
    check_float(name, x=x, weight=w, bias=b)
    check(x.ndim > 0, f"{name}: x must have at least one axis, got shape ()")
    width = x.shape[-1]
    for what, a in (("weight", w), ("bias", b)):
        if a is not None:
            check(a.shape == (width,), f"{name}: {what} must have shape (C,) = ({width},), got {a.shape}")


class LayerNorm(Function):
    def forward(ctx, x, w, b, eps):
        _check("layer_norm", x, w, b)
        y, mean, rstd = fwd(x, w, b, eps)
        ctx.save_for_backward(x, w, mean, rstd)
        return y

    def backward(ctx, dy):
        return bwd(dy, *ctx.saved_arrays)


class AddLayerNorm(Function):
    materialize_grads = False  # the sum alone, or the normalised sum alone, is often all that is used

    def forward(ctx, x, residual, w, b, eps):
        check_float("add_layer_norm", x=x, residual=residual)
        check(
            residual.shape == x.shape,
            f"add_layer_norm: residual must have shape {x.shape} like x, got {residual.shape}",
        )
        _check("add_layer_norm", x, w, b)
        s = x + residual
        y, mean, rstd = fwd(s, w, b, eps)
        ctx.save_for_backward(s, w, mean, rstd)
        return y, s

    def backward(ctx, dy, ds):
        if dy is None:
            return ds, ds, None, None
        dx, dw, db = bwd(dy, *ctx.saved_arrays)
        if ds is not None:
            dx += ds
        return dx, dx, dw, db


class RMSNorm(Function):
    def forward(ctx, x, w, eps):
        _check("rms_norm", x, w, None)
        y, rstd = rms_fwd(x, w, eps)
        ctx.save_for_backward(x, w, rstd)
        return y

    def backward(ctx, dy):
        return rms_bwd(dy, *ctx.saved_arrays)
