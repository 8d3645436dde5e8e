"""The cross-entropy of a linear layer's outputs, with no (N, V) array of logits in memory.

z = x W^T + b, then z = s tanh(z / s) with a softcap s (arXiv:2408.00118, section 2). A token's loss is
    u (cross_entropy(z, t) + z_loss lse(z)^2)         (cross_entropy with smoothing as in that file; z_loss: arXiv:2204.02311, section 5)
with u its token weight; "mean" divides the sum by that of u over the tokens that count. With dz as there, and under a softcap
times 1 - (z / s)^2:
    dx = dz W,   dW = dz^T x,   db = sum(dz)

Rows go through in chunks that a memory budget bounds. For "mean" and "sum" a chunk's part of the gradients is taken right
there in the forward pass, while its logits exist, as in Liger-Kernel (arXiv:2410.10989, section 3.2): unscaled, so that
float16 does not underflow, dW and db summed in the dtype of the arithmetic; backward multiplies them by the upstream
gradient over the sum of u. "none" keeps no gradient, since every row has an upstream of its own: backward makes the logits again.
Shapes: x (N, C), W (V, C), b (V,), t and u (N,). The loss and the gradients of W and b have the dtype of the arithmetic.
"""

from ..autograd import Function, Place
from ..device import array_module, check_range
from ..dtypes import accumulator
from . import cross_entropy
from .common import check, check_float, check_integer, narrow, widen
from .gemm import column_sum, product_into

# Chunks of this much stay in a CPU's outer cache; on a GPU they are large enough to fill it.
_BUDGET = {"numpy": 32 << 20, "cupy": 256 << 20}


