"""The host build: each mistake that it must find in a kernel, what it must let pass, and what it computes."""

import math
import mmap

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import tinygrad_gpu as tg
from tests.conftest import needs_compiler
from tinygrad_gpu import kernel
from tinygrad_gpu.kernel import Launch, Strided
from tinygrad_gpu.ops import gemm
from tinygrad_gpu.testing import KernelError, host

pytestmark = needs_compiler
REAL = kernel.folder()
THREADS = 128


@pytest.fixture(params=[32, 64])
def width(request):
    return request.param


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(name, body, parameters, before) makes a source of one kernel, in a folder with the real headers."""
    for shared in ("common.cuh", "host"):
        (tmp_path / shared).symlink_to(REAL / shared)
    monkeypatch.setattr(kernel, "folder", lambda: tmp_path)
    host._load.cache_clear()

    def write(name, body, parameters, before=""):
        head = f'#include "common.cuh"\n{before}extern "C" __global__ void {name}({parameters}) {{\n'
        text = f"{head}    int t = threadIdx.x;\n{body}\n}}\n"
        (tmp_path / f"{name}.cu").write_text(text)
        return text

    yield write
    host._load.cache_clear()


# ---- mistakes

# Each kernel runs in a block of 128 threads on y, 128 floats to write; z, 128 that are 0; x, 128 from 0; s, a strided
# copy of x; and 512 bytes of dynamic shared memory. <here>, <there> and <any> in a message are the lines so marked.
PARAMETERS = "float *y, UPDATED float *z, const float *x, Strided<const float> s"
TILE = "__shared__ float tile[128];"
FILLED = f"{TILE} tile[t] = 0.0f; __syncthreads();"
RACE = r"(reads|writes) 4 bytes at <any>: byte \d+ of static shared memory, which thread .* of block \(0, 0, 0\) "
RACE += r"(reads|writes) at <any> with no barrier between"

SINS = {
    "before": (
        "z[t] = x[t - 1];  // here",
        r"thread \(0, 0, 0\) of block \(0, 0, 0\) reads 4 bytes at <here>: 4 bytes before x \(float32,",
    ),
    "after": (
        "z[t + 1] = 1.0f;  // here",
        r"thread \(127, 0, 0\) of .* writes 4 bytes at <here>: 4 bytes past the end of z \(float32, shape \(128,\)\)",
    ),
    "loop": (
        "if (t == 0)\n for (int i = 0; i < 129; i++) z[i] = 0.0f;  // here",
        r"writes \d+ bytes at <here>: 4 bytes past the end of z",
    ),
    "far_away": ("z[t] = x[t + (1ll << 40)];  // here", "reads 4 bytes at <here>: an address near no array"),
    "half_outside": (
        "if (t == 0) *(long long *)(z + 127) = 0;  // here",
        "writes 8 bytes at <here>: 4 bytes past the end of z",
    ),
    "gap": (
        "z[t] = s.data[t];  // here",
        r"reads 4 bytes at <here>: between the elements of s \(float32, shape \(128,\)\)",
    ),
    "misaligned": (
        "z[t] = (float)*(const double *)(x + t / 8 * 2 + 1);  // here",
        r"reads 8 bytes at <here>: x\[\d+\], an address that is no multiple of 8",
    ),
    "misaligned_vector": (
        "float a[4]; load(a, x + t / 8 * 4 + 1);  // here\n z[t] = a[0];",
        r"reads 16 bytes at common.cuh:\d+, called at <here>: x\[\d+\], an address that is no multiple of 16",
    ),
    "static_shared": (
        f"{TILE} float *p = tile + 1;\n p[t] = 0.0f;  // here\n __syncthreads(); z[t] = tile[t];",
        r"thread \(127, .* writes 4 bytes at <here>: byte 512 of static shared memory, outside of it",
    ),
    "dynamic_shared": (
        "DYNAMIC_SHARED(float, tile);\n tile[t - 1] = 0.0f;  // here",
        r"thread \(0, .* writes 4 bytes at <here>: byte -4 of dynamic shared memory, outside of it",
    ),
    "shared_index": (f"{TILE}\n tile[t + 1] = 0.0f;  // here", "uses the index 128 beyond its array at <here>"),
    "row_index": (
        "__shared__ float tile[2][64];\n tile[t / 64][t % 64 + 1] = 0.0f;  // here",
        "uses the index 64 beyond its array at <here>",
    ),
    "register_index": (
        "float a[4] = {x[0], x[1], x[2], x[3]};\n z[t] = a[t / 32 - 1];  // here",
        r"thread .* uses the index -1 beyond its array at <here>",
    ),
    "race_of_warps": (f"{FILLED}\n tile[t] = x[t];  // any\n z[t] = tile[t ^ 64];  // any", RACE),
    "race_in_a_warp": (f"{FILLED}\n tile[t] = x[t];  // any\n z[t] = tile[t ^ 1];  // any", RACE),
    "write_after_read": (f"{FILLED}\n float v = tile[127 - t];  // any\n tile[t] = v + 1.0f;  // any", RACE),
    "second_write": (f"{FILLED}\n tile[t / 2] = 1.0f;  // any\n __syncthreads(); z[t] = tile[t];", RACE),
    "atomic_and_not": (
        f"{FILLED}\n if (t) atomicAdd(tile, 1.0f);  // any\n else z[t] = tile[0];  // any",
        RACE,
    ),
    # Each reads before one of them writes: whoever is known of the readers may be that one.
    "read_by_all": (
        f"{FILLED}\n z[t] = tile[0];  // any\n if (t == 5) tile[0] = 1.0f;  // any",
        RACE.replace("thread .* of block \\(0, 0, 0\\)", "(another thread|thread .* of block .*)"),
    ),
    "global_race": (
        "z[t] = 1.0f;  // any\n z[t ^ 64] += 1.0f;  // any",
        r"4 bytes at <any>: z\[\d+\], which thread .* of block \(0, 0, 0\) (writes|reads) at <any> with no barrier",
    ),
    "race_of_blocks": (
        "if (t == 0) z[3] = 1.0f;  // here",
        r"block \((0|1), 0, 0\) writes 4 bytes at <here>: z\[3\], which .* of block \((0|1), 0, 0\) writes at <here>",
    ),
    "read_of_another_block": (
        "if (t == 0) z[blockIdx.x] = z[1 - blockIdx.x] + 1.0f;  // here",
        r"reads 4 bytes at <here>: z\[\d\], which thread \(0, 0, 0\) of block \(\d, 0, 0\) writes at <here>",
    ),
    "returned": (
        "if (t == 5) return;\n __syncthreads();  // here",
        r"waits at a barrier at <here> that thread \(5, 0, 0\) does not reach: it has returned",
    ),
    "elsewhere": (
        "if (t < 64) {\n __syncthreads();  // any\n z[t] = 1.0f; } else\n __syncthreads();  // any",
        r"waits at a barrier at <any> that thread .* does not reach: it waits at <any>",
    ),
    "at_a_shuffle": (
        "if (t == 127) z[t] = warp_sum(1.0f);  // there\n else __syncthreads();  // here",
        r"waits at a barrier at <here> that thread \(127, 0, 0\) .*: it waits at common.cuh:\d+, called at <there>",
    ),
    "absent_lane": (
        "if (t % WARP_SIZE < 16)\n z[t] = __shfl_xor_sync(0xffff, x[t], t % 32 == 7 ? 16 : 1);  // here",
        r"thread \((7|39|71|103), .* is in a shuffle at <here> that reads lane 23, which does not take part",
    ),
    "absent_by_the_mask": (
        "if (t % WARP_SIZE != 3)\n z[t] = warp_max(x[t]);  // here",
        r"takes part in a shuffle, .* at common.cuh:\d+, called at <here> without lanes that its mask names: 3$",
    ),
    "two_shuffles": (
        "if (t % 2)\n z[t] = warp_sum(x[t]);  // any\n else\n z[t] = warp_max(x[t]);  // any",
        r"takes part in a shuffle, .*, called at <any> without lanes that its mask names: (1, 3, 5|0, 2, 4), .*",
    ),
    "not_in_its_mask": (
        "z[t] = __shfl_sync(1, x[t], 0);  // here",
        "takes part in a shuffle, vote or warp barrier at <here> whose mask lacks its own lane",
    ),
    "unwritten": ("if (t != 7) y[t] = 1.0f;", r"y\[7\] was never written"),
    "unwritten_shared": (
        f"{TILE} if (t < 2) tile[t] = 0.0f;\n z[t] = tile[2];  // here",
        "reads 4 bytes at <here>: byte 8 of static shared memory, which nobody has written",
    ),
    "unwritten_output": ("z[t] = y[t];  // here", r"reads 4 bytes at <here>: y\[\d+\], which nobody has written"),
    "unwritten_counter": ("atomicAdd(y + 2, 1.0f);  // here", r"4 bytes at <here>: y\[2\], which nobody has written"),
}
BLOCKS = {"race_of_blocks": 2, "read_of_another_block": 2}


@pytest.mark.parametrize("sin", SINS)
def test_mistakes(width, write, sin):
    body, message = SINS[sin]
    if sin == "misaligned_vector" and "array-bounds" in host._compiler():
        pytest.skip("clang takes a vector for its elements")
    text = write(sin, body, PARAMETERS)
    for mark in ("here", "there", "any"):
        lines = [str(i) for i, line in enumerate(text.split("\n"), 1) if line.endswith(f"// {mark}")]
        message = message.replace(f"<{mark}>", rf"{sin}\.cu:({'|'.join(lines)})")
    y, z, x = np.empty(128, np.float32), np.zeros(128, np.float32), np.arange(128, dtype=np.float32)
    what = Launch(f"{sin}.cu", sin, (BLOCKS.get(sin, 1),), (THREADS,), 512)
    with tg.testing.host_kernels(width, sanitize=True), pytest.raises(KernelError, match=f"^{sin}: .*{message}"):
        kernel.launch(what, y if sin.startswith("unwritten") else None, z, x, Strided(x.repeat(2)[::2]))


# ---- what is no mistake

INNOCENT = {
    "read_by_all": f"{FILLED} float v = tile[0]; __syncthreads(); if (t == 5) tile[0] = 1.0f; z[t] = t + v;",
    "atomics": f"{FILLED} atomicAdd(tile, 1.0f); __syncthreads(); z[t] = t + tile[0] - 128;",
    "in_place": "y[t] = z[t]; __syncthreads(); z[t] = y[t] + t;",
    "halves": f"{TILE} if (t < 64) tile[t] = 0.0f; else tile[t] = 1.0f; z[t] = t + tile[t] - t / 64;",
    "a_warp": f"{TILE} tile[t] = t ^ 1; SYNC_WARP(); float v = tile[t ^ 1]; SYNC_WARP(); tile[t] = v; z[t] = tile[t];",
    "vectors": "if (t < 32) { float a[4]; load(a, x + 4 * t); store(z + 4 * t, a); }",
    "strided": "z[t] = s.data[t * s.strides[4]];",
    "far_ends": "z[t] = x[127 - (127 - t)] + 0.0f * (x[0] + x[127] + z[t]);",
}


@pytest.mark.parametrize("innocent", INNOCENT)
def test_no_mistakes(width, write, innocent):
    """Each computes z = x, which is 0, 1, 2 …"""
    write(innocent, INNOCENT[innocent], PARAMETERS)
    y, z, x = np.zeros(128, np.float32), np.zeros(128, np.float32), np.arange(128, dtype=np.float32)
    y = z if innocent == "in_place" else None
    with tg.testing.host_kernels(width, sanitize=True):
        kernel.launch(Launch(f"{innocent}.cu", innocent, (1,), (128,)), y, z, x, Strided(x.repeat(2)[::2]))
    assert z.tolist() == x.tolist()


OF_BLOCKS = {
    "neighbours": ("bool *y", "y[blockIdx.x * 128 + t] = t % 3 == 0;"),
    # The last block to come adds up what the others left.
    "last_block": (
        "bool *y, UPDATED int *parts, UPDATED unsigned *counter",
        """__shared__ bool last;
        y[blockIdx.x * 128 + t] = t % 3 == 0;
        if (t == 0) {
            parts[blockIdx.x] = (int)blockIdx.x;
            __threadfence();
            last = atomicAdd(counter, 1) == gridDim.x - 1;
        }
        __syncthreads();
        if (last && t == 1)
            for (int i = 0; i < 8; i++) parts[8] += parts[i];""",
    ),
}


@pytest.mark.parametrize("innocent", OF_BLOCKS)
def test_no_mistakes_of_blocks(width, write, innocent):
    parameters, body = OF_BLOCKS[innocent]
    write(innocent, body, parameters)
    y, parts = np.ones(1024, bool), np.zeros(9, np.int32)
    arguments = (parts, np.zeros(1, np.uint32)) if innocent == "last_block" else ()
    with tg.testing.host_kernels(width, sanitize=True):
        kernel.launch(Launch(f"{innocent}.cu", innocent, (8,), (128,)), y, *arguments)
    assert (y == (np.arange(1024) % 128 % 3 == 0)).all()
    assert parts[8] == (28 if arguments else 0)


def test_the_last_block_needs_a_fence(write):
    parameters, body = OF_BLOCKS["last_block"]
    write("unfenced", body.replace("__threadfence();", ""), parameters)
    arguments = np.ones(1024, bool), np.zeros(9, np.int32), np.zeros(1, np.uint32)
    with (
        tg.testing.host_kernels(sanitize=True),
        pytest.raises(KernelError, match=r"reads 4 bytes .*: parts\[\d\], which .* writes"),
    ):
        kernel.launch(Launch("unfenced.cu", "unfenced", (8,), (128,)), *arguments)


# ---- arrays in memory

READ = ("float *y, Strided<const float> s", "y[t] = s.data[t / 8 * s.strides[3] + t % 8 * s.strides[4]];")


def far_apart(shape, axis, dtype=np.float32):
    """An array whose neighbours along one axis lie 2^31 elements from one another, in memory that takes no room until
    it is touched; the numbers from 0."""
    size = np.dtype(dtype).itemsize
    strides = np.zeros(shape, dtype).strides
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = np.frombuffer(mmap.mmap(-1, (shape[axis] - 1) * size * 2**31 + 4096, flags), dtype)
    x = as_strided(memory, shape, [size * 2**31 if i == axis else s for i, s in enumerate(strides)])
    x[...] = np.arange(x.size).reshape(shape)
    return x


VIEWS = {
    "transposed": lambda: np.arange(16, dtype=np.float32).reshape(8, 2).T,
    "reversed": lambda: np.arange(16, dtype=np.float32).reshape(2, 8)[::-1, ::-1],
    "every_other": lambda: np.arange(64, dtype=np.float32).reshape(4, 16)[1::2, ::2],
    "repeated": lambda: np.broadcast_to(np.arange(8, dtype=np.float32), (2, 8)),
    "one": lambda: np.broadcast_to(np.float32(3), (2, 8)),
    "overlapping": lambda: as_strided(np.arange(12, dtype=np.float32), (2, 8), (16, 4)),
    "far_apart": lambda: far_apart((2, 8), 0),
}


@pytest.mark.parametrize("view", VIEWS)
def test_strided_arguments(write, view):
    write("copy", READ[1], READ[0])
    write("narrow", READ[1].replace("t / 8 * s.strides[3]", "(int)(t / 8 * s.strides[3])"), READ[0])
    write("beyond", READ[1].replace("t % 8", "(t % 8 + 8)"), READ[0])
    x, y = VIEWS[view](), np.empty((2, 8), np.float32)

    def launch(name):
        kernel.launch(Launch(f"{name}.cu", name, (1,), (16,)), y, Strided(x))

    with tg.testing.host_kernels(sanitize=True):
        launch("copy")
        assert y.tolist() == x.tolist()
        if view == "far_apart":
            with pytest.raises(KernelError, match=r"narrow: .* reads 4 bytes at narrow\.cu:4: "):
                launch("narrow")
        if view not in ("one", "transposed", "overlapping", "far_apart"):  # elsewhere there are elements
            with pytest.raises(KernelError, match=r"(before|past the end of|between the elements of) s \(float32"):
                launch("beyond")


@pytest.mark.parametrize("axis", [0, 1, 2, 3, 4], ids=["batch0", "batch1", "batch2", "rows", "columns"])
@pytest.mark.parametrize("operand", ["c", "a", "b"])
def test_products_of_what_is_far_apart(operand, axis):
    """gemm.cu reckons every offset in 64 bits."""
    c, a, b = (
        far_apart(shape, axis) if name == operand else np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
        for name, shape in (("c", (2, 2, 2, 3, 4)), ("a", (2, 2, 2, 3, 2)), ("b", (2, 2, 2, 2, 4)))
    )
    with tg.testing.host_kernels(sanitize=True):
        gemm.product_kernel(c, a, b, 1.0, 0.0)
    assert c.tolist() == (a @ b).tolist()


def test_a_strided_argument_serves_again(write):
    """A checked launch, which runs on copies of its arrays, leaves the arguments as they were."""
    write("again", "y[t] = s.data[t * s.strides[3]];", "float *y, Strided<const float> s")
    x, y = Strided(np.arange(8, dtype=np.float32)[::2][:, None]), np.empty(4, np.float32)
    with tg.testing.host_kernels(sanitize=True):
        for _ in range(2):
            y[:] = 0
            kernel.launch(Launch("again.cu", "again", (1,), (4,)), y, x)
            assert y.tolist() == [0, 2, 4, 6]


def test_an_element_is_named(write):
    """By its index, whatever the strides."""
    write("element", "y[t] = s.data[s.strides[3] * 5 + s.strides[4] * 2];", "float *y, Strided<float> s")
    y, memory = np.empty(1, np.float32), np.empty((8, 5), np.float32)
    for x in (memory, memory[::-1, ::-1], memory.reshape(5, 8).T, memory[::-1]):
        with tg.testing.host_kernels(sanitize=True), pytest.raises(KernelError, match=r": s\[5, 2\], which nobody"):
            kernel.launch(Launch("element.cu", "element", (1,), (1,)), y, Strided(x))


def test_neighbours_in_memory(write):
    """An access beyond one array is not taken for one of the array that happens to follow it."""
    write("next", "y[t] = x[t + 64];", "float *y, const float *x, const float *w")
    memory = np.zeros(192, np.float32)
    with (
        tg.testing.host_kernels(sanitize=True),
        pytest.raises(KernelError, match=r"4 bytes past the end of x|\d+ bytes past the end of x"),
    ):
        kernel.launch(Launch("next.cu", "next", (1,), (64,)), memory[128:], memory[:64], memory[64:128])
    write("same", "float v = x[t]; y[t] = v + 1.0f;", "float *y, const float *x")
    with tg.testing.host_kernels(sanitize=True):
        kernel.launch(Launch("same.cu", "same", (1,), (64,)), memory[:64], memory[:64])
        with pytest.raises(KernelError, match=r"[yx]\[\d+\], which thread .* (reads|writes)"):
            kernel.launch(Launch("same.cu", "same", (1,), (64,)), memory[32:96], memory[:64])
    assert memory.tolist() == [1] * 64 + [0] * 128


# ---- it computes what a GPU does


def _launch(name, grid, block, *arguments, shared=0, **defines):
    kernel.launch(Launch(f"{name}.cu", name, grid, block, shared, **defines), *arguments)


def test_shuffles_and_votes(width, write):
    results = {
        "__shfl_sync(host::ALL_LANES, t, 5)": lambda lane: 5,
        "__shfl_sync(host::ALL_LANES, t, 11, 8)": lambda lane: lane // 8 * 8 + 3,
        "__shfl_xor_sync(host::ALL_LANES, t, 12)": lambda lane: lane ^ 12,
        "__shfl_xor_sync(host::ALL_LANES, t, 12, 8)": lambda lane: np.where(lane % 16 < 8, lane, lane ^ 12),
        "__shfl_up_sync(host::ALL_LANES, t, 3, 16)": lambda lane: lane - 3 * (lane % 16 > 2),
        "__shfl_down_sync(host::ALL_LANES, t, 3, 16)": lambda lane: lane + 3 * (lane % 16 < 13),
        "__any_sync(host::ALL_LANES, t % WARP_SIZE == 9)": lambda lane: 1,
        "__any_sync(host::ALL_LANES, t < 0)": lambda lane: 0,
        "__all_sync(host::ALL_LANES, t % WARP_SIZE != 9)": lambda lane: 0,
        "__all_sync(host::ALL_LANES, t >= 0)": lambda lane: 1,
        "(int)(__ballot_sync(host::ALL_LANES, t % 2) >> (WARP_SIZE - 4))": lambda lane: 10,
        "warp_sum(t % WARP_SIZE)": lambda lane: width * (width - 1) // 2,
        "(int)warp_max(t % WARP_SIZE == 6 ? 9.0f : 1.0f)": lambda lane: 9,
    }
    body = "".join(f"y[{i} * 128 + t] = {code};\n" for i, code in enumerate(results))
    write("lanes", body, "int *y")
    y, t = np.empty((len(results), 128), np.int32), np.arange(128)
    with tg.testing.host_kernels(width, sanitize=True):
        _launch("lanes", (1,), (128,), y)
    for row, (code, expected) in zip(y, results.items(), strict=True):
        warp = t - t % width if code.startswith("__shfl") else 0
        assert (row == expected(t % width) + warp).all(), code


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.uint64, np.float32], ids=lambda d: d.__name__)
def test_atomics(write, dtype):
    body = """atomicAdd(y, 2); atomicMax(y + 1, t); atomicMin(y + 2, t + 3);
    old[t] = (int)atomicExch(y + 3, t);
    T seen = y[4], was;
    do was = seen; while ((seen = atomicCAS(y + 4, was, was + 3)) != was);"""
    write("change", body.replace("y[4]", "atomicAdd(y + 4, 0)"), "int *old, UPDATED T *y")
    y, old = np.array([1, 0, 1000, 500, 0], dtype), np.empty(256, np.int32)
    with tg.testing.host_kernels(sanitize=True):
        _launch("change", (1,), (256,), old, y, T=np.dtype(dtype))
    assert y.tolist() == [513, 255, 3, y[3], 768]
    assert sorted([*old.tolist(), int(y[3])]) == [*range(256), 500]


@pytest.mark.parametrize("dtype", [tg.float16, tg.bfloat16], ids=str)
def test_conversions(write, dtype):
    """Every 16-bit number as a float; floats rounded as NumPy does: any bits, ties, and what is next to them."""
    write("convert", "long long i = (long long)blockIdx.x * 256 + t;\nh[i] = to<T>(x[i]); f[i] = to_float(b[i]);",
          "T *h, float *f, const float *x, const T *b")  # fmt: skip
    b = np.arange(2**16, dtype=np.uint16).view(dtype)
    finite = np.sort(b[np.isfinite(b.astype(np.float32))].astype(np.float32))
    ties = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    top = np.float32(np.ldexp(2 - 2.0**-11, 15) if dtype == tg.float16 else np.inf)  # from here on numbers are infinite
    special = np.array([0.0, -0.0, top, -top, np.inf, -np.inf, np.nan], np.float32)
    bits = np.random.default_rng(0).integers(0, 2**32, 2**16, dtype=np.uint32).view(np.float32)
    x = np.concatenate([f(special) for f in (lambda v: v, *STEPS)] + [f(ties) for f in (lambda v: v, *STEPS)] + [bits])
    x = np.resize(x, 2**18)
    b = np.resize(b, x.size)
    h, f = np.empty(x.size, dtype), np.empty(x.size, np.float32)
    with tg.testing.host_kernels():
        _launch("convert", (x.size // 256,), (256,), h, f, x, b, T=dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        for found, expected in ((h, x.astype(dtype)), (f, b.astype(np.float32))):
            nan = np.isnan(expected)
            assert (np.isnan(found) == nan).all()
            raw = f"u{found.itemsize}"
            assert (found.view(raw) == expected.view(raw))[~nan].all()


STEPS = [lambda v: np.nextafter(v, np.float32(np.inf)), lambda v: np.nextafter(v, np.float32(-np.inf))]


def test_a_product_by_a_warp(write):
    """What a matrix core does for a warp, from each lane's share of the operands: C += A B of 16x16 and 16x8 (PTX ISA,
    'Matrix Fragments for mma.m16n8k16')."""
    before = """struct Shares {
    float c[4];
    float16 a[8], b[4];
};
void product(void **arrived, host::Lanes) {
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 8; column++) {
            float &c = ((Shares *)arrived[row % 8 * 4 + column / 2])->c[row / 8 * 2 + column % 2];
            for (int k = 0; k < 16; k++) {
                float16 a = ((Shares *)arrived[row % 8 * 4 + k % 8 / 2])->a[k / 8 * 4 + row / 8 * 2 + k % 2];
                float16 b = ((Shares *)arrived[column * 4 + k % 8 / 2])->b[k / 8 * 2 + k % 2];
                c += to_float(a) * to_float(b);
            }
        }
}
"""
    body = """Shares mine;
    for (int i = 0; i < 4; i++) mine.c[i] = 1.0f;
    for (int i = 0; i < 8; i++) mine.a[i] = a[(t / 4 + i / 2 % 2 * 8) * 16 + t % 4 * 2 + i % 2 + i / 4 * 8];
    for (int i = 0; i < 4; i++) mine.b[i] = b[(t % 4 * 2 + i % 2 + i / 2 * 8) * 8 + t / 4];
    host::collective(0xffffffff, product, &mine, __LINE__);
    for (int i = 0; i < 4; i++) c[(t / 4 + i / 2 * 8) * 8 + t % 4 * 2 + i % 2] = mine.c[i];"""
    write("mma", body, "float *c, const float16 *a, const float16 *b", before)
    a, b = (np.random.default_rng(0).normal(size=n).astype(np.float16) for n in ((16, 16), (16, 8)))
    c = np.empty((16, 8), np.float32)
    with tg.testing.host_kernels(32, sanitize=True):
        _launch("mma", (1,), (32,), c, a, b)
    np.testing.assert_allclose(c, 1 + a.astype(np.float32) @ b.astype(np.float32), rtol=1e-6, atol=1e-6)


def test_grids_of_three_axes(width, write):
    places = ("threadIdx.x", "threadIdx.y", "threadIdx.z", "blockIdx.x", "blockIdx.y", "blockIdx.z")
    sizes = ("blockDim.x", "blockDim.y", "blockDim.z", "gridDim.x", "gridDim.y", "gridDim.z")
    body = "long long i = 0;\n"
    for place, size in zip(places[::-1], sizes[::-1], strict=True):
        body += f"i = i * {size} + {place};\n"
    write("place", body + "y[i] = 1 + (int)i;\n", "UPDATED int *y")
    for grid, block in (((2, 3, 4), (4, 2, 8)), ((5,), (1024,)), ((2,), (1, 1, 3)), ((1, 2), (96,)), ((0, 2), (64,))):
        y = np.zeros(int(np.prod(grid) * np.prod(block)), np.int32)
        with tg.testing.host_kernels(width, sanitize=True):
            _launch("place", grid, block, y if y.size else np.zeros(1, np.int32))
        assert (y == 1 + np.arange(y.size)).all()


def test_values_of_every_type(write):
    types = {"float": 1.5, "double": 1e-300, "int": -7, "long long": -(2**40), "unsigned": 2**32 - 1, "bool": True}
    types |= {"unsigned long long": 2**64 - 1, "float16": 0.5, "bfloat16": 2.0}
    for number, (c_type, value) in enumerate(types.items()):
        name = f"value{number}"
        write(name, "*y = x;", f"{c_type} *y, {c_type} x")
        y = np.empty(1, kernel.C_TYPES[c_type])
        with tg.testing.host_kernels(sanitize=True):
            _launch(name, (1,), (1,), y, value)
        assert y[0] == value


def test_much_memory(write):
    """A thread's own arrays, up to near the 512 KiB that a GPU allows, and all the shared memory there is."""
    body = """volatile float own[120000];
    DYNAMIC_SHARED(float, tile);
    for (int i = t; i < 56 * 1024; i += 64) tile[i] = own[i] = (float)i;
    __syncthreads();
    y[t] = tile[56 * 1024 - 1 - t] + own[t];"""
    write("much", body, "float *y")
    y = np.empty(64, np.float32)
    with tg.testing.host_kernels(sanitize=True):
        _launch("much", (1,), (64,), y, shared=224 << 10)
    assert (y == 56 * 1024 - 1).all()


