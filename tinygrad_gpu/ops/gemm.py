"""Matrix products, batched and broadcast as numpy.matmul's, the linear layer, and two of them with a GELU between.

C = A B:  dA = dC B^T,  dB = A^T dC, each summed back over broadcast batch axes.
          A (..., M, K), B (..., K, N), C (..., M, N)
y = x W^T + b + r:  dx = dy W,  dW = dy^T x,  db = sum(dy),  dr = dy
          x (..., C), W (O, C), b (O,), y and r (..., O)
y = GELU(p) V^T + c + r,  p = x W^T + b:  dp = (dy V) GELU'(p), then as above for each of the two
          x (..., C), W (H, C), b (H,), p (..., H), V (O, H), c (O,), y and r (..., O)
Half types are multiplied and summed in float32 and rounded once, at the end; p is rounded before its GELU.
"""

import math

import numpy as np

from .. import blas, kernel
from ..autograd import Function
from ..config import config as switches
from ..device import address, array_module
from ..dtypes import accumulator, float32
from ..tma import Tiled
from . import gelu
from .common import check, check_float, narrow, pick, unbroadcast, widen
from .copy import copied, merged
from .gemm_config import ADD, GELU, PLAIN, SLOPE, config, layout


def product(a, b, *, out=None, alpha=1.0, beta=0.0, bias=None, residual=None, dtype=None):
    """alpha a @ b + bias + residual + beta out, as numpy.matmul, for arrays of one dtype with at least one axis each.

    Goes to `out` (..., M, N), of any strides and of a's dtype or that of the arithmetic, which is read only if beta is
    not 0; with no `out` to a new array of `dtype`, that of the arithmetic by default. bias (N,) has a's dtype. residual
    has the result's shape and dtype, and goes with no out.
    """
    f = pick(a, _mathematics, _on_device)
    return f(a, b, out, alpha, beta, bias, residual, dtype or accumulator(a.dtype))


def _mathematics(a, b, out, alpha, beta, bias, residual, dtype):
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
        if residual is not None:
            y += residual
        return narrow(y, dtype)
    if beta:
        y += out if beta == 1 else out * beta
    out[...] = y
    return out


def product_gelu(a, b, bias, approximate, keep):
    """GELU(p), p = a @ b + bias, rounded, and p if it is to be kept, else None; (M, K) by (K, N)."""
    if _by_kernel(a):
        y, pre = (array_module(a).empty((len(a), b.shape[1]), a.dtype) if wanted else None for wanted in (True, keep))
        product_kernel(y, a, b, bias=bias, epilogue=GELU, pre=pre, TANH=int(approximate == "tanh"))
        return y, pre
    pre = product(a, b, bias=bias, dtype=a.dtype)
    return pick(a, gelu.fwd, gelu.fwd_kernel)(pre, approximate), pre if keep else None


def product_slope(a, b, pre, approximate):
    """(a @ b) GELU'(pre); (M, K) by (K, N)."""
    if _by_kernel(a):
        c = array_module(a).empty(pre.shape, a.dtype)
        product_kernel(c, a, b, epilogue=SLOPE, other=pre, TANH=int(approximate == "tanh"))
        return c
    return pick(a, gelu.bwd, gelu.bwd_kernel)(product(a, b, dtype=a.dtype), pre, approximate)


def rows(a):
    """a (..., C) as (R, C); -1 for R would not do where C is 0."""
    return a.reshape(math.prod(a.shape[:-1]), a.shape[-1])


def product_into(place, a, b, sums=None):
    """Add a @ b to a Place; the float32 product of half arrays is not rounded on its way. `sums` is for rows of a, as
    `product_kernel` fills it."""
    if sums is None:
        product(a, b, out=place.array, beta=float(place.filled))
    else:
        product_kernel(place.array, a, b, beta=float(place.filled), sums=sums)
    place.filled = True
    return place


def product_grad(ctx, i, a, b, sums=None):
    """a @ b as the gradient of input i: summed in the input's place if it has one."""
    place = ctx.grad_place(i)
    if place is not None:
        return product_into(place, a, b, sums)
    if sums is None:
        return product(a, b)
    c = array_module(a).empty((len(a), b.shape[1]), accumulator(a.dtype))
    product_kernel(c, a, b, sums=sums)
    return c


def linear_grads(ctx, weight, bias, dy, x):
    """The gradients of a linear layer's weight and bias, inputs number `weight` and `bias` of ctx, None where not
    needed; dy (R, O), x (R, C). One product gives both, since the bias's sums rows of its first factor."""
    dweight = dbias = None
    need_weight, need_bias = ctx.needs_input_grad[weight], ctx.needs_input_grad[bias]
    if need_weight and need_bias and _by_kernel(dy) and dy.size and x.size:
        dbias = array_module(dy).empty(dy.shape[1], float32)
        return product_grad(ctx, weight, dy.T, x, dbias), dbias
    if need_weight:
        dweight = product_grad(ctx, weight, dy.T, x)
    if need_bias:
        dbias = column_sum(dy)
    return dweight, dbias


