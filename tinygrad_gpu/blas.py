"""Matrix products by the vendor's library through CuPy: cuBLAS, and on ROCm what CuPy makes of hipBLAS."""

import functools

import numpy as np

from . import device
from .config import config
from .dtypes import accumulator, bfloat16, float16, float32
from .ops.copy import copied, merged

# cudaDataType and cublasComputeType_t, from CUDA's library_types.h and cublas_api.h.
_TYPES = {float32: 0, float16: 2, bfloat16: 14}
_COMPUTE_32F, _COMPUTE_32F_FAST_TF32, _DEFAULT_ALGORITHM = 68, 77, -1
_DISALLOW_REDUCED_PRECISION_REDUCTION = 16  # of cublasMath_t: sums of parts along K stay float32


def product(c, a, b, alpha, beta):
    """c = alpha a b + beta c in float32, for CuPy arrays c (..., M, N), a (..., M, K), b (..., K, N) of any strides and
    the same batch axes; a and b of one dtype, c of that or float32. c is read only if beta is not 0."""
    xp = device.cupy()
    if xp.cuda.runtime.is_hip or not c.size or not a.size:
        wide = accumulator(a.dtype)
        y = xp.matmul(a.astype(wide, copy=False), b.astype(wide, copy=False)) * alpha
        c[...] = y + c * beta if beta else y
        return
    if c.strides[-1] != c.itemsize and c.strides[-2] == c.itemsize:
        a, b, c = b.swapaxes(-1, -2), a.swapaxes(-1, -2), c.swapaxes(-1, -2)
    # The library counts by columns, so that a row-major c is the transpose of what it makes: c^T = b^T a^T.
    target, found = c, _layout_of(c.shape, c.strides, c.itemsize)
    if found is None or found[0]:
        target = xp.empty(c.shape, c.dtype)
        if beta:
            copied(c, target)
        found = _layout_of(target.shape, target.strides, target.itemsize)
    _, ld, step = found
    left, turn_left, *left_steps = _layout(b)
    right, turn_right, *right_steps = _layout(a)
    batch = c.size // (c.shape[-1] * c.shape[-2])
    compute = _COMPUTE_32F_FAST_TF32 if config.allow_tf32 and a.dtype == float32 else _COMPUTE_32F
    scalars = np.array([alpha, beta], np.float32)
    from cupy_backends.cuda.libs import cublas

    handle = xp.cuda.device.get_cublas_handle()
    mode = cublas.getMathMode(handle)
    cublas.setMathMode(handle, mode | _DISALLOW_REDUCED_PRECISION_REDUCTION)
    try:
        cublas.gemmStridedBatchedEx(
            handle, int(turn_left), int(turn_right), c.shape[-1], c.shape[-2], a.shape[-1],
            scalars.ctypes.data, left.data.ptr, _TYPES[left.dtype], *left_steps,
            right.data.ptr, _TYPES[right.dtype], *right_steps,
            scalars.ctypes.data + 4, target.data.ptr, _TYPES[target.dtype], ld, step,
            batch, compute, _DEFAULT_ALGORITHM,
        )  # fmt: skip
    finally:
        cublas.setMathMode(handle, mode)
    if target is not c:
        copied(target, c)


def _layout(x):
    """(x, or a copy where the library cannot take its strides; whether it is column-major; its leading dimension; the
    stride of a batch), in elements. It takes a stride of 1 along one axis of a matrix, and one stride for a batch."""
    found = _layout_of(x.shape, x.strides, x.itemsize)
    return (x, *found) if found else (copied(x), False, x.shape[-1], x.shape[-1] * x.shape[-2])


@functools.cache
def _layout_of(shape, strides, size):
    """(column-major, leading dimension, stride of a batch), or None where the library cannot take such strides."""
    (rows, columns), (down, along) = shape[-2:], (s // size for s in strides[-2:])
    batch, steps = merged(shape[:-2], strides[:-2])
    step = steps[0] // size if batch else 0
    if len(batch) > 1 or step < 0:
        return None
    if along == 1 or columns == 1:
        ld = down if rows > 1 else columns
        if columns <= ld < 2**31:
            return False, ld, step
    if down == 1 or rows == 1:
        ld = along if columns > 1 else rows
        if rows <= ld < 2**31:
            return True, ld, step
    return None
