"""GELU (arXiv:1606.08415): the exact form and its tanh approximation (section 2 there).

none:  y = x P(x),                   P(x) = (1 + erf(x / sqrt 2)) / 2;       dx = dy (P(x) + x exp(-x^2 / 2) / sqrt(2 pi))
tanh:  y = x (1 + t) / 2,  t = tanh(u),  u = sqrt(2 / pi) (x + 0.044715 x^3)
       dx = dy ((1 + t) / 2 + x (1 - t^2) u' / 2),  u' = sqrt(2 / pi) (1 + 3 * 0.044715 x^2)
"""

import math

import numpy as np

from ..autograd import Function
from ..device import array_module
from .common import blocks, check, check_float, widen

_ROOT = math.sqrt(2 / math.pi)
_CUBIC = 0.044715

# erf by W. J. Cody's rational Chebyshev approximations (Mathematics of Computation 23, 1969): on |x| <= 0.46875 as
# x R(x^2), on (0.46875, 4] as 1 - exp(-x^2) R(x), beyond as 1 - exp(-x^2) (1 / sqrt(pi) + R(1 / x^2) / x^2) / x.
_SMALL = (
    (1.85777706184603153e-1, 3.16112374387056560e0, 1.13864154151050156e2, 3.77485237685302021e2, 3.20937758913846947e3),
    (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3),
)
_MIDDLE = (
    (2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0, 6.61191906371416295e1, 2.98635138197400131e2,
     8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3, 1.23033935479799725e3),
    (1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
     3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3),
)  # fmt: skip
_LARGE = (
    (1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1, 1.25781726111229246e-1,
     1.60837851487422766e-2, 6.58749161529837803e-4),
    (1.0, 2.56852019228982242e0, 1.87295284992346725e0, 5.27905102951428412e-1, 6.05183413124413191e-2,
     2.33520497626869185e-3),
)  # fmt: skip


def _ratio(coefficients, z):
    top, bottom = (np.full_like(z, c[0]) for c in coefficients)
    for a, b in zip(coefficients[0][1:], coefficients[1][1:], strict=True):
        top = top * z + z.dtype.type(a)
        bottom = bottom * z + z.dtype.type(b)
    return top / bottom


def erf(x):
    """The error function of an array of float32 or float64, to its precision."""
    if not isinstance(x, np.ndarray):
        from cupyx.scipy.special import erf as of_cupy

        return of_cupy(x)
    a = np.minimum(np.abs(x), 27)  # beyond, exp(-x^2) is 0 in float64
    y = np.empty_like(x)
    small, large = a <= 0.46875, a > 4
    middle = ~(small | large)
    y[small] = a[small] * _ratio(_SMALL, a[small] ** 2)
    z = a[middle]
    y[middle] = 1 - np.exp(-z * z) * _ratio(_MIDDLE, z)
    z = a[large]
    z2 = 1 / (z * z)
    y[large] = 1 - np.exp(-z * z) / z * (x.dtype.type(1 / math.sqrt(math.pi)) - z2 * _ratio(_LARGE, z2))
    return np.copysign(y, x)


def _exact(x):
    return x * (0.5 + 0.5 * erf(x * x.dtype.type(math.sqrt(0.5))))


def _exact_slope(x):
    density = array_module(x).exp(-0.5 * x * x) * x.dtype.type(1 / math.sqrt(2 * math.pi))
    return 0.5 + 0.5 * erf(x * x.dtype.type(math.sqrt(0.5))) + x * density


def _tanh_of(xp, x, square):
    """tanh(u), given x and x^2."""
    u = square * (_ROOT * _CUBIC)
    u += _ROOT
    u *= x
    return xp.tanh(u, out=u)


def _tanh(x):
    xp = array_module(x)
    y = _tanh_of(xp, x, x * x)
    y += 1
    y *= x
    y *= 0.5
    return y


def _tanh_slope(x):
    xp = array_module(x)
    square = x * x
    t = _tanh_of(xp, x, square)
    square *= 3 * _CUBIC * _ROOT
    square += _ROOT
    square *= x  # x u'
    slope = 1 - t
    slope *= square
    slope += 1
    t += 1
    slope *= t  # (1 + t) (1 + (1 - t) x u')
    slope *= 0.5
    return slope


_FORMS = {"none": (_exact, _exact_slope), "tanh": (_tanh, _tanh_slope)}


def fwd(x, approximate):
    xp = array_module(x)
    flat, y = x.reshape(-1), xp.empty(x.shape, x.dtype)
    for b in blocks(xp, x.size):
        y.reshape(-1)[b] = _FORMS[approximate][0](widen(flat[b]))
    return y


def bwd(dy, x, approximate):
    xp = array_module(x)
    flat, dx = x.reshape(-1), xp.empty(x.shape, x.dtype)
    for b in blocks(xp, x.size):
        dx.reshape(-1)[b] = _FORMS[approximate][1](widen(flat[b])) * dy.reshape(-1)[b]
    return dx


class Gelu(Function):
    def forward(ctx, x, approximate):
        check_float("gelu", x=x)
        check(approximate in _FORMS, f'gelu: approximate must be "none" or "tanh", got {approximate!r}')
        ctx.save_for_backward(x)
        ctx.approximate = approximate
        return fwd(x, approximate)

    def backward(ctx, dy):
        (x,) = ctx.saved_arrays
        return bwd(dy, x, ctx.approximate)
