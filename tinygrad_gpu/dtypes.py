"""The element types, and PyTorch's promotion rules over NumPy dtypes."""

import ml_dtypes
import numpy as np

float64 = np.dtype(np.float64)
float32 = np.dtype(np.float32)
float16 = np.dtype(np.float16)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
int64 = np.dtype(np.int64)
int32 = np.dtype(np.int32)
bool_ = np.dtype(np.bool_)

FLOATS = (float16, bfloat16, float32, float64)
HALVES = (float16, bfloat16)
ALL = (*FLOATS, int64, int32, bool_)

_CATEGORY = {bool_: 0, int32: 1, int64: 1, float16: 2, bfloat16: 2, float32: 2, float64: 2}
_WIDTH = {bool_: 0, int32: 1, int64: 2, float16: 3, bfloat16: 3, float32: 4, float64: 5}


def is_float(dtype) -> bool:
    """Whether `dtype` can carry a gradient."""
    return dtype in FLOATS


def accumulator(dtype) -> np.dtype:
    """The dtype in which sums, statistics and products of `dtype` are computed: float32 for the half types."""
    return float32 if dtype in HALVES else dtype


def as_dtype(dtype, name: str) -> np.dtype:
    """`dtype` as one of ours; TypeError, with the caller's `name`, for any other."""
    try:
        found = None if dtype is None else np.dtype(dtype)  # None is float64 to NumPy
    except TypeError:
        found = None
    if found is None or found not in ALL:
        raise TypeError(f"{name}: dtype must be one of {', '.join(d.name for d in ALL)}, got {dtype!r}")
    return found


def holds(dtype, other) -> bool:
    """Whether `dtype` takes values of the dtype `other` in place: integers take no floats, bools take bools alone."""
    return _CATEGORY[other] <= _CATEGORY[dtype]


def _pair(a, b):
    if _CATEGORY[a] != _CATEGORY[b]:
        return a if _CATEGORY[a] > _CATEGORY[b] else b
    if {a, b} == set(HALVES):
        return float32
    return a if _WIDTH[a] >= _WIDTH[b] else b


def promote(*operands) -> np.dtype:
    """The dtype of an operation on `operands`: arrays or Tensors, and Python numbers.

    As in PyTorch (torch.result_type) operands rank as arrays with axes, arrays without, Python numbers: a lower rank
    changes the dtype only when its category (bool, integer, float) is higher.
    """
    ranks = {}
    for x in operands:
        if isinstance(x, bool):
            rank, dtype = 2, bool_
        elif isinstance(x, int):
            rank, dtype = 2, int64
        elif isinstance(x, float):
            rank, dtype = 2, float32
        else:
            rank, dtype = (0 if x.ndim else 1), x.dtype
        ranks[rank] = _pair(ranks[rank], dtype) if rank in ranks else dtype
    result = None
    for rank in sorted(ranks):
        if result is None or _CATEGORY[ranks[rank]] > _CATEGORY[result]:
            result = ranks[rank]
    return result
