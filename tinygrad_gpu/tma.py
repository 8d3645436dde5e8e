"""Operands for the tensor memory accelerator of NVIDIA's sm_90: descriptions of a matrix that copy boxes of it.

Source: CUDA Driver API, Tensor Map Object Management (cuTensorMapEncodeTiled), called through cuda-bindings.
"""

import ctypes
import functools

import numpy as np

from . import device


class Tiled:
    """An array as the argument of a Tiled parameter of a kernel (kernels_cu/hopper.cuh): a matrix, or a batch of them
    with up to three axes, of which boxes of `box` elements (along the contiguous axis, along the other) are copied to
    shared memory, swizzled by 128 bytes and with zeros for what lies outside.

    `along_last`: whether the last axis is the contiguous one, not that before it. The address and the strides of all
    other axes must be multiples of 16 bytes, those of a matrix positive; a batch axis of stride 0 repeats.
    """

    __slots__ = ("array", "dtype", "packed")

    layout = np.dtype([("map", np.uint64, 16)])

    def __init__(self, array, along_last, box):
        self.array, self.dtype = array, array.dtype
        self.packed = _packed(device.address(array), array.dtype, array.shape, array.strides, along_last, box)


@functools.lru_cache(maxsize=1 << 14)
def _packed(address, dtype, shape, strides, along_last, box):
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise RuntimeError("tma: sm_90 needs cuda-bindings, which pip install 'tinygrad_gpu[cuda13]' brings") from error
    axes = [*zip(shape, strides, strict=True)][::-1]
    axes += [(1, 0)] * (5 - len(axes))
    if not along_last:
        axes[:2] = axes[1], axes[0]
    options = (
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    error, encoded = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype.name.upper()}"),
        len(axes),
        address,
        [driver.cuuint64_t(n) for n, _ in axes],
        [driver.cuuint64_t(stride if n > 1 else 0) for n, stride in axes[1:]],
        [driver.cuuint32_t(n) for n in (*box, 1, 1, 1)],
        [driver.cuuint32_t(1)] * len(axes),
        *options,
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"tma: {error.name} for shape {shape}, strides {strides}, boxes of {box}")
    return np.frombuffer(ctypes.string_at(int(encoded.getPtr()), Tiled.layout.itemsize), Tiled.layout)[0]
