"""What benchmarks share: the spread of repeated timings, and results kept with commit, machine and date."""

import argparse
import datetime
import functools
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


def spread(values):
    """Median, 20th and 80th percentile."""
    cuts = statistics.quantiles(values, n=5, method="inclusive")
    return {"median": statistics.median(values), "p20": cuts[0], "p80": cuts[-1]}


def machine():
    """The processor's name and how many of it there are."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def commit():
    """The commit that is checked out, with "+" where files differ from it; in an archive, which is no repository, what
    COMMIT says."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    git = ["git", "-C", ROOT]
    run = {"capture_output": True, "text": True}
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], **run).stdout.strip() or "unknown"
    return head + ("+" if subprocess.run([*git, "status", "--porcelain"], **run).stdout.strip() else "")


def keep(name, results):
    """Write results (a dict) to results/NAME.json with commit, machine and date."""
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    stamp = {"commit": commit(), "machine": machine(), "date": datetime.date.today().isoformat()}
    path.write_text(json.dumps({**stamp, **results}, indent=2) + "\n")
    return path


# ---- on a GPU; CuPy and PyTorch are imported where they are used, since benchmarks of the CPU need neither


class Case(NamedTuple):
    """One line of a GPU benchmark: what is timed, as functions of nothing that queue their work, ours and peers'
    (name: function), the bytes through memory or the operations at the least, and `check`, which gives the largest
    error of ours and what it may be. Of the lines of a group the geometric mean is taken of peers' times over ours."""

    label: str
    ours: Callable
    peers: dict
    check: Callable
    bytes: float = 0
    flops: float = 0
    group: str = ""


@functools.cache
def _flusher():
    import cupy

    return cupy.empty(1 << 30, cupy.uint8)  # twenty times the L2 of an H200


def milliseconds(run, rounds=30):
    """The spread of the time of run() on the GPU. Before each round 1 GiB is written, which empties the L2 cache and
    gives the CPU 0.3 ms to queue the launches of the round: they are timed without gaps, ours and peers' alike."""
    return side_by_side([run], rounds)[0]


def side_by_side(runs, rounds=30):
    """The spreads of several, of which each has its turn in each round: a GPU's clock depends on what it did before."""
    import cupy

    for run in runs:
        for _ in range(3):
            run()
    buffer = _flusher()
    events = [[(cupy.cuda.Event(), cupy.cuda.Event()) for _ in runs] for _ in range(rounds)]
    for turn in events:
        for run, (start, end) in zip(runs, turn, strict=True):
            buffer.fill(0)
            start.record()
            run()
            end.record()
    cupy.cuda.runtime.deviceSynchronize()
    times = [[cupy.cuda.get_elapsed_time(*pair) for pair in turn] for turn in events]
    return [spread(each) for each in zip(*times, strict=True)]


@functools.cache
def copy_ceiling():
    """Bytes a second of a copy of 2 GiB, read and written."""
    import cupy

    a, b = (cupy.empty(1 << 31, cupy.uint8) for _ in range(2))
    a.fill(1)
    time = milliseconds(lambda: cupy.cuda.runtime.memcpyAsync(b.data.ptr, a.data.ptr, a.nbytes, 3, 0), 10)
    return 2 * a.nbytes / time["median"] * 1e3


@functools.cache
def gemm_ceiling(dtype):
    """Operations a second of an 8192 x 8192 x 8192 product by the vendor's library, dtype's arithmetic."""
    import cupy

    a, b = (cupy.random.standard_normal((8192, 8192), dtype=cupy.float32).astype(dtype) for _ in range(2))
    return 2 * 8192**3 / milliseconds(lambda: a @ b, 10)["median"] * 1e3


def gpu():
    """The GPU's name."""
    import cupy

    return cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()


def compare(name, cases, keep_results, ceiling=None, with_peers=True):
    """Check and time the cases, print a line for each, and keep all if asked for. Stops at a wrong result."""
    lines, ratios = [], {}
    for case in cases:
        error, bound = case.check()
        if not error <= bound:
            raise SystemExit(f"{name}: {case.label}: the error is {error:.3g}, more than {bound:.3g}")
        runs = case.peers if with_peers else {}
        ours, *others = side_by_side([case.ours, *runs.values()])
        peers = dict(zip(runs, others, strict=True))
        for peer, time in peers.items():
            ratios.setdefault((case.group, peer), []).append(time["median"] / ours["median"])
        line = {"case": case.label, "error": float(error), "ours_ms": ours, "peers_ms": peers}
        text = f"{case.label:44} {ours['median'] * 1e3:9.1f} us"
        if case.bytes:
            line["GB/s"] = case.bytes / ours["median"] / 1e6
            line["of_copy"] = line["GB/s"] * 1e9 / copy_ceiling()
            text += f" {line['GB/s']:6.0f} GB/s {line['of_copy']:4.0%} of copy"
        if case.flops:
            line["TFLOP/s"] = case.flops / ours["median"] / 1e9
            text += f" {line['TFLOP/s']:6.1f} TFLOP/s"
            if ceiling:
                line["of_gemm"] = line["TFLOP/s"] * 1e12 / ceiling
                text += f" {line['of_gemm']:4.0%} of GEMM"
        for peer, time in peers.items():
            text += f" | {peer} {time['median'] * 1e3:.1f} us ({time['median'] / ours['median']:.2f}x)"
        print(text, flush=True)
        lines.append(line)
    means = {f"{group}: {peer}".lstrip(": "): statistics.geometric_mean(r) for (group, peer), r in ratios.items()}
    for what, mean in means.items():
        print(f"{what}: {mean:.3f}x on the geometric mean")
    results = {"gpu": gpu(), "copy_GB/s": copy_ceiling() / 1e9, "means": means, "cases": lines}
    if ceiling:
        results["gemm_TFLOP/s"] = ceiling / 1e12
    if keep_results:
        print("kept in", keep(name, results))


def main(name, description, cases, ceiling=None):
    """The command line of a GPU benchmark. cases(), and ceiling() if given, are for `compare`: made one by one, only
    once the options are right."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help=f"write benchmarks/results/{name}.json")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="time peers as well")
    options = parser.parse_args()
    compare(name, cases(), options.keep, ceiling and ceiling(), options.peers)


def as_torch(array):
    """A CuPy array as a PyTorch tensor of the same memory."""
    import torch

    return torch.from_dlpack(array)


def distance(found, exact):
    """|found - exact| / |exact| in float64, of CuPy arrays; inf where a value is not finite."""
    import cupy

    found, exact = found.astype(cupy.float64), exact.astype(cupy.float64)
    value = float(cupy.linalg.norm((found - exact).ravel()) / cupy.linalg.norm(exact.ravel()))
    return value if value == value else float("inf")
