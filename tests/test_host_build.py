"""Which kernels run where, and how the host build compiles and keeps them."""

import contextlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import tinygrad_gpu as tg
from tests.conftest import needs_compiler
from tinygrad_gpu import kernel

pytestmark = needs_compiler


def test_host_kernels():
    """Nested, the inner one counts; each leaves what was in use before, after an error too."""
    with tg.testing.host_kernels(64) as outer:
        assert kernel.limits(np.zeros(1)).warp_size == 64
        with contextlib.suppress(KeyError), tg.testing.host_kernels(32, sanitize=True) as inner:
            assert kernel._host is inner
            assert repr(inner) == "HostBuild(warp_size=32, sanitize=True)"
            raise KeyError
        assert kernel._host is outer
    assert kernel._host is not outer
    with (
        pytest.raises(ValueError, match="host_kernels: warp_size must be 32 or 64, got 16"),
        tg.testing.host_kernels(16),
    ):
        pass


GELU = "import numpy, tinygrad_gpu as tg\nprint(tg.ones(3, dtype=tg.float32, device='cpu').gelu().sum().item())"


def _python(code, **environment):
    environment = {k: v for k, v in (os.environ | environment).items() if v is not None}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    return done.stdout.strip(), done.stderr.strip().split("\n")[-1]


def test_many_processes_build_at_once(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        runs = [
            pool.submit(_python, GELU, TINYGRAD_GPU_KERNELS="host32", XDG_CACHE_HOME=str(tmp_path)) for _ in range(4)
        ]
    assert [run.result() for run in runs] == [(runs[0].result()[0], "")] * 4
    assert runs[0].result()[0].startswith("2.52")
    assert sorted(path.suffix for path in (tmp_path / "tinygrad_gpu").iterdir()) == [".o", ".so"]


def test_a_home_that_cannot_be_written(tmp_path):
    """Its builds are kept in the folder for temporary files, which no other user may have made."""
    out, _ = _python(GELU, TINYGRAD_GPU_KERNELS="host32", XDG_CACHE_HOME="/dev/null/x", TMPDIR=str(tmp_path))
    (folder,) = tmp_path.iterdir()
    assert out.startswith("2.52")
    assert folder.name == f"tinygrad_gpu_{os.getuid()}"
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("host64", "HostBuild(warp_size=64, sanitize=False)"),
        ("host32,sanitize", "HostBuild(warp_size=32, sanitize=True)"),
        ("off", "None"),
        ("", "None"),
        ("gpu", "ValueError: TINYGRAD_GPU_KERNELS: must be off, host32, host64 or host32,sanitize, got 'gpu'"),
        ("host32,fast", "got 'host32,fast'"),
    ],
)
def test_the_environment(setting, expected):
    code = "import tinygrad_gpu; from tinygrad_gpu import kernel; print(kernel._host)"
    out, error = _python(code, TINYGRAD_GPU_KERNELS=setting)
    assert (out or error).endswith(expected)


def test_no_compiler():
    _, error = _python(GELU, TINYGRAD_GPU_KERNELS="host32", PATH="", CXX=None)
    assert error == "RuntimeError: host_kernels: needs a C++ compiler; install g++ (Debian and Ubuntu: apt install g++)"