def column_sum(a):
    """The sum of a (..., C) over all axes but the last, in the arithmetic dtype: a product with ones."""
    a, xp = rows(a), array_module(a)
    if not (kernel.runs(a) and a.size):
        return xp.ones(len(a), accumulator(a.dtype)) @ widen(a)
    return product(xp.ones(len(a), a.dtype), a)


# ---- launch


def _layout(x, *others):
    """The Layout of x, and of other arrays laid out as x or None."""
    misplaced = any(address(y) % 16 for y in (x, *others) if y is not None)
    return layout(x.shape, x.strides, x.itemsize, misplaced)


def product_kernel(c, a, b, alpha=1.0, beta=0.0, bias=None, *, epilogue=None, other=None, **options):
    """c = alpha a b + bias + beta c, or what `epilogue` says, by our kernels: arrays of any strides with the same batch
    axes, at most three. Options as of `launches`."""
    if not c.size:
        return
    if epilogue is None:
        epilogue, other = (ADD, c) if beta else (PLAIN, None)
    y = c
    if other is not None and other is not c and (other.strides, _layout(other)) != (c.strides, _layout(c)):
        y, other = array_module(c).empty(c.shape, c.dtype), copied(other)
    for what, arguments in launches(y, a, b, alpha, beta, bias, epilogue, other, **options):
        kernel.launch(what, *arguments)
    if y is not c:
        copied(y, c)


def launches(
    c, a, b, alpha, beta, bias, epilogue, other, *, pre=None, sums=None, limits=None, choices=None, **form
):  # fmt: skip
    """[(Launch, its arguments)] of a product: one, or two where tiles are multiplied in pieces.

    other and pre, laid out as c, and sums are the kernels' (kernels_cu/gemm.cuh); form: TANH. limits: of the device to
    plan for, c's by default; choices as `config` takes them.
    """
    of_a, of_b, of_c = _layout(a), _layout(b), _layout(c, pre, other)
    if not of_c.last and bias is None and sums is None and epilogue in (PLAIN, ADD) and (other is None or other is c):
        c, a, b = (x.swapaxes(-1, -2) for x in (c, b, a))
        other = other if other is None else c
        of_a, of_b, of_c = _layout(a), _layout(b), _layout(c)
    (*batch, m, n), k = c.shape, a.shape[-1]
    batch = (1, 1, 1, *batch)[-3:]
    count, tf32 = math.prod(batch), switches.allow_tf32
    sizes, layouts = (m, n, k, count, a.dtype, c.dtype), (of_a, of_b, of_c)
    defines = {"EPILOGUE": epilogue, "ROW_SUMS": int(sums is not None), **form}
    plan = config(*sizes, *layouts, limits or kernel.limits(c), tf32=tf32, choices=choices, **defines)
    parts = array_module(c).empty(plan.parts, float32) if plan.parts else None
    numbers = m, n, k, count, *batch[1:], plan.slices, plan.whole, plan.per, alpha, beta
    if plan.boxes:
        of_c, of_a, of_b = plan.boxes
        result = Tiled(c, *of_c)
        before, beside = (result if x is None or x is c else Tiled(x, *of_c) for x in (pre, other))
        factors = Tiled(a, *of_a), Tiled(b, *of_b)
        arguments = result, before, sums, parts, *factors, bias, beside, pre is not None, *numbers
    else:
        arguments = *_strided(c, pre), sums, parts, *_strided(a, b), bias, *_strided(other), *numbers
    made = [(plan.launch, arguments)]
    if plan.sum:
        made.append((plan.sum, (*_strided(c, pre), sums, parts, bias, *_strided(other), *numbers)))
    return made


def _strided(*arrays):
    return (None if x is None else kernel.Strided(x) for x in arrays)


def _by_kernel(x):
    """Whether our kernels multiply arrays like x, and not the vendor's library or the mathematics: as config.gemm says,
    "auto" by device and dtype."""
    if not kernel.runs(x) or isinstance(x, np.ndarray) or switches.gemm == "kernel":
        return kernel.runs(x)
    return switches.gemm == "auto" and kernel.limits(x).sm >= 80


def _on_device(a, b, out, alpha, beta, bias, residual, dtype):
    xp = array_module(a)
    if a.dtype != b.dtype:
        a, b = widen(a), widen(b)
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *a.shape[-2:-1], *b.shape[b.ndim - 1 :][: b.ndim > 1])
    out = xp.empty(shape, dtype) if out is None else out
    if residual is not None and not (_by_kernel(a) and residual.ndim == 2):
        copied(residual, out)
        residual, beta = None, 1.0
    c = out
    if a.ndim == 1:
        a, c = a[None], (c[None] if b.ndim == 1 else c[..., None, :])
    if b.ndim == 1:
        b, c = b[:, None], c[..., None]
    for views in _batches(c, a, b):
        if residual is not None:
            product_kernel(*views, alpha, 1.0, bias, epilogue=ADD, other=residual)
        elif _by_kernel(a):
            product_kernel(*views, alpha, beta, bias)
        else:
            _by_library(*views, alpha, beta, bias)
    return out


