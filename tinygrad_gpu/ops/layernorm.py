"""Normalisation over the last axis: layer norm, its fusion with a residual addition, and RMS norm.

layer_norm (arXiv:1607.06450, eqs. 3 and 4), var biased:
    y  = xhat * w + b,  xhat = (x - mean) * rstd,  rstd = 1 / sqrt(var + eps)
    dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),  g = dy * w;   dw = sum(dy * xhat);   db = sum(dy)
rms_norm (arXiv:1910.07467, eq. 4) is the same without the means of x and g and without b.
add_layer_norm: s = x + residual, y = layer_norm(s);  dx = dresidual = dlayer_norm + ds

Shapes: x, y, s and their gradients (..., C); w, b (C,), either may be None; mean, rstd (R, 1) for the R rows of x, in
float32, in float64 for float64. The variance is taken in a second pass: mean(x^2) - mean^2 would cancel where the mean
is large. There the first pass rounds the mean by more than a small deviation, too: the second takes its error off.
"""

import functools

from .. import kernel
from ..autograd import Function
from ..device import array_module
from ..dtypes import accumulator, float32, float64
from .common import blocks, by_rows, check, check_float, narrow, pick, vector, widen
from .copy import contiguous
from .gemm import column_sum, rows

# What a CPU takes at once: elements, so that what is made of them stays in a core's cache, and rows, since BLAS sums
# these one after another (blocks are summed in float64).
_BLOCK, _ROWS = 2**16, 2**11