def config(n, v, c, dtype, memory_budget, module):
    """(rows of a chunk, rows of W taken at once) for a budget in bytes, None for the default.

    A quarter of the budget goes to a block of W (in the dtype of the arithmetic) or of its gradient, the rest to the
    chunk: its logits twice (themselves, and their exponentials or gradients) and its rows of x. By default a chunk is
    at most a quarter of the rows too, so that the logits of a small problem are not all there at once either.
    """
    size = accumulator(dtype).itemsize
    budget = _BUDGET[module] if memory_budget is None else memory_budget
    rows = int(budget * 3 // 4 // (size * (2 * v + 2 * c + 8)))
    columns = int(budget // 4 // (size * max(c, 1)))
    if memory_budget is None:
        rows = min(rows, -(-n // 4))
    return max(min(rows, n), 1), max(min(columns, v), 1)


class _Problem:
    """The arrays and options of one loss, and what is done with one chunk (a slice) of its rows."""

    def __init__(self, x, weight, bias, t, counts, u, e, z_loss, softcap, columns):
        self.x, self.weight, self.bias, self.t, self.counts, self.u = x, weight, bias, t, counts, u
        self.e, self.z_loss, self.softcap = e, z_loss, softcap
        self.xp = array_module(x)
        self.blocks = [slice(i, i + columns) for i in range(0, len(weight), columns)]

    def logits(self, chunk):
        rows = widen(self.x[chunk])
        z = self.xp.empty((len(rows), len(self.weight)), rows.dtype)
        for block in self.blocks:
            self.xp.matmul(rows, widen(self.weight[block]).T, out=z[:, block])
        if self.bias is not None:
            z += self.bias
        if self.softcap is not None:
            z /= self.softcap
            self.xp.tanh(z, out=z)
            z *= self.softcap
        return z

    def losses(self, chunk, z):
        """The chunk's losses, and what `gradients` needs again; shifts z by its maxima."""
        shift = cross_entropy.maxima(z)
        z -= shift
        loss, log, weight = cross_entropy.fwd(z, self.t[chunk], self.counts[chunk], None, self.e)
        if self.z_loss:
            lse = log + shift[:, 0]
            loss += self.xp.where(self.counts[chunk], self.z_loss * lse * lse, 0)
        if self.u is not None:
            loss *= self.u[chunk]
        return loss, (shift, log, weight)

    def gradients(self, chunk, z, g, statistics, dx, dw, db):
        """Put the chunk's rows into dx and add to the Places dw and db (each None where not needed), given the upstream
        gradient g (rows,), and the z and statistics that `losses` left. Overwrites z."""
        shift, log, weight = statistics
        g = g if self.u is None else g * self.u[chunk]
        extra = 2 * self.z_loss * (log + shift[:, 0])
        dz = cross_entropy.bwd(g, z, self.t[chunk], self.counts[chunk], None, self.e, log, weight, extra)
        if self.softcap is not None:
            z += shift
            z /= self.softcap
            z *= z
            dz *= self.xp.subtract(1, z, out=z)
            dz[~self.counts[chunk]] = 0  # where z is NaN
        if dx is not None:
            part = None
            for block in self.blocks:
                product = dz[:, block] @ widen(self.weight[block])
                part = product if part is None else part.__iadd__(product)
            dx[chunk] = part
        if dw is not None:
            rows = widen(self.x[chunk])
            for block in self.blocks:
                product_into(Place(dw.array[block], dw.filled), dz[:, block].T, rows)
            dw.filled = True
        if db is not None:
            db.add(column_sum(dz))


class LinearCrossEntropy(Function):
    def forward(ctx, x, weight, targets, bias, token_weight, ignore_index, reduction, label_smoothing, z_loss, softcap, memory_budget):  # fmt: skip
        name = "linear_cross_entropy"
        check_float(name, x=x, weight=weight, bias=bias)
        check_integer(name, "targets", targets)
        cross_entropy.check_options(name, reduction, label_smoothing)
        check(weight.ndim == 2, f"{name}: weight must have shape (V, C), got {weight.shape}")
        v, c = weight.shape
        check(x.ndim > 0 and x.shape[-1] == c, f"{name}: x must have shape (..., C) = (..., {c}), got {x.shape}")
        check(targets.shape == x.shape[:-1], f"{name}: targets must have x's shape without its last axis, {x.shape[:-1]}, got {targets.shape}")  # fmt: skip
        check(
            bias is None or bias.shape == (v,),
            f"{name}: bias must have shape (V,) = ({v},), got {getattr(bias, 'shape', None)}",
        )
        check(softcap is None or softcap > 0, f"{name}: softcap must be positive, got {softcap}")
        check(
            memory_budget is None or memory_budget > 0, f"{name}: memory_budget must be positive, got {memory_budget}"
        )
        u = None
        if token_weight is not None:
            check(token_weight.shape == targets.shape, f"{name}: token_weight must have shape {targets.shape} like targets, got {token_weight.shape}")  # fmt: skip
            check(not ctx.needs_input_grad[4], f"{name}: token_weight is a constant and must not require a gradient")
            u = token_weight.ravel().astype(accumulator(x.dtype), copy=False)
        check_range(name, "targets", targets, v, ignore_index)

        xp, wide, n = array_module(x), accumulator(x.dtype), targets.size
        rows_of_x, t = x.reshape(n, c), targets.ravel()
        counts = t != ignore_index
        rows, columns = config(n, v, c, x.dtype, memory_budget, xp.__name__)
        problem = _Problem(
            rows_of_x, weight, bias, xp.where(counts, t, 0), counts, u, label_smoothing, z_loss, softcap, columns
        )
        ctx.chunks = [slice(i, i + rows) for i in range(0, n, rows)]
        ctx.shape, ctx.reduction = x.shape, reduction

        now = reduction != "none" and n > 0
        dx, dw, db = ctx._gradients(problem) if now else (None, None, None)
        loss = xp.empty(n, wide)
        for chunk in ctx.chunks:
            z = problem.logits(chunk)
            loss[chunk], statistics = problem.losses(chunk, z)
            if dx is not None or dw is not None or db is not None:
                problem.gradients(chunk, z, xp.ones(len(z), wide), statistics, dx, dw, db)
        if not now:
            ctx.problem = problem
            ctx.save_for_backward(x, weight, bias, targets, token_weight)
            return loss.reshape(targets.shape) if reduction == "none" else xp.zeros((), wide)
        total = counts.sum(dtype=wide) if u is None else xp.where(counts, u, 0).sum()
        ctx.save_for_backward(dx, dw and dw.array, db and db.array, cross_entropy.nonzero(total))
        return loss.sum() / (cross_entropy.nonzero(total) if reduction == "mean" else 1)

    def _gradients(ctx, problem):
        """dx, and Places for dweight and dbias, each None unless needed."""
        xp, wide = problem.xp, accumulator(problem.x.dtype)
        need_x, need_w, _, need_b, _ = ctx.needs_input_grad
        dx = xp.empty(problem.x.shape, problem.x.dtype) if need_x else None
        dw = Place(xp.empty(problem.weight.shape, wide), False) if need_w else None
        db = Place(xp.empty(len(problem.weight), wide), False) if need_b else None
        return dx, dw, db

    def backward(ctx, dy):
        xp = array_module(dy)
        if ctx.reduction == "none" or not ctx.chunks:
            problem, g = ctx.problem, dy.ravel()
            dx, dw, db = ctx._gradients(problem)
            for chunk in ctx.chunks:
                z = problem.logits(chunk)
                _, statistics = problem.losses(chunk, z)
                problem.gradients(chunk, z, g[chunk], statistics, dx, dw, db)
            for place in (dw, db):
                if place is not None and not place.filled:
                    place.array[...] = 0
            dx = None if dx is None else dx.reshape(ctx.shape)
            return dx, dw and dw.array, None, db and db.array, None
        dx, dw, db, total = ctx.saved_arrays
        scale = dy / total if ctx.reduction == "mean" else dy
        if dx is not None:
            dx = narrow(xp.multiply(dx, scale), dx.dtype).reshape(ctx.shape)
        place = ctx.grad_place(1) if dw is not None else None
        if place is not None and not place.filled:
            xp.multiply(dw, scale, out=place.array, casting="unsafe")
        elif dw is not None:
            place = dw * scale
        return dx, place, None, None if db is None else db * scale, None
