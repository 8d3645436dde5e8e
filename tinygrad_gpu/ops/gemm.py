"""Matrix products, batched and broadcast as numpy.matmul's, and the linear layer.

C = A B:  dA = dC B^T,  dB = A^T dC, each summed back over broadcast batch axes.
          A (..., M, K), B (..., K, N), C (..., M, N)
y = x W^T + b:  dx = dy W,  dW = dy^T x,  db = sum(dy), and the same under a GELU.
          x (..., C), W (O, C), b (O,), y (..., O)
Half types are multiplied and summed in float32 and rounded once, at the end.
"""

import functools
import math

import numpy as np

from .. import blas, kernel
from ..autograd import Function
from ..config import config as switches
from ..device import address, array_module
from ..dtypes import accumulator
from . import gelu
from .common import check, check_float, narrow, pick, unbroadcast, widen
from .copy import copied, merged


def product(a, b, *, out=None, alpha=1.0, beta=0.0, bias=None, dtype=None):
    """alpha a @ b + bias + beta out, as numpy.matmul, for arrays of one dtype with at least one axis each.

    Goes to `out` (..., M, N), of any strides and of a's dtype or that of the arithmetic, which is read only if beta is
    not 0; with no `out` to a new array of `dtype`, that of the arithmetic by default. bias (N,) has a's dtype.
    """
    f = pick(a, _mathematics, _on_device)
    return f(a, b, out, alpha, beta, bias, dtype or accumulator(a.dtype))


def _mathematics(a, b, out, alpha, beta, bias, dtype):
    xp, wide = array_module(a), accumulator(a.dtype)
    direct = out is not None and not beta and out.dtype == wide and out.flags.c_contiguous
    y = xp.matmul(widen(a), widen(b), out=out if direct else None)
    if alpha != 1:
        y *= alpha
    if bias is not None:
        y += bias
    if direct:
        return out
    if out is None:
        return narrow(y, dtype)
    if beta:
        y += out if beta == 1 else out * beta
    out[...] = y
    return out


def rows(a):
    """a (..., C) as (R, C); -1 for R would not do where C is 0."""
    return a.reshape(math.prod(a.shape[:-1]), a.shape[-1])


def product_into(place, a, b):
    """Add a @ b to a Place; the float32 product of half arrays is not rounded on its way."""
    product(a, b, out=place.array, beta=float(place.filled))
    place.filled = True
    return place


def product_grad(ctx, i, a, b):
    """a @ b as the gradient of input i: summed in the input's place if it has one."""
    place = ctx.grad_place(i)
    return product(a, b) if place is None else product_into(place, a, b)


