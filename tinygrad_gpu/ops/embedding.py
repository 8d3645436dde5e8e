"""Embedding: rows of a table by number, and the deterministic scatter-add under its gradient.

y[...] = weight[ids[...]];  dweight[v] = sum of dy where ids = v.   ids (...) integer, weight (V, C), y (..., C)
"""

from ..autograd import Function
from ..device import array_module, check_range
from .common import check, check_float, check_integer, narrow, widen


def segment_sum(rows, ids, n):
    """out (n, C) with out[v] the sum of rows[i] (R, C) where ids[i] = v: no atomics, so the same bits every time.

    Rows are sorted by id (a stable sort), then neighbours of one id are added pairwise in log2 R passes: the k-th pass
    adds row i + 2^k to row i where i's rank within its id is a multiple of 2^(k+1). The rounding error is that of a
    pairwise sum, O(log R). The result has the dtype of rows; half types are summed in float32.
    """
    xp, wide = array_module(rows), widen(rows)
    out = xp.zeros((n, rows.shape[1]), wide.dtype)
    if rows.size:
        order = xp.argsort(ids, kind="stable")
        ids, sums = ids[order], wide[order]
        first = xp.searchsorted(ids, ids)  # where each row's id starts
        rank = xp.arange(len(ids)) - first
        count = int(rank.max()) + 1
        starts = xp.flatnonzero(rank == 0)
        step, alive = 1, xp.arange(len(ids))  # rows that still take part, all with rank a multiple of step
        while step < count:
            alive = alive[rank[alive] % (2 * step) == 0]
            ends = alive + step
            inside = ends < len(ids)
            left = alive[inside]
            left = left[ids[left + step] == ids[left]]
            sums[left] += sums[left + step]
            step *= 2
        out[ids[starts]] = sums[starts]
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
        return None, segment_sum(widen(dy.reshape(-1, width)), ids.ravel(), vocabulary)