# ---- launches


def test_order_is_shuffled(write):
    """Of blocks and of a block's threads: as the seed says, and another in each launch."""
    write("arrive", "if (t == 0) y[blockIdx.x] = atomicAdd(n, 1);\nz[blockIdx.x * 64 + t] = atomicAdd(n + 1, 1);",
          "int *y, int *z, UPDATED int *n")  # fmt: skip

    def orders(seed):
        results = []
        with tg.testing.host_kernels(seed=seed):
            for _ in range(2):
                y, z = np.empty(20, np.int32), np.empty(1280, np.int32)
                _launch("arrive", (20,), (64,), y, z, np.zeros(2, np.int32))
                assert sorted(y) == [*range(20)]
                results += [y.tolist(), z[:64].tolist()]
        return results

    assert orders(0) == orders(0)
    different = orders(0) + orders(2)
    assert all(a != b for i, a in enumerate(different) for b in different[:i])


def test_after_a_mistake(width, write):
    """What stopped in the middle of a block, at a barrier or in a shuffle leaves nothing behind."""
    body = """__shared__ float tile[1];
    if (t == 0) tile[0] = 0.0f;
    __syncthreads();
    if (sin == 1 && t == 9) y[-1] = 0.0f;
    if (sin == 2 && t == 9) return;
    float v = warp_sum(1.0f);
    if (sin == 3 && t == 9) return;
    __syncthreads();
    y[t] = v + tile[0];"""
    write("stops", body, "float *y, int sin")
    with tg.testing.host_kernels(width, sanitize=True):
        for sin, message in ((1, "bytes before y"), (2, "mask names: 9"), (3, "does not reach"), (2, "mask names: 9")):
            for threads in (128, 64, 256):
                y = np.full(threads, 7, np.float32)
                with pytest.raises(KernelError, match=message):
                    _launch("stops", (1,), (threads,), y, sin)
                assert (y == 7).all()
                _launch("stops", (1,), (threads,), y, 0)
                assert (y == width).all()


def test_a_source_that_does_not_compile(write):
    write("broken", "y[t] = nothing;", "float *y")
    with (
        tg.testing.host_kernels(),
        pytest.raises(RuntimeError, match=r"host_kernels: .* failed:\n(.*\n)?broken.cu:4:\d+: error: .*nothing"),
    ):
        _launch("broken", (1,), (1,), np.zeros(1, np.float32))
