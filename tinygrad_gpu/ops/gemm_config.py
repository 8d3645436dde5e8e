"""Which kernel multiplies two matrices, in what tiles, and which worker what: pure functions of shapes and the device.

A worker is a block, or a cluster of blocks, as many as run at one time. kernels_cu/gemm.cuh says how tiles are cut into
units and ranges for them. The kernel, its tile and the cut are those that take least by what gemm_table.py has.
"""

import functools
from typing import NamedTuple

from .. import kernel
from .common import check
from .gemm_table import COSTS, MEMORY, SUM

PLAIN, ADD, GELU, SLOPE = range(4)  # EPILOGUE: what becomes of sums (gemm.cuh)


class Layout(NamedTuple):
    """Of a matrix, or a batch of them: whether it lies along its last axis, not the one before; how many elements an
    access takes, 16 bytes of them or 1; whether sm_90's copy engine can read it."""

    last: bool
    vector: int
    tiled: bool


@functools.cache
def layout(shape, strides, size, misplaced):
    """The Layout of an array of elements of `size` bytes; misplaced: whether its address is no multiple of 16."""
    for axis in (-1, -2):
        others = [s for i, (n, s) in enumerate(zip(shape, strides, strict=True)) if n > 1 and i - len(shape) != axis]
        if strides[axis] == size and shape[axis] * size >= 16 and not misplaced and not any(s % 16 for s in others):
            across = -3 - axis
            tiled = all(s >= 0 for s in others) and (shape[across] == 1 or strides[across] > 0)
            return Layout(axis == -1, 16 // size, tiled)
    return Layout(abs(strides[-1]) <= abs(strides[-2]), 1, False)


class Tile(NamedTuple):
    """A kernel's tile: rows, columns, elements along K of 16 bits and of 32; how many workers a multiprocessor has, of
    how many blocks of how many threads; the most stages of copies; other defines."""

    rows: int
    columns: int
    depths: tuple
    workers: float
    blocks: int
    threads: int
    stages: int
    defines: dict


# Of each kernel, by the name that the table has; an sm_90 tile's is that of one block of its cluster.
TILES = {
    "gemm_sm90": {
        "128x192": Tile(256, 192, (64,), 1 / 2, 2, 384, 4, {"TAKE_TURNS": 1, "GROUPS": 2}),
        "128x256": Tile(256, 256, (64,), 1 / 2, 2, 384, 4, {"TAKE_TURNS": 0, "GROUPS": 2}),
        "192x192": Tile(384, 192, (64,), 1 / 2, 2, 512, 3, {"TAKE_TURNS": 0, "GROUPS": 3}),
        "128x128": Tile(256, 128, (64,), 1 / 2, 2, 384, 6, {"TAKE_TURNS": 1, "GROUPS": 2}),
    },
    "gemm_sm80": {
        "128x256": Tile(128, 256, (64, 32), 1, 1, 256, 4, {"WARPS_M": 2, "WARPS_N": 4}),
        "64x64": Tile(64, 64, (64, 32), 4, 1, 128, 3, {"WARPS_M": 2, "WARPS_N": 2}),
    },
    "gemm": {
        "128x128": Tile(128, 128, (16, 16), 2, 1, 256, 0, {}),
        "64x64": Tile(64, 64, (32, 16), 2, 1, 256, 0, {}),
    },
}


class Cut(NamedTuple):
    """How the tiles of a product are shared among workers, as gemm.cuh has it; `ranges` of `per` steps, the `slots` for
    sums of less than a tile, and the microseconds that all should take."""

    slices: int
    whole: int
    per: int
    ranges: int
    slots: int
    time: float


def cuts(tiles, steps, workers, slot, step, piece, apart=0.0):
    """The Cuts worth trying: no slices, as many as leave no worker two units, and one more; each with units alone, or
    with as many as fill all workers and ranges for what is left.

    slot: megabytes of one; step, piece: as the table has them; apart: what a step takes at least where no two workers
    read the same of a or b, as in ranges.
    """
    most = max(workers // max(tiles, 1), 1)
    for slices in sorted({1, most, most + 1}):
        units, blocks = tiles * slices, -(-steps // slices)
        if slices > 1 and (slices - 1) * blocks >= steps:
            continue  # the last would have nothing
        for whole in {units, units // workers * workers if steps else units}:
            rest = (units - whole) * blocks
            per = -(-rest // workers)
            ranges = -(-rest // per) if rest else 0
            slots = (whole if slices > 1 else 0) + 2 * ranges
            time = -(-whole // workers) * (blocks * step + piece)
            time += per * max(step, apart) + 2 * piece if rest else 0
            # Of a range's two slots most use one.
            time += SUM[0] + SUM[1] * slot * (slots - ranges + units - whole) if slots else 0
            yield Cut(slices, whole, per, ranges, slots, time)


class _Choice(NamedTuple):
    """A kernel's name and tile, its depth and cut, for so many tiles and workers."""

    kernel: str
    tile: Tile
    depth: int
    cut: Cut
    tiles: int
    workers: int


class Plan(NamedTuple):
    """A product's launch, that of the sum of its pieces or None, and what both take: the floats of `parts`; the boxes
    that sm_90's copies of c, a and b have (tma.Tiled), None for others."""

    launch: kernel.Launch
    sum: kernel.Launch | None
    slices: int
    whole: int
    per: int
    parts: int
    boxes: tuple | None


def kernels_for(dtype, k, a, b, c, limits, tf32):
    """The kernels that may multiply operands of these Layouts."""
    if limits.sm < 80 or not k or (dtype.itemsize == 4 and not tf32):
        return ("gemm",)
    tiled = limits.sm == 90 and dtype.itemsize == 2 and a.tiled and b.tiled and c.tiled and c.last
    return ("gemm_sm90", "gemm_sm80") if tiled else ("gemm_sm80",)


@functools.cache
def config(m, n, k, batch, dtype, out, a, b, c, limits, *, tf32=False, choices=None, **epilogue):
    """The Plan of `batch` products (m, k) by (k, n) of `dtype`, their results of `out`; a, b and c are Layouts.

    epilogue: defines for what becomes of the sums: EPILOGUE, TANH, ROW_SUMS. tf32: whether float32 may be rounded to
    that. choices: the (kernel, tile) pairs to choose from, all by default. ValueError where the tiles of a launch
    cannot be counted.
    """
    names = kernels_for(dtype, k, a, b, c, limits, tf32)
    orientation = ("k" if a.last else "m") + ("n" if b.last else "k")
    best = None
    for name, label in choices or [(each, label) for each in names for label in TILES[each]]:
        tile = TILES[name][label]
        if name == "gemm" and tile.rows == 128 and min(a.vector, b.vector) == 1:
            continue  # element by element the registers of the larger do not suffice
        depth = tile.depths[dtype.itemsize // 4]
        tiles, steps = batch * -(-m // tile.rows) * -(-n // tile.columns), -(-k // depth)
        what = f"matmul: {batch} products ({m}, {n}) have {tiles} tiles of {tile.rows} x {tile.columns}, 2^31 or more"
        check(tiles < 2**31, what)
        workers = max(int(limits.processors * tile.workers), 1)
        slot = (tile.rows * tile.columns + tile.rows) * 4e-6
        apart = (tile.rows + tile.columns) * depth * dtype.itemsize * 1e-6 * workers / MEMORY
        for cut in cuts(tiles, steps, workers, slot, *COSTS[name, label][orientation], apart):
            if best is None or cut.time < best.cut.time:
                best = _Choice(name, tile, depth, cut, tiles, workers)
    return _plan(best, dtype, out, a, b, c, limits, epilogue)


def _plan(choice, dtype, out, a, b, c, limits, epilogue):
    name, tile, depth, cut, tiles, workers = choice
    defines = dict(T=dtype, OUT=out, TILE_M=tile.rows, TILE_N=tile.columns, TILE_K=depth, GROUP=8, **tile.defines)
    defines |= {"A_ALONG_K": int(a.last), "B_ALONG_K": int(not b.last), "VEC_C": c.vector if c.last else 1}
    defines |= epilogue
    blocks, shared, boxes = cut.whole + cut.ranges, 0, None
    rows = tile.rows // tile.blocks
    stage = depth * (rows + tile.columns) * dtype.itemsize
    room = limits.shared_memory // max(int(tile.workers), 1) - 2048  # for what is static
    if tile.stages:
        defines["STAGES"] = max(min(tile.stages, room // stage), 2)
        shared = defines["STAGES"] * stage
    if name == "gemm_sm90":
        blocks = min(workers, max(cut.whole, cut.ranges)) * tile.blocks
        # What is left is for results on their way to memory, 2048 bytes at a time for each warp.
        panels = 4 * defines["GROUPS"] * 2048
        buffers = min((room - 1024 - shared) // panels, 4)
        shared += 1024 + buffers * panels
        defines |= {"CLUSTER": tile.blocks, "BUFFERS": buffers}
        of_a = (True, (depth, rows)) if a.last else (False, (64, depth))
        of_b = (True, (64, depth // tile.blocks)) if b.last else (False, (depth, tile.columns // tile.blocks))
        boxes = (True, (128 // out.itemsize, 16)), of_a, of_b
    else:
        defines |= {"VEC_A": a.vector, "VEC_B": b.vector}
    if name == "gemm":
        # As many blocks on a multiprocessor as registers allow without spills.
        defines["BLOCKS"] = 2 if epilogue["EPILOGUE"] <= ADD and not epilogue["ROW_SUMS"] else 1
    launch = kernel.Launch(f"{name}.cu", name, (blocks,), (tile.threads,), shared, **defines)
    total = None
    if cut.slots:
        summed = tiles if cut.slices > 1 else tiles - cut.whole
        total = kernel.Launch(f"{name}.cu", "gemm_sum", (summed * tile.rows * tile.columns // 2048,), (256,), **defines)
    parts = cut.slots * (tile.rows * tile.columns + tile.rows)
    return Plan(launch, total, cut.slices, cut.whole, cut.per, parts, boxes)
