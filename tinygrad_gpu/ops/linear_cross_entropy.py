"""The cross-entropy of a linear layer's outputs, with no (N, V) array of logits in memory.

z = x W^T + b, then z = s tanh(z / s) with a softcap s (arXiv:2408.00118, section 2). A token's loss, with its token
weight for u (0 where it does not count), and dz are those of cross_entropy.py; "mean" divides the sum of the losses by
that of u. Under a softcap dz is multiplied by 1 - (z / s)^2.
    dx = dz W,   dW = dz^T x,   db = sum(dz)

Rows go through in chunks that a memory budget bounds. For "mean" and "sum" a chunk's part of the gradients is taken
right there in the forward pass, while its logits exist, as in Liger-Kernel (arXiv:2410.10989, section 3.2), dW and db
summed in the dtype of the arithmetic; backward multiplies them by the upstream gradient over the sum of u. As long as
that factor is not known a float16 dx could overflow, or underflow: its rows are kept divided by their largest element.
"none" keeps no gradient, since every row has an upstream of its own: backward makes the logits again.
On kernels the logits of a chunk are float32 too, and dz, in their place, has x's dtype, as products take operands of
one; in float16 relative to the largest g, the gradient of a loss times u.
Shapes: x (N, C), W (V, C), b (V,), t and u (N,). The loss and the gradients of W and b have the dtype of the
arithmetic.
"""

import functools

from .. import kernel
from ..autograd import Function, Place
from ..device import array_module, check_range
from ..dtypes import accumulator, float16, float32
from . import cross_entropy
from .common import check, check_float, check_integer, pick, vector, widen
from .copy import contiguous
from .gemm import column_sum, product, product_into
from .gemm import rows as to_rows
from .reduce import top

# Chunks of this much stay in a CPU's outer cache; on a GPU they are large enough to fill it.
_BUDGET = {"numpy": 32 << 20, "cupy": 256 << 20}


