"""Cross-entropy of class scores, with class weights and label smoothing (arXiv:1512.00567, section 7), as in PyTorch,
and with z-loss (arXiv:2204.02311, section 5).

For a row z of V scores with target t, row weight u, class weights w (1 each by default) and smoothing e:
    loss = u (sum_c q_c (lse - z_c) + z_loss lse^2),   lse = log(sum(exp(z))),   q_c = w_c (e / V + (1 - e) [c = t])
    dz_c = g u (p_c (sum(q) + 2 z_loss lse) - q_c),    p = softmax(z),  g = the gradient of this row's loss
cross_entropy has u = 1, or 0 where the target is ignore_index, and no z-loss. "mean" divides the sum by that of w_t
over the rows that count; where it is 0 (no row counts, say) the mean is 0, and every gradient exactly 0 (PyTorch gives
NaN). Scores are taken relative to the largest of their row, which differences of large ones need: lse itself would be
rounded. Shapes: z (N, V), t (N,), w (V,), u and loss (N,), all but t in the dtype of the arithmetic.
"""

import math

from ..autograd import Function
from ..device import array_module, check_range
from . import reduce
from .common import check, check_float, check_integer, narrow, widen

REDUCTIONS = ("mean", "sum", "none")


def divisor(weights):
    """The sum of the rows' weights; inf where it is 0, so that a mean and its gradients are 0."""
    total = weights.sum()
    return array_module(total).where(total == 0, total.dtype.type(math.inf), total)


def fwd(z, t, u, w, e, z_loss=0.0, out=None):
    """loss; p = exp(z - top), which goes into `out` (z itself will do); top = max(z); total = sum(p).

    t holds a class for every row. A row with u = 0 has loss 0, even where its scores are infinite or NaN.
    """
    xp, v = array_module(z), z.shape[1]
    top = reduce.top(z, (1,))[:, 0]
    z = xp.subtract(z, top[:, None], out=out)
    target = z[xp.arange(len(z)), t]
    if e:
        spread = z.sum(axis=1) if w is None else z @ w
    p = xp.exp(z, out=z)
    total = p.sum(axis=1)
    log = xp.log(total)
    loss = (1 - e) * (log - target)
    if w is not None:
        loss *= w[t]
    if e:
        loss += e / v * ((v if w is None else w.sum()) * log - spread)
    if z_loss:
        loss += z_loss * (top + log) ** 2
    return xp.where(u == 0, 0, u * loss), p, top, total


def bwd(g, p, t, w, e, top, total, z_loss=0.0):
    """dz, in place of p = exp(z - top); g (N,) is the gradient of the loss times u. Where it is 0 so is dz, exactly."""
    xp, v = array_module(p), p.shape[1]
    smooth, sharp = g * (e / v), g * (1 - e)
    if w is not None:
        sharp = sharp * w[t]
    mass = sharp + smooth * (v if w is None else w.sum())
    if z_loss:
        mass += 2 * z_loss * g * (top + xp.log(total))
    p *= (mass / total)[:, None]
    if e:
        p -= smooth[:, None] if w is None else smooth[:, None] * w
    p[xp.arange(len(p)), t] -= sharp
    p[g == 0] = 0
    return p


class CrossEntropy(Function):
    def forward(ctx, logits, targets, w, ignore_index, reduction, label_smoothing):
        name = "cross_entropy"
        check_float(name, logits=logits, weight=w)
        check_integer(name, "targets", targets)
        check(logits.ndim > 0, f"{name}: logits must have shape (V,), (N, V) or (N, V, ...), got ()")
        axis = min(1, logits.ndim - 1)
        shape, v = logits.shape[:axis] + logits.shape[axis + 1 :], logits.shape[axis]
        check(v > 0, f"{name}: logits must have at least one class, got shape {logits.shape}")
        expected = f"shape {shape}, that of logits without the class axis"
        check(targets.shape == shape, f"{name}: targets must have {expected}, got {targets.shape}")
        wrong = None if w is None or w.shape == (v,) else w.shape
        check(wrong is None, f"{name}: weight must have shape (V,) = ({v},), got {wrong}")
        check_range(name, "targets", targets, v, ignore_index)

        xp, z, t = array_module(logits), ctx._rows(logits, axis), targets.ravel()
        u = (t != ignore_index).astype(z.dtype)
        t, w = xp.where(u == 0, 0, t), None if w is None else widen(w)
        loss, _, top, total = fwd(z, t, u, w, label_smoothing)
        divided = divisor(u if w is None else u * w[t]) if reduction == "mean" else 1
        ctx.axis, ctx.e, ctx.reduction, ctx.divided = axis, label_smoothing, reduction, divided
        ctx.save_for_backward(logits, t, u, w, top, total)
        return narrow(loss.reshape(shape) if reduction == "none" else loss.sum() / divided, logits.dtype)

    def backward(ctx, dy):
        logits, t, u, w, top, total = ctx.saved_arrays
        xp = array_module(dy)
        g = widen(dy).ravel() if ctx.reduction == "none" else widen(dy) / ctx.divided
        z = ctx._rows(logits, ctx.axis) - top[:, None]
        dz = bwd(g * u, xp.exp(z, out=z), t, w, ctx.e, top, total)
        moved = xp.moveaxis(logits, ctx.axis, -1)
        return xp.moveaxis(dz.reshape(moved.shape), -1, ctx.axis), None, None

    def _rows(ctx, logits, axis):
        """logits as (N, V), in the dtype of the arithmetic."""
        return widen(array_module(logits).moveaxis(logits, axis, -1).reshape(-1, logits.shape[axis]))
