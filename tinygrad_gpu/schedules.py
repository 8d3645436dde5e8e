"""Learning-rate schedules: functions of the step, public as `tg.optim.cosine_with_warmup` and so on."""

import math


def _warmed(name, step, lr, warmup, total):
    """lr on its linear way up over `warmup` steps, or None after it; and how far (0 to 1) step is from there to
    total."""
    if step < 0 or warmup < 0 or total < warmup:
        raise ValueError(f"{name}: needs 0 <= step and 0 <= warmup <= total, got {step}, {warmup}, {total}")
    if step < warmup:
        return lr * (step + 1) / warmup, 0.0
    return None, min((step - warmup) / max(total - warmup, 1), 1.0)


def cosine_with_warmup(step, *, lr, warmup, total, final=0.1):
    """The rate of step number `step` (from 0): up to lr over `warmup` steps, then half a cosine down to final * lr at
    `total`, and flat (arXiv:1608.03983, eq. 5, one period).

    >>> from tinygrad_gpu.optim import cosine_with_warmup
    >>> [round(cosine_with_warmup(s, lr=1.0, warmup=2, total=6), 3) for s in range(7)]
    [0.5, 1.0, 1.0, 0.868, 0.55, 0.232, 0.1]
    """
    rising, way = _warmed("cosine_with_warmup", step, lr, warmup, total)
    return lr * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * way))) if rising is None else rising


def linear(step, *, lr, warmup, total, final=0.0):
    """The rate of step number `step` (from 0): up to lr over `warmup` steps, then straight down to final * lr at
    `total`.

    >>> from tinygrad_gpu.optim import linear
    >>> [linear(s, lr=1.0, warmup=1, total=3) for s in range(4)]
    [1.0, 1.0, 0.5, 0.0]
    """
    rising, way = _warmed("linear", step, lr, warmup, total)
    return lr * (1 - (1 - final) * way) if rising is None else rising


def constant(step, *, lr, warmup=0):
    """The rate of step number `step` (from 0): up to lr over `warmup` steps, then lr.

    >>> from tinygrad_gpu.optim import constant
    >>> [constant(s, lr=1.0, warmup=2) for s in range(3)]
    [0.5, 1.0, 1.0]
    """
    rising, _ = _warmed("constant", step, lr, warmup, warmup)
    return lr if rising is None else rising
