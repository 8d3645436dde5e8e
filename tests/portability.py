"""Writes docs/portability.md: each kernel on each GPU, what passed there and what it takes.

python -m tests.portability
"""

import contextlib
import platform
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.compilers import Missing, version
from tests.variants import SOURCES, TARGETS, compiled, fault, names
from tinygrad_gpu import kernel

PAGE = Path(__file__).parents[1] / "docs" / "portability.md"

HOSTS = ("host 32", "host 64", "sanitised")
TEXT = """# Where the kernels compile and run

Written by `python -m tests.portability`, on a machine that needs no GPU; tests/test_compile.py and the tests of the ops
check the same at every commit.

- host 32, host 64: tests of the ops in which the kernel ran as C++ on a CPU and passed, with warps of that width;
  sanitised: those of them in which every access was checked for races, bounds and values that nobody wrote.
- A GPU's column: the kernel compiled for it, in variants that the ops launch there (tests/variants.py), by the compiler
  and with the options that CuPy uses; the number is the most registers a thread that one of them takes.
- shared: the most bytes of shared memory that a block takes, static and dynamic; spills: the most bytes that a thread
  keeps outside of its registers, spilled or on a stack.
- A dash: no test, no compiler for it, or no op that launches it there. FAILS: it did not compile, or does not fit.

What was not run: no AMD GPU was at hand, so that the gfx columns say "compiles", no more; of NVIDIA's GPUs the kernels
ran on an H200 (sm_90), where the benchmarks check them too.

"""


class _HostRuns:
    """A plugin of pytest that counts how those tests ended in which a kernel ran on a host build: by kernel, column."""

    def __init__(self):
        self.outcomes, self._launched = defaultdict(Counter), set()

    def pytest_runtest_setup(self):
        self._launched.clear()

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            for key in self._launched:
                self.outcomes[key][report.outcome] += 1

    @contextlib.contextmanager
    def watching(self):
        launch = kernel.launch

        def noted(what, *arguments):
            host = kernel._host
            if host is not None:
                self._launched.add((what.name, f"host {host.warp_size}"))
                if host.sanitize:
                    self._launched.add((what.name, "sanitised"))
            launch(what, *arguments)

        kernel.launch = noted
        try:
            yield
        finally:
            kernel.launch = launch

    def cell(self, name, column):
        outcomes = self.outcomes[name, column]
        return f"FAILS {outcomes['failed']}" if outcomes["failed"] else str(outcomes["passed"] or "-")


def host_runs():
    """The ops' tests on the host build."""
    runs = _HostRuns()
    with runs.watching():
        pytest.main(["tests/ops", "-k", "host32 or host64", "-p", "no:cacheprovider"], plugins=[runs])
    return runs


def versions():
    """{target: what compiles for it} of the targets that something here compiles for."""
    found = {}
    for target in TARGETS:
        with contextlib.suppress(Missing):
            found[target] = version(target)
    return found


def needs(source, name, target):
    """The most registers, shared memory, and spills with stack, that a kernel takes in its variants: an empty list
    where it has none, None where it does not compile or a launch does not fit."""
    try:
        variants = [(launch, n) for launch, n in compiled(source, target) if launch.name == name]
    except RuntimeError:
        return None
    if any(fault(launch, n, target) for launch, n in variants):
        return None
    sizes = ((n.registers, launch.shared + n.shared, n.spills + n.stack) for launch, n in variants)
    return [max(values) for values in zip(*sizes, strict=True)]


def row(source, name, hosts, targets):
    """A kernel's line of the table."""
    found = dict.fromkeys(TARGETS, ()) | {target: needs(source, name, target) for target in targets}
    cells = [hosts.cell(name, column) for column in HOSTS]
    cells += ["FAILS" if n is None else str(n[0]) if n else "-" for n in found.values()]
    for i in (1, 2):
        cells.append(str(max((n[i] for n in found.values() if n), default="-")))
    return f"| {' | '.join((f'`{name}`', *cells))} |"


def main():
    tools, hosts = versions(), host_runs()
    columns = ("kernel", *HOSTS, *TARGETS, "shared", "spills")
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    kernels = {name: source for source in reversed(SOURCES) for name in names(source)}  # of several, the first source
    rows += [row(kernels[name], name, hosts, tools) for name in sorted(kernels)]
    compiler = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True).stdout.strip()
    used = ", ".join(dict.fromkeys((*tools.values(), f"g++ {compiler}", f"Python {platform.python_version()}")))
    PAGE.write_text(TEXT + "\n".join(rows) + f"\n\nTools: {used}.\n")


if __name__ == "__main__":
    main()
