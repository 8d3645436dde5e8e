"""What benchmarks share: the spread of repeated timings, and results kept with commit, machine and date."""

import datetime
import json
import platform
import statistics
import subprocess
from pathlib import Path

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
    """The commit that is checked out, with "+" where files differ from it."""
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
