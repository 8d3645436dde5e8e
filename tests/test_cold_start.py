"""The first launch on a GPU: an empty cache of compiled kernels, many processes at once, no home to keep it in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tinygrad_gpu as tg

ROOT = Path(__file__).resolve().parents[1]
STEP = """
import tinygrad_gpu as tg, tinygrad_gpu.functional as F
x = tg.ones(3, 70, device="cuda", requires_grad=True)
assert F.softmax(F.layer_norm(F.gelu(x)) @ x.T).sum().item() > 2.9
"""


def start(**environment):
    kept = {k: v for k, v in os.environ.items() if k != "CUPY_CACHE_DIR"}
    environment = {**kept, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", STEP], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


pytestmark = pytest.mark.skipif(not tg.cuda.is_available(), reason="needs a GPU")


def test_eight_cold_processes_at_once(tmp_path):
    processes = [start(CUPY_CACHE_DIR=str(tmp_path / "cache")) for _ in range(8)]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors


def test_a_home_that_is_not_writable(tmp_path):
    """Nor can be made: a file is in its place."""
    home = tmp_path / "home"
    home.write_text("")
    process = start(HOME=str(home), TMPDIR=str(tmp_path))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert any(tmp_path.glob("cupy_cache_*/*"))