def column_sum(a):
    """The sum of a (..., C) over all axes but the last, in the arithmetic dtype: a product with ones, which BLAS sums
    in blocks; on a GPU in two of them, so that there are blocks for all of it."""
    a, xp = rows(a), array_module(a)
    if not (kernel.runs(a) and a.size):
        return xp.ones(len(a), accumulator(a.dtype)) @ widen(a)
    parts = math.gcd(len(a), 128)
    part = product(xp.ones((1, len(a) // parts), a.dtype), a.reshape(parts, -1, a.shape[1]))
    return product(xp.ones(parts, part.dtype), part[:, 0])


# ---- launch


def _layout(x):
    """Of a matrix, or a batch: (whether the kernel reads along its last axis, not along the one before; how many
    elements at once: 16 bytes of them where strides and address allow it)."""
    return _layout_of(x.shape, x.strides, x.itemsize, address(x) % 16)


@functools.cache
def _layout_of(shape, strides, size, misplaced):
    for axis in (-1, -2):
        others = [s for i, (n, s) in enumerate(zip(shape, strides, strict=True)) if n > 1 and i - len(shape) != axis]
        if strides[axis] == size and shape[axis] * size >= 16 and not misplaced and not any(s % 16 for s in others):
            return axis == -1, 16 // size
    return abs(strides[-1]) <= abs(strides[-2]), 1


@functools.cache
def config(name, m, n, batch, dtype, out, a, b, c, processors, **defines):
    """The Launch of `batch` products (m, n) in `dtype`, their results in `out`, by the kernel `name`; a, b and c are
    what _layout gives.

    A tile of 128 x 128 does 64 products for each element it reads, one of 64 x 64 half as many, but four times as many
    of those fill a GPU with less work.
    """
    fills = batch * -(-m // 128) * -(-n // 128) >= processors
    tile = 128 if fills and min(a[1], b[1]) > 1 else 64  # element by element the registers of the larger do not suffice
    depth = 32 if tile == 64 and dtype.itemsize == 2 else 16  # a vector for each of 256 threads
    tiles = batch * -(-m // tile) * -(-n // tile)
    check(tiles < 2**31, f"matmul: {batch} products ({m}, {n}) have {tiles} tiles of {tile} x {tile}, 2^31 or more")
    defines |= {"TILE_M": tile, "TILE_N": tile, "TILE_K": depth}
    defines |= {"A_ALONG_K": int(a[0]), "VEC_A": a[1], "B_ALONG_K": int(not b[0]), "VEC_B": b[1]}
    defines |= {"VEC_C": 4 if c[0] and c[1] > 1 else 1, "T": dtype, "OUT": out}
    return kernel.Launch("gemm.cu", name, (tiles,), (256,), **defines)


def _launch(name, c, outputs, a, b, bias, scalars, **defines):
    (*batch, m, n), k = c.shape, a.shape[-1]
    batch = (1, 1, 1, *batch)[-3:]
    sizes, layouts = (m, n, math.prod(batch), a.dtype, c.dtype), (_layout(a), _layout(b), _layout(c))
    what = config(name, *sizes, *layouts, kernel.limits(c).processors, **defines)
    operands = kernel.Strided(a), kernel.Strided(b)
    kernel.launch(what, kernel.Strided(c), *outputs, *operands, bias, m, n, k, *batch[1:], *scalars)


def product_kernel(c, a, b, alpha, beta, bias=None):
    """c = alpha a b + beta c + bias by gemm.cu, for arrays of any strides with the same batch axes, at most three."""
    _launch("gemm_acc" if beta else "gemm", c, (), a, b, bias, (alpha, beta) if beta else (alpha,))


def gelu_kernel(a, b, bias, approximate, keep):
    """GELU(a b + bias), of the rounded sum, and that sum if it is to be kept, else None; (M, K) by (K, N)."""
    xp = array_module(a)
    y, pre = (xp.empty((len(a), b.shape[1]), a.dtype) if wanted else None for wanted in (True, keep))
    _launch("gemm_gelu", y, (pre,), a, b, bias, (1.0,), TANH=int(approximate == "tanh"))
    return y, pre


def _by_library(x):
    """Whether the vendor's library multiplies arrays like x: as config.gemm says, "auto" by device and dtype."""
    return not isinstance(x, np.ndarray) and switches.gemm != "kernel"


def _on_device(a, b, out, alpha, beta, bias, dtype):
    xp = array_module(a)
    if a.dtype != b.dtype:
        a, b = widen(a), widen(b)
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *a.shape[-2:-1], *b.shape[b.ndim - 1 :][: b.ndim > 1])
    out = xp.empty(shape, dtype) if out is None else out
    c = out
    if a.ndim == 1:
        a, c = a[None], (c[None] if b.ndim == 1 else c[..., None, :])
    if b.ndim == 1:
        b, c = b[:, None], c[..., None]
    for views in _batches(c, a, b):
        if not _by_library(a):
            product_kernel(*views, alpha, beta, bias)
        elif bias is None:
            blas.product(*views, alpha, beta)
        else:
            _begin_with(views[0], bias, beta)
            blas.product(*views, alpha, 1.0)
    return out


def _begin_with(c, bias, beta):
    """c = bias + beta c, to which a library adds the product: with the bias in, half results are rounded once."""
    if beta:
        c *= beta
        c += bias
    elif c.dtype == bias.dtype:
        copied(array_module(c).broadcast_to(bias, c.shape), c)
    else:
        c[...] = bias


def _batches(c, a, b):
    """Views of c, a and b with the same batch axes, at most three: a and b broadcast, axes merged where all three can
    be; with more left, one of c's after another."""
    xp, batch = array_module(c), c.shape[:-2]
    if not batch:
        return [(c, a, b)]
    views = [c, *(xp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))]
    shape, *steps = merged(batch, *(x.strides[:-2] for x in views))
    views = [
        xp.lib.stride_tricks.as_strided(x, (*shape, *x.shape[-2:]), (*own, *x.strides[-2:]))
        for x, own in zip(views, steps, strict=True)
    ]
    if len(shape) <= 3:
        return [tuple(views)]
    return [tuple(x[i] for x in views) for i in np.ndindex(*shape[:-3])]


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
            return product(rows(a), b, dtype=a.dtype).reshape((*a.shape[:-1], *b.shape[1:]))
        return product(a, b, dtype=a.dtype)

    def backward(ctx, dy):
        (a, b), (a_shape, b_shape) = ctx.saved_arrays, ctx.shapes
        da = db = None
        if len(b_shape) <= 2:
            dy = dy.reshape(math.prod(a_shape[:-1]), *b_shape[1:])
            if ctx.needs_input_grad[0]:
                da = product(dy, b.T, dtype=dy.dtype) if b.ndim == 2 else widen(dy)[:, None] * b
                da = da.reshape(a_shape)
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
        ctx._take(x, weight, bias)
        y = product(rows(x), weight.T, bias=bias, dtype=x.dtype)
        return y.reshape(*x.shape[:-1], len(weight))

    def backward(ctx, dy):
        return ctx._gradients(dy, *ctx.saved_arrays)

    def _take(ctx, x, weight, bias):
        check_float("linear", x=x, weight=weight, bias=bias)
        check(weight.ndim == 2, f"linear: weight must have shape (out, in), got {weight.shape}")
        out, width = weight.shape
        check(x.shape[-1:] == (width,), f"linear: x must have shape (..., in) = (..., {width}), got {x.shape}")
        if bias is not None:
            check(bias.shape == (out,), f"linear: bias must have shape (out,) = ({out},), got {bias.shape}")
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        ctx.shape = x.shape

    def _gradients(ctx, dy, x, weight):
        dy = rows(dy)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = product(dy, weight, dtype=dy.dtype).reshape(ctx.shape)
        if ctx.needs_input_grad[1]:
            dweight = product_grad(ctx, 1, dy.T, rows(x))
        if ctx.needs_input_grad[2]:
            dbias = column_sum(dy)
        return dx, dweight, dbias


class LinearGelu(Linear):
    """y = GELU(x W^T + b), in one kernel where that is ours; the gradient of GELU is that of gelu.py."""

    def forward(ctx, x, weight, bias, approximate):
        ctx._take(x, weight, bias)
        ctx.approximate, keep, shape = approximate, any(ctx.needs_input_grad), (*x.shape[:-1], len(weight))
        if kernel.runs(x) and not _by_library(x):
            y, pre = gelu_kernel(rows(x), weight.T, bias, approximate, keep)
        else:
            pre = product(rows(x), weight.T, bias=bias, dtype=x.dtype)
            y = pick(x, gelu.fwd, gelu.fwd_kernel)(pre, approximate)
        ctx.pre = pre if keep else None
        return y.reshape(shape)

    def backward(ctx, dy):
        return ctx._gradients(
            pick(dy, gelu.bwd, gelu.bwd_kernel)(rows(dy), ctx.pre, ctx.approximate), *ctx.saved_arrays
        )
