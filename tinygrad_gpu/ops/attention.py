"""Scaled dot-product attention (arXiv:1706.03762, section 3.2.1), with grouped queries (arXiv:2305.13245).

S = scale Q K^T where a key is seen, else -inf;  P = softmax(S);  O = (P m) V,  m the dropout multiplier (1 without)
dV = (P m)^T dO;   dP = (dO V^T) m;   dS = P (dP - D),  D = rowsum(dO O);   dQ = scale dS K;   dK = scale dS^T Q
Backward makes P again from the saved log-sum-exp L of each row, P = exp(S - L), as in FlashAttention-2
(arXiv:2307.08691, algorithm 2): nothing of the size of S is kept. A query that sees no key has output 0 and gradient 0
(L = inf there).

Shapes: Q, O (B, H, Tq, D); K, V (B, Hkv, Tk, D), query head h reading key head h // (H / Hkv); L (B, H, Tq) in
float32, in float64 for float64. Causal: query i sees the keys j <= i + Tk - Tq; in a window w, j > i + Tk - Tq - w too.

The work goes block by block: some heads and, within them, spans of queries with the keys that one of these sees.
Scores lie transposed, (b, Hkv, keys, G queries) with the queries of a group of G heads in a row: NumPy reduces over
the keys two to three times as fast that way (35 against 90 us for 4 heads of 128 by 128).
"""

import math
from typing import Any, NamedTuple

from .. import kernel, random
from ..autograd import Function
from ..device import array_module
from ..dtypes import accumulator
from . import dropout, softmax
from .common import check, check_float, narrow, pick, widen
from .copy import contiguous
from .elementwise import masked
from .gemm import product, rows
from .reduce import top

# Bytes of scores made at once: they stay in a CPU core's second-level cache; a GPU wants large batches.
_BLOCK = {"numpy": 1 << 19, "cupy": 1 << 29}
# Queries of a span under a causal mask, at most: shorter ones skip more of the keys that no query sees.
_SPAN = {"numpy": 128, "cupy": 1 << 29}


class Span(NamedTuple):
    """Some queries, the keys from the first to the last that one of them sees, and which of these are seen by whom."""

    queries: slice
    keys: slice
    masked: slice = slice(0, 0)  # the keys (counted from the span's first) that not every query sees
    ceiling: Any = None  # (masked keys, 1, queries): +inf where the query sees the key, else -inf


