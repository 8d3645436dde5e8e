"""Measure what the parts of a matrix product take on this GPU, and write tinygrad_gpu/ops/gemm_table.py.

Each kernel and tile multiplies two and eight full rounds of tiles of two depths; the times are taken for those of a
launch, a round's begin and end, and its steps along K. Sums of pieces are timed alone.

python benchmarks/tune_gemm.py [--write]
"""

import argparse
import datetime
import functools
import itertools
import math
import sys
from pathlib import Path

import cupy
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import tinygrad_gpu as tg  # noqa: E402
from benchmarks.bench_gemm import normal  # noqa: E402
from benchmarks.harness import copy_ceiling, gpu, milliseconds, side_by_side  # noqa: E402
from tinygrad_gpu import kernel  # noqa: E402
from tinygrad_gpu.ops import gemm, gemm_config  # noqa: E402

ROUNDS, DEPTHS = (2, 8), (768, 3072)
HEAD = '''"""What parts of a matrix product take: written by benchmarks/tune_gemm.py, read by gemm_config.py.

{gpu}, {date}, in microseconds. Of each kernel and tile: a step of its depth along K, and besides all steps of
a piece its begin and end, by where a and b lie ("kn": a along K, b along N). Of pieces' sums: a launch, and a megabyte.
MEMORY: megabytes that memory moves.
"""

'''


def operand(rows, columns, last, dtype):
    return normal(rows, columns, dtype=dtype) if last else normal(columns, rows, dtype=dtype).T


def microseconds(m, n, k, orientation, dtype, choice, out=None):
    a, b = operand(m, k, orientation[0] == "k", dtype), operand(k, n, orientation[1] == "n", dtype)
    c = cupy.empty((m, n), out or dtype)
    return milliseconds(lambda: gemm.product_kernel(c, a, b, choices=(choice,)), 10)["median"] * 1e3


def costs(choice):
    name, label = choice
    tile, dtype = gemm_config.TILES[name][label], tg.float32 if name == "gemm" else tg.bfloat16
    workers = max(int(kernel.limits(cupy.empty(1)).processors * tile.workers), 1)
    found = {}
    for orientation in ("kk", "kn", "mk", "mn"):
        facts, times = [], []
        for rounds, k in itertools.product(ROUNDS, DEPTHS):
            down = next(d for d in range(math.isqrt(rounds * workers), 0, -1) if rounds * workers % d == 0)
            m, n = tile.rows * (rounds * workers // down), tile.columns * down
            times.append(microseconds(m, n, k, orientation, dtype, choice))
            facts.append((1, rounds, rounds * k // tile.depths[dtype.itemsize // 4]))
        weights = 1 / np.array(times)  # relative errors count
        _, piece, step = np.linalg.lstsq(facts * weights[:, None], times * weights)[0]
        found[orientation] = round(float(step), 4), round(max(float(piece), 0.0), 2)
    return found


def of_sums():
    """(a launch, a megabyte): the line through what some products take longer for the sum of their pieces."""
    points = []
    for m, label in itertools.product((768, 2304, 3072), ("128x192", "128x256", "192x192")):
        a, b = operand(m, 32768, False, tg.bfloat16), operand(32768, 768, True, tg.bfloat16)
        c = cupy.empty((m, 768), tg.float32)
        choices = (("gemm_sm90", label),)
        both = gemm.launches(c, a, b, 1.0, 0.0, None, gemm_config.PLAIN, None, choices=choices)

        def run(made):
            for what, arguments in made:
                kernel.launch(what, *arguments)

        alone, together = side_by_side([functools.partial(run, made) for made in (both[:1], both)])
        points.append((both[0][1][3].nbytes / 1e6, (together["median"] - alone["median"]) * 1e3))
    slope, start = np.polyfit(*zip(*points, strict=True), 1)
    print("sums, megabytes and microseconds:", [(round(x), round(y, 1)) for x, y in points])
    return round(float(start), 2), round(float(slope), 3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table, not only print it")
    write = parser.parse_args().write
    table = {(name, label): costs((name, label)) for name, tiles in gemm_config.TILES.items() for label in tiles}
    sums = of_sums()
    text = HEAD.format(gpu=gpu(), date=datetime.date.today().isoformat()) + "COSTS = {\n"
    for (name, label), found in table.items():
        entries = ", ".join(f'"{k}": ({step}, {piece})' for k, (step, piece) in found.items())
        text += f'    ("{name}", "{label}"): {{{entries}}},\n'
    text += f"}}\nSUM = {sums}\nMEMORY = {copy_ceiling() / 1e12:.2f}\n"
    print(text)
    if write:
        (ROOT / "tinygrad_gpu" / "ops" / "gemm_table.py").write_text(text)
