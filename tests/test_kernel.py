"""The kernel sources are found and read as one text; a launch's arguments become what the kernel's signature has."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tinygrad_gpu as tg
from tinygrad_gpu import kernel
from tinygrad_gpu.kernel import Launch, Parameter, Strided

ROOT = Path(__file__).resolve().parents[1]
FIND = "from tinygrad_gpu import kernel; print(kernel.folder()); assert 'warp_sum' in kernel.source('common.cuh')"


def test_includes_are_inlined_once(tmp_path, monkeypatch):
    (tmp_path / "inner.cuh").write_text("#pragma once\nint inner;\n")
    (tmp_path / "outer.cuh").write_text('#pragma once\n#include "inner.cuh"\nint outer;\n')
    (tmp_path / "op.cu").write_text(
        '#include "outer.cuh"\n# include "inner.cuh" // again\n#include <cstdint>\nint op;\n'
    )
    monkeypatch.setattr(kernel, "folder", lambda: tmp_path)
    assert kernel.source("op.cu").split("\n") == [
        '#line 1 "op.cu"',
        '#line 1 "outer.cuh"',
        "",
        '#line 1 "inner.cuh"',
        "",
        "int inner;",
        '#line 3 "outer.cuh"',
        "int outer;",
        '#line 2 "op.cu"',
        "",
        "#include <cstdint>",
        "int op;",
        "",
    ]


def test_a_missing_file_is_named(tmp_path, monkeypatch):
    (tmp_path / "op.cu").write_text('#include "gone.cuh"\n')
    monkeypatch.setattr(kernel, "folder", lambda: tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no file gone\.cuh"):
        kernel.source("op.cu")


@pytest.mark.parametrize("editable", [True, False], ids=["editable", "wheel"])
def test_an_installation_finds_the_sources(tmp_path, editable):
    """Installs without the dependencies into a folder of its own, and asks from a directory that is no checkout."""
    pytest.importorskip("setuptools", reason="builds the package")
    target = tmp_path / "site"
    source = tmp_path / "source"
    copied = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "tinygrad_gpu", "kernels_cu")
    source.mkdir()
    subprocess.run(["cp", "-r", *(ROOT / name for name in copied), source], check=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--disable-pip-version-check", "--root-user-action=ignore", "--target", target]
    subprocess.run([*command, *(["-e"] if editable else []), source], check=True)
    # -S and site.addsitedir: the only tinygrad_gpu in sight is the one just installed.
    others = [p for p in sys.path if p.endswith("site-packages")]
    script = f"import site, sys; site.addsitedir({str(target)!r}); sys.path += {others!r}; {FIND}"
    found = subprocess.run(
        [sys.executable, "-S", "-c", script], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    expected = source if editable else target
    assert found.stdout.strip().startswith(str(expected))


# ---- signatures and programs

SIGNATURE = """
extern "C" __global__ void __launch_bounds__((THREADS) * 2, 2)
    mix(T *y, UPDATED float *w,
        const unsigned long long* x, Strided<const T> a,
        Strided<T> b, UPDATED  Strided<ID>  c, long long n, T eps, unsigned seed, bool causal) {
    if (n) return;
}
extern "C" __global__ void other(float *y, bool strict) {}
extern "C" __global__ void bad(float **y) {}
extern "C" __global__ void unknown(const char *text) {}
"""
TYPES = (("T", "float16"), ("ID", "int"), ("THREADS", 64))


def test_signature():
    half, unsigned = tg.float16, np.dtype(np.uint32)
    assert kernel.signature(SIGNATURE, "mix", TYPES) == (
        Parameter("y", half, "pointer", True, False),
        Parameter("w", tg.float32, "pointer", True, True),
        Parameter("x", np.dtype(np.uint64), "pointer", False, False),
        Parameter("a", half, "strided", False, False),
        Parameter("b", half, "strided", True, False),
        Parameter("c", tg.int32, "strided", True, True),
        Parameter("n", tg.int64, "value", False, False),
        Parameter("eps", half, "value", False, False),
        Parameter("seed", unsigned, "value", False, False),
        Parameter("causal", np.dtype(bool), "value", False, False),
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bad", "bad: cannot read the parameter 'float **y'"),
        (
            "unknown",
            "unknown: text has the type char, which is none of float, float16, bfloat16, double, int, long long",
        ),
        ("gone", 'kernel: the source has no kernel extern "C" __global__ void gone(...)'),
    ],
)
def test_signatures_that_cannot_be_read(name, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kernel.signature(SIGNATURE, name, ())


def test_program():
    """Types are declared where every source has them, numbers are options."""
    what = Launch("gelu.cu", "gelu_fwd", (1,), (64,), T=tg.bfloat16, VEC=4, TANH=True, EPS=1e-5)
    text, options = kernel.program(what.source, what.defines, 64)
    assert options == ("-std=c++17", "-DWARP_SIZE=64", "-DVEC=4", "-DTANH=1", "-DEPS=1e-05")
    declared = text.index("using T = bfloat16;")
    assert text.index("struct bfloat16 {") < declared < text.index("gelu_fwd(")


def test_launch():
    """Its key is what decides the compiled kernel: not the grid, the block or the shared memory."""
    a = Launch("op.cu", "op", (7,), (32, 8), T=tg.float32, N=3)
    assert (a.grid, a.block, a.shared) == ((7, 1, 1), (32, 8, 1), 0)
    assert a.defines == (("T", "float"), ("N", 3))
    assert repr(a) == "Launch(op.cu, op, grid=(7, 1, 1), block=(32, 8, 1), T=float, N=3)"
    assert a.key == Launch("op.cu", "op", (1, 2, 3), (64,), 512, T=tg.float32, N=3).key
    others = ("po.cu", "op", tg.float32, 3), ("op.cu", "po", tg.float32, 3), ("op.cu", "op", tg.float16, 3)
    for source, name, dtype, n in (*others, ("op.cu", "op", tg.float32, 4)):
        assert a.key != Launch(source, name, (7,), (32, 8), T=dtype, N=n).key


@pytest.mark.parametrize(
    ("grid", "block"),
    [((2**31,), (1,)), ((1, 2**16), (1,)), ((1, 1, 2**16), (1,)), ((-1,), (1,)), ((1,), (0,)), ((1,), (33, 32))],
)
def test_sizes_that_no_gpu_takes(grid, block):
    with pytest.raises(ValueError, match=r"op: a GPU takes a grid of at most .* blocks of 1 to 1024 threads, got grid"):
        Launch("op.cu", "op", grid, block)
    Launch("op.cu", "op", (2**31 - 1, 2**16 - 1, 2**16 - 1), (32, 32))


# ---- launches: what the kernel would get

SOURCE = """extern "C" __global__ void op(
    float *y, const float16 *x, Strided<const float> a, int n, float eps, bool causal, unsigned long long key)"""


@pytest.fixture
def launched(monkeypatch):
    """A stand-in for the host build, which notes the values that a kernel would run with."""
    values = []
    function = kernel.Function("op", kernel.signature(SOURCE, "op", ()), lambda what, given, _: values.append(given))
    monkeypatch.setattr(kernel, "_host", SimpleNamespace(function=lambda key: function))
    return values


def arguments(**changed):
    """One of each kind, some of them changed."""
    y, x, a = np.zeros(4, np.float32), np.zeros((2, 3), np.float16), Strided(np.zeros((2, 3), np.float32).T)
    return ({"y": y, "x": x, "a": a, "n": 1, "eps": 0.5, "causal": True, "key": 0} | changed).values()


OP = Launch("op.cu", "op", (1,), (64,))

NUMBERS = [
    ("eps", 1e-5, np.float32(1e-5)),
    ("eps", 3, np.float32(3)),
    ("eps", np.float64(0.1), np.float32(0.1)),
    ("eps", float("-inf"), np.float32("-inf")),
    ("n", -(2**31), np.int32(-(2**31))),
    ("n", np.int64(7), np.int32(7)),
    ("causal", np.bool_(False), np.bool_(False)),
    ("key", 2**64 - 1, np.uint64(2**64 - 1)),
]


@pytest.mark.parametrize(("name", "value", "expected"), NUMBERS)
def test_numbers(launched, name, value, expected):
    kernel.launch(OP, *arguments(**{name: value}))
    found = launched[0][[p.name for p in kernel.signature(SOURCE, "op", ())].index(name)]
    assert (type(found), found) == (type(expected), expected)


def test_arrays(launched):
    y, x, memory = np.zeros(4, np.float32), np.zeros((2, 3), np.float16), np.zeros((2, 3, 4), np.float32)
    kernel.launch(OP, *arguments(y=y, x=x, a=Strided(memory[:, ::-1, 1:])))
    assert launched[0][0] is y
    assert launched[0][1] is x
    a = launched[0][2]
    assert a["data"] == memory[0, 2, 1:].ctypes.data
    assert a["strides"].tolist() == [0, 0, 12, -4, 1]
    assert a.nbytes == 48
    kernel.launch(OP, *arguments(y=None))
    assert launched[1][0] == 0
    assert launched[1][0].nbytes == 8


def test_an_empty_grid_runs_nothing(launched):
    for grid in ((0,), (3, 0), (1, 1, 0)):
        kernel.launch(Launch("op.cu", "op", grid, (64,)), *arguments())
    assert launched == []
    with pytest.raises(TypeError, match="op: n must be an int, got str"):
        kernel.launch(Launch("op.cu", "op", (0,), (64,)), *arguments(n="1"))


class OnGPU:
    """As much of a CuPy array as it takes to see where one is."""

    def __init__(self, number):
        self.device = SimpleNamespace(id=number)


OnGPU.__module__ = "cupy"

ERRORS = {
    "n must be in [-2147483648, 2147483647], got 2147483649": (ValueError, {"n": 2**31 + 1}),
    "key must be in [0, 18446744073709551615], got -1": (ValueError, {"key": -1}),
    "n must be an int, got float": (TypeError, {"n": 1.5}),
    "n must be an int, got bool": (TypeError, {"n": True}),
    "n must be an int, got ndarray": (TypeError, {"n": np.zeros((), np.int32)}),
    "n must be an int, got NoneType": (TypeError, {"n": None}),
    "eps must be a number, got str": (TypeError, {"eps": "1"}),
    "eps must be a number, got bool": (TypeError, {"eps": True}),
    "eps must be a number, got complex": (TypeError, {"eps": 1j}),
    "causal must be a bool, got int": (TypeError, {"causal": 1}),
    "y must have dtype float32, got float64": (TypeError, {"y": np.zeros(4)}),
    "x must have dtype float16, got bfloat16": (TypeError, {"x": np.zeros(4, tg.bfloat16)}),
    "a must have dtype float32, got float16": (TypeError, {"a": Strided(np.zeros(4, np.float16))}),
    "y must be an array or None, got list": (TypeError, {"y": [1.0]}),
    "y must be an array or None, got float": (TypeError, {"y": 1.0}),
    "y must be an array or None, got Strided": (TypeError, {"y": Strided(np.zeros(4, np.float32))}),
    "a must be a kernel.Strided, got ndarray": (TypeError, {"a": np.zeros(4, np.float32)}),
    "a must be a kernel.Strided, got list": (TypeError, {"a": [1.0]}),
    "y must be contiguous, got strides (8,) for shape (4,)": (ValueError, {"y": np.zeros(8, np.float32)[::2]}),
    "takes 7 arguments (y, x, a, n, eps, causal, key), got 8": (TypeError, {"more": 1}),
    "all arrays must be on one device, got cpu and cuda:1": (ValueError, {"x": OnGPU(1)}),
    "all arrays must be on one device, got cuda:0 and cuda:1": (ValueError, {"y": OnGPU(0), "x": OnGPU(1)}),
}


@pytest.mark.parametrize("message", ERRORS)
def test_arguments_that_do_not_fit(launched, message):
    error, changed = ERRORS[message]
    with pytest.raises(error, match=re.escape(f"op: {message}")):
        kernel.launch(OP, *arguments(**changed))
    assert launched == []


def test_no_arrays(launched):
    with pytest.raises(TypeError, match="op: at least one argument must be an array"):
        kernel.launch(OP, None, None, 1)


def test_numpy_arrays_need_a_host_build(monkeypatch):
    monkeypatch.setattr(kernel, "_host", None)
    with pytest.raises(RuntimeError, match=r"op: NumPy arrays need `with tg\.testing\.host_kernels\(\):`"):
        kernel.launch(OP, *arguments())


def test_what_runs_on_kernels(monkeypatch):
    """Arrays of the dtypes that kernels store, on a GPU, or NumPy's while a host build is in use."""
    stored = (tg.float32, tg.float16, tg.bfloat16)
    for host in (None, SimpleNamespace(limits=kernel.H200)):
        monkeypatch.setattr(kernel, "_host", host)
        for dtype in (*stored, tg.float64, tg.int64):
            assert kernel.runs(np.zeros(1, dtype)) is (host is not None and dtype in stored)
    assert kernel.limits(np.zeros(1)) is kernel.H200
    assert kernel.H200 == ("sm_90", 32, 132, 232448)
    gpu = OnGPU(0)
    gpu.dtype = tg.float32
    assert kernel.runs(gpu)
    monkeypatch.setattr(kernel, "_enabled", False)
    assert not kernel.runs(gpu)
