"""What the copy engine of sm_90 is told of an array, with a stand-in for the driver; on a GPU, products read by it."""

import ctypes
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import tinygrad_gpu as tg
from tinygrad_gpu import kernel, tma
from tinygrad_gpu.tma import Tiled


class Names:
    """An enumeration of which each member is its name."""

    def __getattr__(self, name):
        return SimpleNamespace(name=name)


@pytest.fixture
def driver(monkeypatch):
    """Stands for cuda.bindings.driver: keeps what it was asked to encode, and gives 128 bytes."""
    module, words = ModuleType("cuda.bindings.driver"), np.arange(16, dtype=np.uint64)
    success = SimpleNamespace(name="CUDA_SUCCESS")
    module.asked, module.answer = [], success
    module.cuuint32_t = module.cuuint64_t = int
    for kind in ("DataType", "Interleave", "Swizzle", "L2promotion", "FloatOOBfill"):
        setattr(module, f"CUtensorMap{kind}", Names())
    module.CUresult = SimpleNamespace(CUDA_SUCCESS=success)

    def encode(*arguments):
        module.asked.append(arguments)
        return module.answer, SimpleNamespace(getPtr=lambda: ctypes.c_void_p(words.ctypes.data).value)

    module.cuTensorMapEncodeTiled = encode
    package = ModuleType("cuda.bindings")
    package.driver = module
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    tma._packed.cache_clear()
    yield module
    tma._packed.cache_clear()


MEMORY = np.zeros((3, 5, 16, 24), np.float16)
CASES = {  # a view, whether it lies along its last axis; the sizes and the strides in bytes, the fastest axis first
    "a matrix": (MEMORY[0, 0], True, [24, 16, 1, 1, 1], [48, 0, 0, 0]),
    "its transpose": (MEMORY[0, 0].T, False, [24, 16, 1, 1, 1], [48, 0, 0, 0]),
    "a part": (MEMORY[0, 0, 2:9, :21], True, [21, 7, 1, 1, 1], [48, 0, 0, 0]),
    "one row": (MEMORY[0, 0, :1], True, [24, 1, 1, 1, 1], [0, 0, 0, 0]),
    "batches": (MEMORY, True, [24, 16, 5, 3, 1], [48, 768, 3840, 0]),
    "batches of transposes": (MEMORY.swapaxes(2, 3), False, [24, 16, 5, 3, 1], [48, 768, 3840, 0]),
    "one for all batches": (np.broadcast_to(MEMORY[:, :1], MEMORY.shape), True, [24, 16, 5, 3, 1], [48, 0, 3840, 0]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_described(driver, case):
    array, along_last, sizes, strides = CASES[case]
    tiled = Tiled(array, along_last, (64, 32))
    (found,) = driver.asked
    assert found[0].name == "CU_TENSOR_MAP_DATA_TYPE_FLOAT16"
    assert found[1:7] == (5, array.ctypes.data, sizes, strides, [64, 32, 1, 1, 1], [1] * 5)
    assert found[8].name == "CU_TENSOR_MAP_SWIZZLE_128B"
    assert tiled.packed["map"].tolist() == [*range(16)]
    assert tiled.packed.nbytes == 128
    Tiled(array, along_last, (64, 32))
    assert len(driver.asked) == 1  # the same array again
    Tiled(array, along_last, (64, 16))
    assert len(driver.asked) == 2


def test_dtypes(driver):
    for dtype, name in {tg.bfloat16: "BFLOAT16", tg.float16: "FLOAT16", tg.float32: "FLOAT32"}.items():
        Tiled(np.zeros((8, 8), dtype), True, (8, 8))
        assert driver.asked[-1][0].name == f"CU_TENSOR_MAP_DATA_TYPE_{name}"


def test_what_the_driver_refuses(driver):
    driver.answer = SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE")
    message = r"tma: CUDA_ERROR_INVALID_VALUE for shape \(8, 9\), strides \(18, 2\), boxes of \(64, 32\)"
    with pytest.raises(RuntimeError, match=message):
        Tiled(np.zeros((8, 9), np.float16), True, (64, 32))


def test_without_the_bindings(driver, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(RuntimeError, match=r"tma: sm_90 needs cuda-bindings, .*tinygrad_gpu\[cuda13\]"):
        Tiled(np.zeros((8, 8), np.float16), True, (64, 32))


def test_the_argument_of_a_kernel():
    text = 'extern "C" __global__ void __cluster_dims__(2, 1, 1) f(float *y, const __grid_constant__ Tiled a, int n) {}'
    parameters = kernel.signature(text, "f", ())
    assert [(p.name, p.kind, p.written) for p in parameters] == [
        ("y", "pointer", True), ("a", "tiled", False), ("n", "value", False),
    ]  # fmt: skip
    with pytest.raises(TypeError, match=r"f: a must be a kernel\.Tiled, got ndarray"):
        kernel.Function("f", parameters, None).convert((np.zeros(2, np.float32), np.zeros(2, np.float32), 1))
