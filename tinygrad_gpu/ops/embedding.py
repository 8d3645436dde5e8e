"""Embedding: rows of a table by number, and the deterministic scatter-add under its gradient.

y[...] = weight[ids[...]];  dweight[v] = sum of dy where ids = v.   ids (...) integer, weight (V, C), y (..., C)
"""

from ..autograd import Function
from ..device import array_module, check_range
from .common import check, check_float, check_integer, narrow, widen


def segment_sum(rows, ids, n):
    """out (n, C) with out[v] the sum of rows[i] (R, C) where ids[i] = v: no atomics, so the same bits every time.

    Rows are sorted by id (a stable sort). Then, in log2 R passes, those of odd rank among the rows of an id are added
    to the one before them, until each id has one row: a pairwise sum, whose rounding error is O(log R). The result has
    the dtype of rows; half types are summed in float32.
    """
    xp, sums = array_module(rows), widen(rows)
    out = xp.zeros((n, rows.shape[1]), sums.dtype)
    order = xp.argsort(ids, kind="stable")
    ids, sums = ids[order], sums[order]
    rank = xp.arange(len(ids)) - xp.searchsorted(ids, ids)
    while (odd := xp.flatnonzero(rank % 2)).size:
        even = xp.flatnonzero(rank % 2 == 0)
        kept = sums[even]
        kept[xp.searchsorted(even, odd) - 1] += sums[odd]
        sums, ids, rank = kept, ids[even], rank[even] // 2
    out[ids] = sums
    return narrow(out, rows.dtype)


class Embedding(Function):
    def forward(ctx, ids, weight):
        check_integer("embedding", "ids", ids)
        check_float("embedding", weight=weight)
        check(weight.ndim == 2, f"embedding: weight must have shape (V, C), got {weight.shape}")
        check_range("embedding", "ids", ids, len(weight))
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        return weight[ids]

    def backward(ctx, dy):
        (ids,) = ctx.saved_arrays
        vocabulary, width = ctx.shape
        return None, segment_sum(widen(dy.reshape(ids.size, width)), ids.ravel(), vocabulary)
