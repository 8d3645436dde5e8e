"""Cross-entropy of class scores, with class weights and label smoothing (arXiv:1512.00567, section 7), as in PyTorch.

For a row z of V scores, shifted by its maximum, with target t, class weights w (1 each by default) and smoothing e:
    loss = sum_c q_c (l - z_c),    l = log(sum(exp(z))),    q_c = w_c (e / V + (1 - e) [c = t])
    dz_c = g (p_c sum(q) - q_c),   p = exp(z - l),          g = the gradient of this row's loss
"mean" divides the sum by that of w_t over the rows that count; a row whose target is ignore_index does not. Where no row
counts the mean is 0, and every gradient exactly 0 (PyTorch gives NaN).
Shapes: z (N, V), t (N,), w (V,), loss (N,). Rows are treated in the dtype of the arithmetic.
"""

from ..autograd import Function
from ..device import array_module, check_range
from .common import check, check_float, check_integer, narrow, widen
from .reduce import top, total

REDUCTIONS = ("mean", "sum", "none")


def check_options(name, reduction, label_smoothing):
    check(reduction in REDUCTIONS, f"{name}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    check(0 <= label_smoothing <= 1, f"{name}: label_smoothing must be in [0, 1], got {label_smoothing}")


def nonzero(total):
    """A divisor: `total`, or 1 where no row counted."""
    return array_module(total).where(total == 0, total.dtype.type(1), total)


def maxima(z):
    """The maximum of each row, (N, 1); 0 where it is infinite, so that it can be subtracted."""
    xp, m = array_module(z), top(z, (1,))
    return xp.where(xp.isfinite(m), m, 0)


def fwd(z, t, counts, w, e):
    """loss (0 where a row does not count), l and the row's weight, each (N,), of shifted z.

    t holds a class for every row, `counts` says which rows count.
    """
    xp, v = array_module(z), z.shape[1]
    log = xp.log(total(xp.exp(z), (1,), keepdims=False))
    weight = counts.astype(z.dtype) if w is None else xp.where(counts, w[t], 0)
    loss = (1 - e) * weight * (log - z[xp.arange(len(z)), t])
    if e:
        spread = v * log - total(z, (1,), keepdims=False) if w is None else w.sum() * log - z @ w
        loss += e / v * spread
    return xp.where(counts, loss, 0), log, weight


def bwd(g, z, t, counts, w, e, log, weight, extra=0):
    """dz of shifted z, given g (N,); `extra` (N,) is what a term of the loss that depends on l alone adds to p's factor."""
    xp, v = array_module(z), z.shape[1]
    dz = z - log[:, None]
    xp.exp(dz, out=dz)
    hit = (1 - e) * weight
    dz *= (hit + (e if w is None else e / v * w.sum()) + extra)[:, None]
    dz[xp.arange(len(z)), t] -= hit
    if e:
        dz -= e / v if w is None else e / v * w
    dz *= g[:, None]
    dz[~counts] = 0  # also where a row that does not count holds inf or NaN
    return dz


class CrossEntropy(Function):
    def forward(ctx, logits, targets, w, ignore_index, reduction, label_smoothing):
        check_float("cross_entropy", logits=logits, weight=w)
        check_integer("cross_entropy", "targets", targets)
        check_options("cross_entropy", reduction, label_smoothing)
        check(logits.ndim > 0, "cross_entropy: logits must have shape (V,), (N, V) or (N, V, ...), got ()")
        axis = min(1, logits.ndim - 1)
        shape, v = logits.shape[:axis] + logits.shape[axis + 1 :], logits.shape[axis]
        check(targets.shape == shape, f"cross_entropy: targets must have shape {shape}, that of logits without the class axis, got {targets.shape}")  # fmt: skip
        check(
            w is None or w.shape == (v,),
            f"cross_entropy: weight must have shape (V,) = ({v},), got {getattr(w, 'shape', None)}",
        )
        check_range("cross_entropy", "targets", targets, v, ignore_index)

        ctx.axis, ctx.shape, ctx.e, ctx.reduction = axis, (*shape, v), label_smoothing, reduction
        z, t, w = ctx._rows(logits), targets.ravel(), None if w is None else widen(w)
        counts = t != ignore_index
        t = array_module(t).where(counts, t, 0)
        shift = maxima(z)
        loss, log, weight = fwd(z - shift, t, counts, w, label_smoothing)
        ctx.total = nonzero(weight.sum()) if reduction == "mean" else None
        ctx.save_for_backward(logits, t, counts, w, shift, log, weight)
        if reduction == "none":
            return narrow(loss, logits.dtype).reshape(shape)
        loss = loss.sum()
        return narrow(loss / ctx.total if reduction == "mean" else loss, logits.dtype)

    def _rows(ctx, logits):
        """The logits as (N, V) in the arithmetic dtype."""
        return widen(array_module(logits).moveaxis(logits, ctx.axis, -1).reshape(-1, ctx.shape[-1]))

    def backward(ctx, dy):
        logits, t, counts, w, shift, log, weight = ctx.saved_arrays
        xp = array_module(dy)
        g = widen(dy).reshape(-1) if ctx.reduction == "none" else xp.broadcast_to(widen(dy), t.shape)
        g = g / ctx.total if ctx.reduction == "mean" else g
        dz = bwd(g, ctx._rows(logits) - shift, t, counts, w, ctx.e, log, weight)
        return narrow(xp.moveaxis(dz.reshape(ctx.shape), -1, ctx.axis), dy.dtype), None, None