def _blocks(x):
    """Slices of the rows of x (R, C): of cache size for NumPy, one for CuPy."""
    n, width = x.shape
    return blocks(array_module(x), n, min(max(_BLOCK // max(width, 1), 1), _ROWS))


def _mean(a, b=None):
    """The mean of each row of a (r, C), or of its product with b (r, C) or (C,): by BLAS, as a.mean() takes longer."""
    xp = array_module(a)
    if b is None:
        b = xp.ones(a.shape[1], a.dtype)
    total = a @ b if b.ndim == 1 else xp.einsum("rc,rc->r", a, b)
    return total[:, None] / a.shape[1]


def fwd(x, w, b, eps, centred=True):
    """y, mean (None unless centred), rstd."""
    xp = array_module(x)
    y, x = xp.empty(x.shape, x.dtype), rows(x)
    out = rows(y)
    mean, rstd = (xp.empty((len(x), 1), accumulator(x.dtype)) for _ in range(2))
    for r in _blocks(x):
        xhat, error = widen(x[r]), 0
        if centred:
            mean[r] = _mean(xhat)
            xhat = xhat - mean[r]
            error = _mean(xhat)
            mean[r] += error
        rstd[r] = 1 / xp.sqrt(_mean(xhat, xhat) - error * error + eps)
        xhat = xhat * rstd[r]
        if centred:
            xhat -= error * rstd[r]
        if w is not None:
            xhat *= w
        if b is not None:
            xhat += b
        out[r] = xhat
    return y, mean if centred else None, rstd


def add_fwd(x, residual, w, b, eps):
    """y, s, mean, rstd."""
    s = x + residual
    y, *statistics = fwd(s, w, b, eps)
    return y, s, *statistics


def bwd(dy, x, w, mean, rstd, needs, ds=None):
    """dx, plus ds if there is one, dw and db, each None unless needed; the last two in the dtype of the arithmetic."""
    xp, w = array_module(x), None if w is None else widen(w)
    dx = xp.empty(x.shape, x.dtype) if needs[0] else None
    dw, db = (xp.zeros(x.shape[-1], float64) if need else None for need in needs[1:])
    x, dy, out, ds = (None if a is None else rows(a) for a in (x, dy, dx, ds))
    for r in _blocks(x):
        g = widen(dy[r])
        if db is not None:
            db += column_sum(g)
        if dx is None and dw is None:
            continue
        xhat = widen(x[r]) * rstd[r] if mean is None else widen(x[r]) - mean[r]
        if mean is not None:
            xhat *= rstd[r]
        product = g * xhat
        if dw is not None:
            dw += column_sum(product)
        if dx is not None:
            xhat *= -_mean(product, w)
            xhat += g if w is None else xp.multiply(g, w, out=product)
            if mean is not None:
                xhat -= _mean(g, w)
            xhat *= rstd[r]
            if ds is not None:
                xhat += ds[r]
            out[r] = xhat
    return dx, *(None if a is None else narrow(a, rstd.dtype) for a in (dw, db))


# ---- launch


def _config(name, grid, shape, **defines):
    block = shape["THREADS"], shape["ROWS"]
    return kernel.Launch("layernorm.cu", name, (grid,), block, **shape, **defines)


@functools.cache
def config(height, width, dtype, vec, limits, centred):
    shape = by_rows(width, dtype.itemsize, vec, limits.warp_size, 1024)
    grid = -(-height // shape["ROWS"])
    return _config("layernorm_fwd", grid, shape, T=dtype, VEC=vec, CENTRED=int(centred))


@functools.cache
def bwd_config(height, width, dtype, vec, limits, centred, sums):
    """With `sums` the grid is what runs at once: 512 threads a multiprocessor, so that each has the 128 registers which
    its part of the sums asks for. AMD's compiler asks for more, which RDNA has in blocks of 256."""
    most = 256 if limits.target.startswith("gfx1") else 512
    shape = by_rows(width, dtype.itemsize, vec, limits.warp_size, most)
    grid = -(-height // shape["ROWS"])
    resident = 512 // (shape["THREADS"] * shape["ROWS"]) if sums else 1
    if sums:
        grid = min(grid, resident * limits.processors)
    defines = {"T": dtype, "VEC": vec, "CENTRED": int(centred), "SUMS": int(sums), "BLOCKS": resident}
    return _config("layernorm_bwd", grid, shape, **defines)


@functools.cache
def sum_config(width, n):
    return kernel.Launch("layernorm.cu", "layernorm_bwd_sum", (-(-width // 32), n), (32, 16))


def fwd_kernel(x, w, b, eps, centred=True):
    y, _, *statistics = add_fwd_kernel(x, None, w, b, eps, centred)
    return y, *statistics


def add_fwd_kernel(x, residual, w, b, eps, centred=True):
    """s is None with no residual."""
    xp, (x, residual, w, b) = array_module(x), contiguous(x, residual, w, b)
    y, s = xp.empty(x.shape, x.dtype), None if residual is None else xp.empty(x.shape, x.dtype)
    height, width = rows(x).shape
    mean, rstd = xp.empty((height, 1), float32) if centred else None, xp.empty((height, 1), float32)
    vec = vector(width, y, x, residual, w, b)
    what = config(height, width, x.dtype, vec, kernel.limits(x), centred)
    kernel.launch(what, y, s, mean, rstd, x, residual, w, b, height, width, eps)
    return y, s, mean, rstd


def bwd_kernel(dy, x, w, mean, rstd, needs, ds=None):
    xp, (dy, x, w, ds) = array_module(x), contiguous(dy, x, w, ds)
    height, width = rows(x).shape
    dx, n = xp.empty(x.shape, x.dtype) if needs[0] else None, sum(needs[1:])
    vec = vector(width, dx, dy, ds, x, w)
    what = bwd_config(height, width, x.dtype, vec, kernel.limits(x), mean is not None, n > 0)
    shares = xp.empty((n, what.grid[0], width), float32)
    dw, db = _spread(shares, needs)
    kernel.launch(what, dx, dw, db, dy, ds, x, w, mean, rstd, height, width)
    sums = xp.empty((n, width), float32)
    kernel.launch(sum_config(width, n), sums, shares, what.grid[0], width)
    return dx, *_spread(sums, needs)


def _spread(arrays, needs):
    """The arrays for dw and db, of those that are needed."""
    arrays = iter(arrays)
    return [next(arrays) if need else None for need in needs[1:]]


# ---- rule


def _check(name, x, w, b=None):
    check_float(name, x=x, weight=w, bias=b)
    check(x.ndim > 0, f"{name}: x must have at least one axis, got shape ()")
    width = x.shape[-1]
    for what, a in (("weight", w), ("bias", b)):
        if a is not None:
            check(a.shape == (width,), f"{name}: {what} must have shape (C,) = ({width},), got {a.shape}")


class LayerNorm(Function):
    def forward(ctx, x, w, b, eps):
        _check("layer_norm", x, w, b)
        y, mean, rstd = pick(x, fwd, fwd_kernel)(x, w, b, eps)
        ctx.save_for_backward(x, w, mean, rstd)
        return y

    def backward(ctx, dy):
        return pick(dy, bwd, bwd_kernel)(dy, *ctx.saved_arrays, ctx.needs_input_grad)


class AddLayerNorm(Function):
    materialize_grads = False  # the sum alone, or the normalised sum alone, is often all that is used

    def forward(ctx, x, residual, w, b, eps):
        name = "add_layer_norm"
        check_float(name, x=x, residual=residual)
        check(residual.shape == x.shape, f"{name}: residual must have shape {x.shape} like x, got {residual.shape}")
        _check(name, x, w, b)
        y, s, mean, rstd = pick(x, add_fwd, add_fwd_kernel)(x, residual, w, b, eps)
        ctx.save_for_backward(s, w, mean, rstd)
        return y, s

    def backward(ctx, dy, ds):
        if dy is None:
            return ds, ds, None, None
        x, residual, *others = ctx.needs_input_grad
        dx, dw, db = pick(dy, bwd, bwd_kernel)(dy, *ctx.saved_arrays, (x or residual, *others), ds)
        return dx, dx, dw, db


class RMSNorm(Function):
    def forward(ctx, x, w, eps):
        _check("rms_norm", x, w)
        y, _, rstd = pick(x, fwd, fwd_kernel)(x, w, None, eps, centred=False)
        ctx.save_for_backward(x, w, rstd)
        return y

    def backward(ctx, dy):
        x, w, rstd = ctx.saved_arrays
        return pick(dy, bwd, bwd_kernel)(dy, x, w, None, rstd, (*ctx.needs_input_grad, False))[:2]
