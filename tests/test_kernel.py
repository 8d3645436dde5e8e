"""The kernel sources are found from a checkout, an editable install and an installed wheel, and read as one text."""

import subprocess
import sys
from pathlib import Path

import pytest

from tinygrad_gpu import kernel

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
