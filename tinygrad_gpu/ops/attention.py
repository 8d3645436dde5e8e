"""Scaled dot-product attention (arXiv:1706.03762, section 3.2.1), with grouped queries (arXiv:2305.13245).

S = scale Q K^T where a key is seen, else -inf;  P = softmax(S);  O = (P m) V,  m the dropout multiplier (1 without)
dV = (P m)^T dO;   dP = (dO V^T) m;   dS = P (dP - D),  D = rowsum(dO O);   dQ = scale dS K;   dK = scale dS^T Q
Backward makes P again from the saved log-sum-exp L of each row, P = exp(S - L), as in FlashAttention-2 (arXiv:2307.08691,
algorithm 2): nothing of the size of S is kept. A query that sees no key has output 0 and gradient 0 (L = inf there).

Shapes: Q, O (B, H, Tq, D); K, V (B, Hkv, Tk, D), query head h reading key head h // (H / Hkv); L (B, H, Tq) in float32, in
float64 for float64. Causal: query i sees the keys j <= i + Tk - Tq; with a window w also j > i + Tk - Tq - w.
"""

import math

from .. import random
from ..autograd import Function
from ..device import array_module
from ..dtypes import accumulator
from .common import check, check_float, narrow, widen
from .dropout import check_probability, multiplier
from .reduce import top

# Bytes of scores made at once: they stay in a CPU core's second-level cache; a GPU wants large batches.
_BLOCK = {"numpy": 1 << 19, "cupy": 1 << 29}


