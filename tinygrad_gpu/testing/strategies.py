"""Hypothesis strategies for tensors' shapes and values, over `hypothesis.extra.numpy`. They shrink to few axes, short
axes and simple numbers. All draw NumPy arrays: wrap them as `tg.Tensor(a, requires_grad=True)`."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

# Lengths at which kernels go wrong: nothing, one, primes, and powers of two with their neighbours.
SIDES = (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33)


def shapes(min_dims=0, max_dims=3, min_side=0, max_side=9):
    """Shapes as tuples, lengths drawn from the bounds and what SIDES has between them.

    >>> from hypothesis import find
    >>> from tinygrad_gpu.testing import strategies
    >>> find(strategies.shapes(min_dims=1), lambda shape: True)
    (0,)
    """
    if not 0 <= min_side <= max_side:
        raise ValueError(f"shapes: lengths must satisfy 0 <= min_side <= max_side, got {min_side} and {max_side}")
    sides = sorted({min_side, max_side, *(n for n in SIDES if min_side <= n <= max_side)})
    return st.lists(st.sampled_from(sides), min_size=min_dims, max_size=max_dims).map(tuple)


def arrays(shape, dtype=np.float64, min_value=-3.0, max_value=3.0, distinct=False):
    """Arrays of a shape (or of a strategy for shapes), values in [min_value, max_value] on a grid of 1/64.

    The grid keeps values apart, so that finite differences do not straddle a kink by accident of rounding; with
    `distinct` no two elements are equal (for max, sorting and the like).

    >>> from hypothesis import find
    >>> from tinygrad_gpu.testing import strategies
    >>> find(strategies.arrays((2,)), lambda a: True)
    array([0., 0.])
    """
    low, high = int(np.ceil(min_value * 64)), int(np.floor(max_value * 64))
    if low > high:
        raise ValueError(f"arrays: no multiple of 1/64 lies in [{min_value}, {max_value}]")
    elements = st.integers(low, high)
    whole = npst.arrays(np.int64, shape, elements=elements, unique=distinct)
    return whole.map(lambda a: np.asarray(a / 64, dtype))


def broadcastable_shapes(n=2, max_dims=3, min_side=0, max_side=5):
    """Tuples of n shapes that broadcast with one another.

    >>> from hypothesis import find
    >>> from tinygrad_gpu.testing import strategies
    >>> find(strategies.broadcastable_shapes(), lambda shapes: True)
    ((), ())
    """
    drawn = npst.mutually_broadcastable_shapes(num_shapes=n, max_dims=max_dims, min_side=min_side, max_side=max_side)
    return drawn.map(lambda shapes: shapes.input_shapes)


@st.composite
def matmul_operands(draw, max_side=5, dtype=np.float64):
    """Pairs of arrays that numpy.matmul takes: vectors, matrices, and stacks of them that broadcast; K may be 0.

    >>> from hypothesis import find
    >>> from tinygrad_gpu.testing import strategies
    >>> [a.ndim for a in find(strategies.matmul_operands(), lambda operands: True)]
    [1, 1]
    """
    drawn = draw(
        npst.mutually_broadcastable_shapes(
            signature="(m?,k),(k,n?)->(m?,n?)", max_dims=2, min_side=0, max_side=max_side
        )
    )
    a, b = drawn.input_shapes
    return draw(arrays(a, dtype)), draw(arrays(b, dtype))
