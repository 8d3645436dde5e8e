"""Embedding: rows of a table by number, and the deterministic scatter-add under its gradient.

y[...] = weight[ids[...]];  dweight[v] = sum of dy where ids = v.   ids (...) integer, weight (V, C), y (..., C)
"""

import functools

from .. import kernel
from ..autograd import Function
from ..device import array_module, check_range
from ..dtypes import float32
from .common import check, check_float, check_integer, narrow, pick, vector, widen
from .copy import contiguous


def fwd(ids, weight):
    return weight[ids]


def segment_sum(rows, ids, n):
    """out (n, C) with out[v] the sum of rows[i] (R, C) where ids[i] = v: no atomics, so the same bits every time.

    The result has the dtype of rows; half types are summed in float32.
    """
    return pick(rows, _pairwise, _segments)(rows, ids, n)


def _pairwise(rows, ids, n):
    """Rows are sorted by id (a stable sort). Then, in log2 R passes, those of odd rank among the rows of an id are
    added to the one before them, until each id has one row: a pairwise sum, whose rounding error is O(log R)."""
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


# ---- launch


# Threads along a row, each for VEC columns at a time; sorted rows that a thread of the backward walks down (16,384 rows
# of 768 numbers make 200,000 threads); rows of partial sums that the second stage adds up side by side.
_SIZES = {"COLUMNS": 32, "ROWS": 16, "LANES": 8}


def _launch(name, blocks, lanes, vec, dtype, ids):
    return kernel.Launch("embedding.cu", name, blocks, (_SIZES["COLUMNS"], lanes), VEC=vec, T=dtype, ID=ids, **_SIZES)


@functools.cache
def fwd_config(rows, vec, dtype, ids):
    """The forward kernel's Launch."""
    return _launch("embedding_fwd", (-(-rows // 8),), 8, vec, dtype, ids)


@functools.cache
def bwd_config(rows, width, vec, dtype, ids):
    """The Launches of the backward's two stages, and how many parts of the sorted rows pass from the first to the
    second."""
    parts, tiles = -(-rows // _SIZES["ROWS"]), -(-width // (_SIZES["COLUMNS"] * vec))
    first = _launch("embedding_bwd_acc", (-(-parts // 4), tiles), 4, vec, dtype, ids)
    return first, _launch("embedding_bwd_rest_acc", (parts, tiles), _SIZES["LANES"], vec, dtype, ids), parts


def fwd_kernel(ids, weight):
    ids, weight = contiguous(ids, weight)
    rows, width = len(weight), weight.shape[1]
    y = array_module(ids).empty((*ids.shape, width), weight.dtype)
    what = fwd_config(ids.size, vector(width, y, weight), weight.dtype, ids.dtype)
    kernel.launch(what, y, weight, ids, ids.size, width, rows)
    return y


def scatter_add(out, rows, ids):
    """out[v] += the sum of rows[i] where ids[i] = v: out (V, C) float32, rows (R, C), ids (R,); the sums of half rows
    are float32."""
    rows, ids = contiguous(rows, ids)
    xp, width = array_module(out), out.shape[1]
    vec = vector(width, rows, out)
    first, rest, parts = bwd_config(len(ids), width, vec, rows.dtype, ids.dtype)
    partial, head = xp.empty((parts, width), float32), xp.empty(parts, ids.dtype)
    order = xp.argsort(ids, kind="stable")
    kernel.launch(first, out, partial, head, rows, ids, order, len(ids), width, len(out))
    kernel.launch(rest, out, partial, head, parts, width, len(out))


def _segments(rows, ids, n):
    out = array_module(rows).zeros((n, rows.shape[1]), float32)
    scatter_add(out, rows, ids)
    return narrow(out, rows.dtype)


# ---- rule


class Embedding(Function):
    def forward(ctx, ids, weight):
        check_integer("embedding", "ids", ids)
        check_float("embedding", weight=weight)
        check(weight.ndim == 2, f"embedding: weight must have shape (V, C), got {weight.shape}")
        check_range("embedding", "ids", ids, len(weight))
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        return pick(weight, fwd, fwd_kernel)(ids, weight)

    def backward(ctx, dy):
        (ids,) = ctx.saved_arrays
        vocabulary, width = ctx.shape
        rows, ids = dy.reshape(ids.size, width), ids.ravel()
        place = ctx.grad_place(1) if kernel.runs(dy) else None
        if place is None or place.array.dtype != float32 or not place.array.flags.c_contiguous:
            return None, segment_sum(widen(rows), ids, vocabulary)
        if not place.filled:
            place.array.fill(0)
            place.filled = True
        scatter_add(place.array, rows, ids)  # which reads and writes the rows of these ids alone
        return None, place