def config(batch, heads, group, tq, tk, size, causal, window, module):
    """(blocks of heads, spans of queries), for scores of `size` bytes: those of a block and span stay within _BLOCK,
    from one query of one key head up. Blocks are pairs of slices, of batch and key heads; spans lack their ceiling."""
    budget, row = _BLOCK[module], max(group * tk * size, 1)
    step = min(max(budget // row, 1), _SPAN[module] if causal else tq) or 1
    fit = max(budget // (row * min(step, max(tq, 1))), 1)
    b, h = (max(fit // max(heads, 1), 1), max(heads, 1)) if fit >= heads else (1, fit)
    blocks = [
        (slice(i, min(i + b, batch)), slice(j, min(j + h, heads)))
        for i in range(0, batch, b)
        for j in range(0, heads, h)
    ]
    spans = []
    for i in range(0, tq, step):
        end = min(i + step, tq)
        stop = max(end + tk - tq, 0) if causal else tk
        start = min(max(i + tk - tq - window + 1, 0), stop) if window is not None else 0
        spans.append(Span(slice(i, end), slice(start, stop)))
    return blocks, spans


def masked_by(xp, span, offset, window, dtype):
    """The span of a causal mask with its ceiling, where it needs one; query i stands at key i + offset."""
    queries, keys = span.queries, span.keys
    first = keys.start if window is not None else min(max(queries.start + offset + 1, keys.start), keys.stop)
    if first == keys.stop:
        return span
    i, j = xp.arange(queries.start + offset, queries.stop + offset), xp.arange(first, keys.stop)[:, None, None]
    seen = j <= i
    if window is not None:
        seen &= j > i - window
    ceiling = xp.where(seen, dtype.type(math.inf), dtype.type(-math.inf))
    return span._replace(masked=slice(first - keys.start, keys.stop - keys.start), ceiling=ceiling)


class _Problem:
    """Shapes and options of one call, and the steps that forward and backward share."""

    def __init__(self, q, k, causal, scale, window, dropout_p, drawn):
        self.xp, self.dtype = array_module(q), accumulator(q.dtype)
        batch, self.heads, self.tq, width = q.shape
        key_heads, self.tk = k.shape[1:3]
        self.group = self.heads // max(key_heads, 1)
        self.scale = 1 / math.sqrt(max(width, 1)) if scale is None else scale
        self.dropout_p, self.drawn = dropout_p, drawn
        self.boost = dropout.scale(dropout_p)
        self.offset, self.window = (self.tk - self.tq if causal else None), window
        sizes = batch, key_heads, self.group, self.tq, self.tk, self.dtype.itemsize
        if kernel.runs(q):  # these know the mask: all queries of a block at once
            self.blocks, self.spans = config(*sizes, False, None, "cupy")
            return
        self.blocks, self.spans = config(*sizes, causal, window, self.xp.__name__)
        if causal:
            self.spans = [masked_by(self.xp, s, self.offset, window, self.dtype) for s in self.spans]

    def part(self, a, block, span):
        """The view of an array (B, H, Tq, ...) on a block's heads and a span's queries."""
        b, h = block
        return a[b, h.start * self.group : h.stop * self.group, span.queries]

    def grouped(self, a, block, span):
        """That part as (b, Hkv, G queries, ...)."""
        return self.by_key_head(self.part(a, block, span))

    def by_key_head(self, a):
        b, heads, queries, *rest = a.shape
        return a.reshape(b, heads // self.group, self.group * queries, *rest)

    def scores(self, q, k, block, span):
        """The scaled queries and the masked scores of a block and span; k holds the block's keys."""
        q = widen(self.grouped(q, block, span)) * self.scale
        s = self.xp.matmul(k[:, :, span.keys], q.swapaxes(-1, -2))
        if span.ceiling is not None:
            partly = s.reshape(*s.shape[:3], self.group, -1)[:, :, span.masked]
            self.xp.fmin(partly, span.ceiling, out=partly)  # of NaN and -inf it takes -inf
        return q, s

    def kept(self, block, span):
        """Which weights dropout keeps, laid out as the scores; None without dropout. The weights of a query, numbered
        as in (B, H, Tq, Tk), start with a Philox counter of their own, so that any part of them can be drawn."""
        if not self.dropout_p:
            return None
        xp, keys, (b, h) = self.xp, span.keys, block
        heads = slice(h.start * self.group, h.stop * self.group)
        quarters = slice(keys.start // 4, -(-keys.stop // 4))
        b, h, i, j = xp.ix_(*(xp.arange(a.start, a.stop) for a in (b, heads, span.queries, quarters)))
        first = ((b * self.heads + h) * self.tq + i) * -(-self.tk // 4)  # of a query
        counter = self.by_key_head(first + j).swapaxes(2, 3).astype(xp.uint64)
        mask = dropout.kept(xp, counter, self.dropout_p, self.drawn, axis=3)
        mask = mask.reshape(*mask.shape[:2], 4 * mask.shape[2], mask.shape[4])
        return mask[:, :, keys.start % 4 :][:, :, : keys.stop - keys.start]


def fwd(q, k, v, problem):
    """O in q's dtype and unrounded, and L."""
    xp = problem.xp
    o = xp.empty_like(q, dtype=problem.dtype)  # in the memory order of q, which is (B, T, H, D) in a GPT
    lse, ones = xp.empty(q.shape[:3], problem.dtype), xp.ones((1, problem.tk), problem.dtype)
    for block in problem.blocks:
        keys, values = widen(k[block]), widen(v[block])
        for span in problem.spans:
            _, p = problem.scores(q, keys, block, span)
            shift = top(p, (2,))
            shift = xp.where(xp.isneginf(shift), 0, shift)
            p -= shift
            xp.exp(p, out=p)
            total = xp.matmul(ones[:, span.keys], p)  # a sum over keys: a fifth of the time that sum() takes on a CPU
            log = problem.part(lse, block, span)
            log[...] = xp.where(total == 0, math.inf, shift + xp.log(total)).reshape(log.shape)
            mask = problem.kept(block, span)
            p = p if mask is None else masked(p, mask)
            y = xp.matmul(p.swapaxes(-1, -2), values[:, :, span.keys])
            y *= problem.boost / xp.where(total == 0, 1, total).swapaxes(-1, -2)
            out = problem.part(o, block, span)
            out[...] = y.reshape(out.shape)
    return narrow(o, q.dtype), o, lse


def bwd(do, q, k, v, o, lse, problem, needs):
    """dQ, dK, dV where `needs` has True; o is O unrounded: D cancels against dP, which would show its rounding."""
    xp = problem.xp
    dq, dk, dv = (xp.empty_like(a) if need else None for a, need in zip((q, k, v), needs, strict=True))
    for block in problem.blocks:
        keys, values = widen(k[block]), widen(v[block])
        dkeys, dvalues = (None if a is None else xp.zeros_like(keys) for a in (dk, dv))
        for span in problem.spans:
            scaled, p = problem.scores(q, keys, block, span)
            p -= problem.grouped(lse, block, span)[:, :, None]
            xp.exp(p, out=p)
            g, mask = widen(problem.grouped(do, block, span)), problem.kept(block, span)
            boosted = g if mask is None else g * problem.boost
            if dv is not None:
                dvalues[:, :, span.keys] += xp.matmul(p if mask is None else masked(p, mask), boosted)
            if dq is None and dk is None:
                continue
            ds = xp.matmul(values[:, :, span.keys], boosted.swapaxes(-1, -2))
            ds = ds if mask is None else masked(ds, mask)
            ds -= (g * problem.grouped(o, block, span)).sum(axis=-1)[:, :, None]
            ds *= p
            if dk is not None:
                dkeys[:, :, span.keys] += xp.matmul(ds, scaled)
            if dq is not None:
                y = xp.matmul(ds.swapaxes(-1, -2), keys[:, :, span.keys])
                y *= problem.scale
                out = problem.part(dq, block, span)
                out[...] = y.reshape(out.shape)
        if dk is not None:
            dk[block] = dkeys
        if dv is not None:
            dv[block] = dvalues
    return dq, dk, dv


# ---- launch: products and the softmax kernels, over whole rows of scores


def _heads(a, block, problem):
    """Of an array (B, H, Tq, ...) a block's heads, as (b, Hkv, G, Tq, ...): a view."""
    b, h = block
    a = a[b, h.start * problem.group : h.stop * problem.group]
    return a.reshape(a.shape[0], h.stop - h.start, problem.group, *a.shape[2:])


def _drop(weights, block, problem):
    """Dropout of a block's weights, or of their gradients, in place; the boost of those that stay included."""
    if problem.dropout_p:
        (b, h), tq = block, problem.tq
        first = (b.start * problem.heads + h.start * problem.group) * tq
        matrix = rows(weights)
        dropout.rows_kernel(matrix, problem.dropout_p, problem.drawn, first, out=matrix)


def fwd_kernel(q, k, v, problem):
    """As fwd, but backward will not need O; the weights are rounded to q's dtype before the product with V."""
    xp, (q, k, v) = problem.xp, contiguous(q, k, v)  # heads one after another, as libraries want them
    o = xp.empty(q.shape, q.dtype)
    lse = xp.empty(q.shape[:3], problem.dtype)
    for block in problem.blocks:
        keys, values = k[block][:, :, None], v[block][:, :, None]
        s = product(_heads(q, block, problem), keys.swapaxes(-1, -2))
        p = s if s.dtype == q.dtype else xp.empty(s.shape, q.dtype)
        _, log = softmax.causal_fwd(s, problem.scale, problem.offset, problem.window, out=p)
        _heads(lse, block, problem)[...] = log
        _drop(p, block, problem)
        product(p, values, out=_heads(o, block, problem))
    return o, None, lse


def bwd_kernel(do, q, k, v, o, lse, problem, needs):
    """As bwd, with the sum of P dP over a row for D. P and dS are rounded to q's dtype before they are multiplied."""
    xp, scale, mask = problem.xp, problem.scale, (problem.offset, problem.window)
    do, q, k, v = contiguous(do, q, k, v)
    dq, dk, dv = (xp.empty(a.shape, a.dtype) if need else None for a, need in zip((q, k, v), needs, strict=True))
    for block in problem.blocks:
        queries, g = _heads(q, block, problem), _heads(do, block, problem)
        keys, values = k[block][:, :, None], v[block][:, :, None]
        s = product(queries, keys.swapaxes(-1, -2))
        dp = ds = None
        p = s if s.dtype == q.dtype else xp.empty(s.shape, q.dtype)
        if dq is not None or dk is not None:
            dp = product(g, values.swapaxes(-1, -2))
            _drop(dp, block, problem)
            ds = dp if dp.dtype == q.dtype else xp.empty(dp.shape, q.dtype)
        softmax.causal_bwd(s, *contiguous(_heads(lse, block, problem)), dp, scale, *mask, p=p, ds=ds)
        if dv is not None:
            _drop(p, block, problem)
            _sum_of_group(p, g, dv[block])
        if dk is not None:
            _sum_of_group(ds, queries, dk[block])
        if dq is not None:
            product(ds, keys, out=_heads(dq, block, problem))
    return dq, dk, dv


def _sum_of_group(weights, a, out):
    """out (b, Hkv, Tk, D) = the sum over the G heads of a group of weights^T a, in the dtype of the arithmetic."""
    group = weights.shape[2]
    total = out if group == 1 else array_module(out).empty(out.shape, accumulator(out.dtype))
    for i in range(group):
        product(weights[:, :, i].swapaxes(-1, -2), a[:, :, i], out=total, beta=float(i > 0))
    if total is not out:
        out[...] = total


# ---- rule


class Attention(Function):
    def forward(ctx, q, k, v, is_causal, scale, window, dropout_p):
        name = "scaled_dot_product_attention"
        check_float(name, q=q, k=k, v=v)
        for what, a in (("q", q), ("k", k), ("v", v)):
            check(a.ndim == 4, f"{name}: {what} must have shape (B, heads, T, D), got {a.shape}")
        check(k.shape == v.shape, f"{name}: k and v must have one shape, got {k.shape} and {v.shape}")
        same = q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
        check(same, f"{name}: q and k must agree in B and D, got {q.shape} and {k.shape}")
        divides = q.shape[1] % k.shape[1] == 0 if k.shape[1] else q.shape[1] == 0
        check(divides, f"{name}: the heads of q must be a multiple of those of k, got {q.shape[1]} and {k.shape[1]}")
        drawn = random.default_generator.next_draw() if dropout_p else None
        ctx.problem = _Problem(q, k, is_causal, scale, window, dropout_p, drawn)
        y, o, lse = pick(q, fwd, fwd_kernel)(q, k, v, ctx.problem)
        ctx.save_for_backward(q, k, v, o, lse)
        return y

    def backward(ctx, do):
        return pick(do, bwd, bwd_kernel)(do, *ctx.saved_arrays, ctx.problem, ctx.needs_input_grad)