def blocks(batch, heads, bytes_of_a_head, module):
    """(batch slice, head slice) pairs that cover all heads, several batch entries or part of one at a time."""
    fit = max(_BLOCK[module] // max(bytes_of_a_head, 1), 1)
    b, h = (max(fit // heads, 1), heads) if fit >= heads else (1, fit)
    return [
        (slice(i, min(i + b, batch)), slice(j, min(j + h, heads)))
        for i in range(0, batch, b)
        for j in range(0, heads, h)
    ]


def ceiling(xp, tq, tk, causal, window, dtype):
    """(Tk, 1, Tq): +inf where the query sees the key, -inf elsewhere, or None where all see all. fmin of it and the transposed
    scores (..., Tk, G, Tq) is the masked scores, whatever an unseen key holds."""
    if not causal:
        return None
    offset = tk - tq
    seen = xp.tri(tq, tk, offset, dtype=bool)
    if window is not None:
        seen &= ~xp.tri(tq, tk, offset - window, dtype=bool)
    return xp.where(seen.T[:, None], dtype.type(math.inf), dtype.type(-math.inf))


class _Problem:
    """Shapes and options of one call, and the steps that forward and backward share."""

    def __init__(self, q, k, causal, scale, window, dropout_p, drawn):
        self.xp, self.dtype = array_module(q), accumulator(q.dtype)
        self.batch, self.heads, self.tq, self.width = q.shape
        self.key_heads, self.tk = k.shape[1:3]
        self.group = self.heads // max(self.key_heads, 1)
        self.scale = 1 / math.sqrt(max(self.width, 1)) if scale is None else scale
        self.ceiling = ceiling(self.xp, self.tq, self.tk, causal, window, self.dtype)
        self.dropout_p, self.drawn = dropout_p, drawn
        head = self.group * self.tq * self.tk * self.dtype.itemsize
        self.blocks = blocks(self.batch, self.key_heads, head, self.xp.__name__)

    def grouped(self, a, block):
        """The block's part of an array with one entry a query head, (b, Hkv, G Tq, ...): the queries of a group in a row."""
        b, h = block
        a = a[b, h.start * self.group : h.stop * self.group]
        return a.reshape(a.shape[0], h.stop - h.start, self.group * self.tq, *a.shape[3:])

    def ungrouped(self, a, block):
        """What `grouped` reads, as the view of an array (B, H, Tq, ...) to write to."""
        b, h = block
        return a[b, h.start * self.group : h.stop * self.group]

    def scores(self, q, k, block):
        """The block's scaled queries and its masked scores, transposed: (b, Hkv, Tk, G Tq). NumPy reduces over the keys
        two to three times as fast that way (35 against 90 us for 4 heads of 128 by 128)."""
        q = widen(self.grouped(q, block)) * self.dtype.type(self.scale)
        s = self.xp.matmul(widen(k[block]), q.swapaxes(-1, -2))
        if self.ceiling is not None:
            by_head = s.reshape(*s.shape[:-1], self.group, self.tq)
            self.xp.fmin(by_head, self.ceiling, out=by_head)
        return q, s

    def dropped(self, s, block):
        """The dropout multiplier of the block's weights, transposed as they are; None without dropout."""
        if not self.dropout_p:
            return None
        b, h = block
        rows = self.group * self.tq
        start = (b.start * self.key_heads + h.start) * rows * self.tk
        m = multiplier(self.xp, s.size, self.dropout_p, self.drawn, self.dtype, start)
        return m.reshape(*s.shape[:2], rows, self.tk).swapaxes(-1, -2)


def fwd(q, k, v, problem):
    """O and L."""
    xp = problem.xp
    o, lse = xp.empty_like(q), xp.empty(q.shape[:3], problem.dtype)  # o in the memory order of q, (B, T, H, D) in a GPT
    ones = xp.ones((1, problem.tk), problem.dtype)
    for block in problem.blocks:
        _, p = problem.scores(q, k, block)
        shift = top(p, (2,))
        shift = xp.where(xp.isneginf(shift), 0, shift)
        p -= shift
        xp.exp(p, out=p)
        total = xp.matmul(ones, p)  # a sum over keys: a fifth of the time that sum() takes on a CPU
        log = problem.ungrouped(lse, block)
        log[...] = xp.where(total == 0, math.inf, shift + xp.log(total)).reshape(log.shape)
        m = problem.dropped(p, block)
        if m is not None:
            p *= m
        part = xp.matmul(p.swapaxes(-1, -2), widen(v[block]))
        part /= xp.where(total == 0, 1, total).swapaxes(-1, -2)
        out = problem.ungrouped(o, block)
        out[...] = part.reshape(out.shape)
    return o, lse


def bwd(do, q, k, v, o, lse, problem):
    """dQ, dK, dV."""
    xp = problem.xp
    dq, dk, dv = xp.empty_like(q), xp.empty_like(k), xp.empty_like(v)
    for block in problem.blocks:
        scaled, p = problem.scores(q, k, block)
        p -= problem.grouped(lse, block)[..., None, :]
        xp.exp(p, out=p)
        g = widen(problem.grouped(do, block))
        d = (g * problem.grouped(o, block)).sum(axis=-1)
        ds = xp.matmul(widen(v[block]), g.swapaxes(-1, -2))
        m = problem.dropped(p, block)
        if m is not None:
            ds *= m
        ds -= d[..., None, :]
        ds *= p
        if m is not None:
            p *= m
        dv[block] = xp.matmul(p, g)
        dk[block] = xp.matmul(ds, scaled)
        part = xp.matmul(ds.swapaxes(-1, -2), widen(k[block]))
        part *= problem.dtype.type(problem.scale)
        out = problem.ungrouped(dq, block)
        out[...] = part.reshape(out.shape)
    return dq, dk, dv


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
        check(window is None or is_causal, f"{name}: window needs is_causal=True")
        check(window is None or window > 0, f"{name}: window must be at least 1, got {window}")
        check_probability(name, dropout_p)
        drawn = random.default_generator.next_draw() if dropout_p else None
        ctx.problem = _Problem(q, k, is_causal, scale, window, dropout_p, drawn)
        o, lse = fwd(q, k, v, ctx.problem)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    def backward(ctx, do):
        return bwd(do, *ctx.saved_arrays, ctx.problem)