def _by_library(c, a, b, alpha, beta, bias):
    """c = alpha a b + bias + beta c, rounded once. A library may round a product before it adds it to halves, so that
    sums which begin with something are float32."""
    wide = c
    if (beta or bias is not None) and c.dtype != float32:
        wide = c.astype(float32) if beta else array_module(c).empty(c.shape, float32)
    if bias is not None:
        wide[...] = wide * beta + bias if beta else bias
        beta = 1.0
    blas.product(wide, a, b, alpha, beta)
    if wide is not c:
        c[...] = wide


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


def _check_linear(name, x, weight, bias, part="", size="out"):
    """The shape of what a linear layer makes of x's shape; ValueError where its arrays do not fit."""
    check(weight.ndim == 2, f"{name}: {part}weight must have shape ({size}, in), got {weight.shape}")
    out, width = weight.shape
    check(x[-1:] == (width,), f"{name}: x must have shape (..., in) = (..., {width}), got {x}")
    if bias is not None:
        check(bias.shape == (out,), f"{name}: {part}bias must have shape ({size},) = ({out},), got {bias.shape}")
    return (*x[:-1], out)


def _check_residual(name, residual, shape):
    if residual is not None:
        check(residual.shape == shape, f"{name}: residual must have shape {shape}, got {residual.shape}")
        return rows(residual)


class Linear(Function):
    def forward(ctx, x, weight, bias, residual):
        check_float("linear", x=x, weight=weight, bias=bias, residual=residual)
        shape = _check_linear("linear", x.shape, weight, bias)
        residual = _check_residual("linear", residual, shape)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        ctx.shape = x.shape
        return product(rows(x), weight.T, bias=bias, residual=residual, dtype=x.dtype).reshape(shape)

    def backward(ctx, dy):
        x, weight = ctx.saved_arrays
        dresidual = dy if ctx.needs_input_grad[3] else None
        dy = rows(dy)
        dx = product(dy, weight, dtype=dy.dtype).reshape(ctx.shape) if ctx.needs_input_grad[0] else None
        return dx, *linear_grads(ctx, 1, 2, dy, x if x is None else rows(x)), dresidual


class GeluMLP(Function):
    """Two linear layers with a GELU between: GELU is done by the first product's kernel, its slope by a product's of
    backward."""

    def forward(ctx, x, fc_weight, fc_bias, proj_weight, proj_bias, residual, approximate):
        arrays = {"x": x, "fc_weight": fc_weight, "fc_bias": fc_bias, "proj_weight": proj_weight}
        check_float("mlp", **arrays, proj_bias=proj_bias, residual=residual)
        hidden = _check_linear("mlp", x.shape, fc_weight, fc_bias, "fc_", "hidden")
        wanted, fits = f"(out, hidden) = (out, {hidden[-1]})", proj_weight.shape[1:] == hidden[-1:]
        check(fits, f"mlp: proj_weight must have shape {wanted}, got {proj_weight.shape}")
        shape = _check_linear("mlp", hidden, proj_weight, proj_bias, "proj_")
        residual = _check_residual("mlp", residual, shape)
        need_x, need_fc, need_fc_bias, need_proj, *_ = ctx.needs_input_grad
        inner = need_x or need_fc or need_fc_bias
        h, pre = product_gelu(rows(x), fc_weight.T, fc_bias, approximate, inner)
        y = product(h, proj_weight.T, bias=proj_bias, residual=residual, dtype=x.dtype)
        saved = x if need_fc else None, fc_weight if need_x else None, proj_weight if inner else None
        ctx.save_for_backward(*saved, pre, h if need_proj else None)
        ctx.shape, ctx.approximate = x.shape, approximate
        return y.reshape(shape)

    def backward(ctx, dy):
        x, fc_weight, proj_weight, pre, h = ctx.saved_arrays
        dresidual = dy if ctx.needs_input_grad[5] else None
        dy = rows(dy)
        dproj = linear_grads(ctx, 3, 4, dy, h)
        dx, dfc = None, (None, None)
        if any(ctx.needs_input_grad[:3]):
            dpre = product_slope(dy, proj_weight, pre, ctx.approximate)
            dfc = linear_grads(ctx, 1, 2, dpre, x if x is None else rows(x))
            if ctx.needs_input_grad[0]:
                dx = product(dpre, fc_weight, dtype=dpre.dtype).reshape(ctx.shape)
        return dx, *dfc, *dproj, dresidual
