"""gradcheck: an op's backward rule against central differences of its forward, element by element."""

import math

import numpy as np

from ..autograd import enable_grad, grad, no_grad
from ..dtypes import float64, is_float
from ..tensor import Tensor


class GradcheckError(AssertionError):
    """A gradient disagrees with the finite difference; the message names input, element and both values."""


def gradcheck(fn, *inputs, eps=1e-6, atol=1e-6, rtol=1e-4):
    """True where the gradients of fn at `inputs` agree with central differences, else GradcheckError.

    fn takes the inputs and gives a Tensor or a tuple of them; its outputs are summed with fixed weights in [0.5, 1.5),
    so that L is a number. For each element x of each float64 input with requires_grad, dL/dx must lie within
    atol + rtol |d| of d = (L(x + eps) - L(x - eps)) / (2 eps); the error of d is O(eps^2) + O(1e-16 / eps).
    Every input is put back as it was. TypeError for an input with requires_grad that is not float64 (in float32 the
    difference would be mostly rounding); ValueError where no input requires its gradient.

    >>> import tinygrad_gpu as tg
    >>> x = tg.randn(3, dtype=tg.float64, requires_grad=True)
    >>> tg.testing.gradcheck(lambda x: (x.tanh() * x).sum(), x)
    True
    """
    checked = []
    for i, x in enumerate(inputs):
        if isinstance(x, Tensor) and x.requires_grad:
            if x.dtype != float64:
                raise TypeError(f"gradcheck: input {i} must be float64 to be differenced, got {x.dtype}")
            checked.append((i, x))
    if not checked:
        raise ValueError("gradcheck: at least one input must have requires_grad=True")

    weights = np.random.default_rng(0)
    cotangents = None

    def outputs():
        out = fn(*inputs)
        return [o for o in (out if isinstance(out, (tuple, list)) else (out,)) if is_float(o.dtype)]

    def loss():
        with no_grad():
            return math.fsum(float((o * c).sum()) for o, c in zip(outputs(), cotangents, strict=True))

    with enable_grad():
        results = outputs()
    cotangents = [Tensor(weights.uniform(0.5, 1.5, o.shape), dtype=o.dtype, device=o.device) for o in results]
    followed = [(o, c) for o, c in zip(results, cotangents, strict=True) if o.requires_grad]
    found = [None] * len(checked)
    if followed:
        found = grad([o for o, _ in followed], [x for _, x in checked], [c for _, c in followed])

    for (i, x), g in zip(checked, found, strict=True):
        g = np.zeros(x.shape) if g is None else g.numpy()
        if g.shape != x.shape:
            raise GradcheckError(f"gradcheck: input {i} has shape {x.shape}, its gradient {g.shape}")
        for index in np.ndindex(x.shape):
            before = float(x.data[index])
            ends = []
            try:
                for sign in (1, -1):
                    x.data[index] = before + sign * eps
                    ends.append(loss())
            finally:
                x.data[index] = before
            expected = (ends[0] - ends[1]) / (2 * eps)
            if not abs(g[index] - expected) <= atol + rtol * abs(expected):
                error = abs(g[index] - expected) / max(abs(expected), 1e-300)
                raise GradcheckError(
                    f"gradcheck: input {i}, element {index}: backward gives {g[index]:.8g}, the central difference "
                    f"{expected:.8g} (relative error {error:.2g}, allowed {rtol:.2g} + {atol:.2g} absolute)"
                )
    return True