def config(n, v, c, dtype, softcap, memory_budget, module):
    """(rows of a chunk, rows of W taken at once) for a budget in bytes, None for the default.

    A quarter of the budget goes to a block of W (in the dtype of the arithmetic) or of its gradient, the rest to the
    chunk: its logits, which become their own gradient (under a softcap the slope lies beside them), its rows of x, and
    two parts of its dx. By default a chunk is at most a quarter of the rows too, so that the logits of a small problem
    are not all there at once either.
    """
    size = accumulator(dtype).itemsize
    budget = _BUDGET[module] if memory_budget is None else memory_budget
    rows = int(budget * 3 // 4 // (size * ((2 if softcap else 1) * v + 3 * c + 16)))
    columns = int(budget // 4 // (size * max(c, 1)))
    if memory_budget is None:
        rows = min(rows, -(-n // 4))
    return max(min(rows, n), 1), max(min(columns, v), 1)


def fwd(losses, z, t, u, g, e, z_loss, softcap):
    """Writes the losses of rows of logits; gives dz, in place of z, for the gradient g of the losses times u, None for
    none."""
    xp = array_module(z)
    if softcap is not None:
        z /= softcap
        tanh = xp.tanh(z, out=z)
        z = tanh * softcap
    losses[...], p, *sums = cross_entropy.fwd(z, t, u, None, e, z_loss, out=z)
    if g is None:
        return None
    dz = cross_entropy.bwd(g, p, t, None, e, *sums, z_loss)
    if softcap is not None:
        tanh *= tanh
        dz *= xp.subtract(1, tanh, out=tanh)
        dz[g == 0] = 0  # where tanh is NaN too
    return dz


# ---- launch

_SOURCE = "linear_cross_entropy.cu"
# A chunk's product with dW reads and writes all of that in float32, which on an H200 takes as long as the arithmetic of
# 750 rows: 8 bytes at 4.2 TB/s against 2 operations a row at 790 TFLOP/s. Fewer rows waste time, many more only memory.
_KERNEL_BUDGET, _ENOUGH_ROWS = 384 << 20, 1024


def padded(v):
    """Columns of an array of logits: with a multiple of 8, rows of float32 or half types begin at 16 bytes each."""
    return -(-v // 8) * 8


def config_kernel(n, v, c, dtype, memory_budget):
    """Rows of a chunk for a budget in bytes, None for the default: its logits, its rows of x, in float16 its dx in
    float32. From 128 on a multiple of that, the tile of a product; by default about a quarter of all rows at most."""
    row = 4 * padded(v) + c * dtype.itemsize + (4 * c if dtype == float16 else 0)
    if memory_budget is None:
        rows = min(max(_KERNEL_BUDGET // row, _ENOUGH_ROWS), -(-n // 512) * 128)
    else:
        rows = int(memory_budget // row)
    if rows >= n:
        return max(n, 1)
    return rows // 128 * 128 or max(rows, 1)


@functools.cache
def config_loss(rows, v, dtype, index, is_capped):
    """As many threads as take a row in one tile, of 16 logits each, up to 1024: then one block is all that a
    multiprocessor holds, and the second pass finds much of its row, some hundred KB, in the L2 cache."""
    threads = 64 if v <= 1024 else 256 if v <= 4096 else 1024
    defines = {"THREADS": threads, "CAPPED": int(is_capped), "T": dtype, "I": index}
    return kernel.Launch(_SOURCE, "linear_cross_entropy", (rows,), (threads,), **defines)


def fwd_kernel(losses, z, t, u, g, e, z_loss, softcap, v, dtype):
    """As fwd, of the first v columns of z, which is padded; dz has `dtype`."""
    what = config_loss(len(z), v, dtype, t.dtype, softcap is not None)
    kernel.launch(what, z, losses, t, u, g, v, z.shape[1], e, z_loss, softcap or 1.0)
    return None if g is None else z.view(dtype)[:, -z.shape[1] :][:, :v]


@functools.cache
def config_rows(name, rows, dtype, vec):
    return kernel.Launch(_SOURCE, name, (rows,), (256,), T=dtype, VEC=vec)


def counted_kernel(x, u):
    """x, but zeros in the rows whose u is 0: infinite or NaN, they would reach dW even with a factor of 0."""
    (x,) = contiguous(x)
    y = array_module(x).empty(x.shape, x.dtype)
    if y.size:
        what = config_rows("linear_cross_entropy_x", len(x), x.dtype, vector(x.shape[1], x, y))
        kernel.launch(what, y, x, u, x.shape[1])
    return y


def divide_kernel(dx, largest, wide):
    """Writes the largest |element| of each row of `wide` (1 where that is 0), and to dx the rows divided by it."""
    what = config_rows("linear_cross_entropy_dx", len(dx), dx.dtype, vector(dx.shape[1], wide, dx))
    kernel.launch(what, dx, largest, wide, dx.shape[1])


@functools.cache
def config_db(v, dtype):
    return kernel.Launch(_SOURCE, "linear_cross_entropy_db_acc", (-(-v // 256),), (64, 8), T=dtype)


def db_kernel(db, z, dtype):
    """Adds the sums of the columns of dz, which fwd_kernel made of z."""
    kernel.launch(config_db(len(db), dtype), db, z.view(dtype), len(z), len(db), z.shape[1])


# ---- the walk over chunks


class _Problem:
    """The arrays and options of one loss, and the walk over its chunks."""

    def __init__(self, x, weight, bias, t, u, e, z_loss, softcap, memory_budget):
        self.x, self.weight, self.bias, self.t, self.u = x, weight, bias, t, u
        self.e, self.z_loss, self.softcap = e, z_loss, softcap
        self.xp, self.wide = array_module(x), accumulator(x.dtype)
        (n, c), v = x.shape, len(weight)
        if kernel.runs(x):
            rows, columns = config_kernel(n, v, c, x.dtype, memory_budget), v
        else:
            rows, columns = config(n, v, c, x.dtype, softcap, memory_budget, self.xp.__name__)
        self.chunks = [slice(i, i + rows) for i in range(0, n, rows)]
        self.blocks = [slice(i, i + columns) for i in range(0, v, columns)]

    def logits(self, rows):
        """x W^T + b for some rows of x."""
        xp, z = self.xp, self.xp.empty((len(rows), len(self.weight)), self.wide)
        for block in self.blocks:
            xp.matmul(rows, widen(self.weight[block]).T, out=z[:, block])
        if self.bias is not None:
            z += self.bias
        return z

    def walk(self, g, need_x, need_w, need_b):
        """The losses (N,), then the gradients, each None unless needed: of x, in its dtype; what its rows are still to
        be multiplied with (in float16, else 1); of W; of b; and what all of these are. g (N,) is the gradient of the
        losses times u."""
        xp, factor, wanted = self.xp, 1, need_x or need_w or need_b
        if wanted and self.x.dtype == float16 and kernel.runs(self.x):
            most = top(xp.abs(g), (0,))
            factor = xp.where(most > 0, most, 1)
            g = g / factor
        losses = xp.empty(len(self.x), self.wide)
        dx = xp.empty(self.x.shape, self.x.dtype) if need_x else None
        largest = xp.empty((len(self.x), 1), self.wide) if need_x and self.x.dtype == float16 else 1
        dw = (xp.empty if self.chunks else xp.zeros)(self.weight.shape, self.wide) if need_w else None
        db = xp.zeros(len(self.weight), self.wide) if need_b else None
        step = pick(self.x, self.step, self.step_kernel)
        for chunk in self.chunks:
            step(chunk, g[chunk] if wanted else None, losses[chunk], dx, largest, dw, db)
        return losses, dx, largest, dw, db, factor

    def step(self, chunk, g, losses, dx, largest, dw, db):
        """One chunk of the walk; its logits are gone when it returns, before those of the next are made."""
        xp, rows, t, u = self.xp, self.x[chunk].astype(self.wide), self.t[chunk], self.u[chunk]
        rows[u == 0] = 0  # were it infinite or NaN, it would reach dW even with a factor of 0
        dz = fwd(losses, self.logits(rows), t, u, g, self.e, self.z_loss, self.softcap)
        if dx is not None:
            part = 0
            for block in self.blocks:
                part += product(dz[:, block], self.weight[block])
            if dx.dtype == float16:
                most = top(xp.abs(part), (1,))
                largest[chunk] = xp.where(most == 0, 1, most)
                part /= largest[chunk]
            dx[chunk] = part
        if dw is not None:
            for block in self.blocks:
                product_into(Place(dw[block], chunk.start > 0), dz[:, block].T, rows)
        if db is not None:
            db += column_sum(dz)

    def step_kernel(self, chunk, g, losses, dx, largest, dw, db):
        x, t, u, v = self.x[chunk], self.t[chunk], self.u[chunk], len(self.weight)
        if dw is not None:
            x = counted_kernel(x, u)
        z = self.xp.empty((len(x), padded(v)), float32)
        product(x, self.weight.T, out=z[:, :v], bias=self.bias)
        dz = fwd_kernel(losses, z, t, u, g, self.e, self.z_loss, self.softcap, v, x.dtype)
        if dx is not None and dx.dtype == float16:
            divide_kernel(dx[chunk], largest[chunk], product(dz, self.weight))
        elif dx is not None:
            product(dz, self.weight, out=dx[chunk])
        if dw is not None:
            product(dz.T, x, out=dw, beta=float(chunk.start > 0))
        if db is not None:
            db_kernel(db, z, x.dtype)


class LinearCrossEntropy(Function):
    def forward(
        ctx,
        x,
        weight,
        targets,
        bias,
        token_weight,
        ignore_index,
        reduction,
        label_smoothing,
        z_loss,
        softcap,
        memory_budget,
    ):
        name = "linear_cross_entropy"
        check_float(name, x=x, weight=weight, bias=bias)
        check_integer(name, "targets", targets)
        check(weight.ndim == 2 and len(weight), f"{name}: weight must have shape (V, C), V > 0, got {weight.shape}")
        v, c = weight.shape
        check(x.ndim > 0 and x.shape[-1] == c, f"{name}: x must have shape (..., C) = (..., {c}), got {x.shape}")
        shape = x.shape[:-1]
        expected = f"x's shape without its last axis, {shape}"
        check(targets.shape == shape, f"{name}: targets must have {expected}, got {targets.shape}")
        wrong = None if bias is None or bias.shape == (v,) else bias.shape
        check(wrong is None, f"{name}: bias must have shape (V,) = ({v},), got {wrong}")
        wrong = None if token_weight is None or token_weight.shape == shape else token_weight.shape
        check(wrong is None, f"{name}: token_weight must have shape {shape} like targets, got {wrong}")
        check_range(name, "targets", targets, v, ignore_index)

        xp, t = array_module(x), targets.ravel()
        counts = t != ignore_index
        u = xp.where(counts, 1 if token_weight is None else token_weight.ravel(), 0).astype(accumulator(x.dtype))
        problem = _Problem(
            to_rows(x), weight, bias, xp.where(counts, t, 0), u, label_smoothing, z_loss, softcap, memory_budget
        )
        ctx.shape, ctx.reduction = x.shape, reduction
        if reduction == "none":
            ctx.problem = problem
            ctx.save_for_backward(x, weight, bias, targets, token_weight)
            return problem.walk(u, False, False, False)[0].reshape(targets.shape)
        losses, *made = problem.walk(u, *ctx._needs())
        divided = cross_entropy.divisor(u) if reduction == "mean" else 1
        ctx.save_for_backward(*made, divided)
        return losses.sum() / divided

    def backward(ctx, dy):
        if ctx.reduction == "none":
            _, dx, largest, dw, db, scale = ctx.problem.walk(dy.ravel() * ctx.problem.u, *ctx._needs())
        else:
            dx, largest, dw, db, factor, divided = ctx.saved_arrays
            scale = factor * dy / divided
        if dx is not None:
            factor = largest * scale
            factor = factor.reshape(*ctx.shape[:-1], 1) if dx.dtype == float16 else factor
            dx = ctx._scaled(0, dx.reshape(ctx.shape), factor)
        return dx, ctx._scaled(1, dw, scale), None, ctx._scaled(3, db, scale), None

    def _needs(ctx):
        x, weight, _, bias, _ = ctx.needs_input_grad
        return x, weight, bias

    def _scaled(ctx, i, gradient, factor):
        """gradient * factor for input i: where that is summed, if nothing is there yet, else in another array, as
        another backward may ask for what the forward pass made."""
        if gradient is None:
            return None
        xp, place = array_module(gradient), ctx.grad_place(i)
        free = place is not None and not place.filled
        out = place.array if free else gradient if ctx.reduction == "none" else xp.empty_like(gradient)
        xp.multiply(gradient, factor, out=out, casting="unsafe")
        if free:
            place.filled = True  # at once: another input may have the same place
        return place if free else out
