"""The checks that CI runs on object files and build logs find what they look for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def run_tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOLS / name, *arguments], capture_output=True, text=True)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(("namespace", "status"), [("cpu::avx2", 0), ("cpu", 1), ("cpu::avx512", 1)])
def test_isa_symbols_must_carry_their_namespace(tmp_path, namespace, status):
    folder = tmp_path / "CMakeFiles" / "cula_gdn_kernels_avx2.dir"
    folder.mkdir(parents=True)
    source = tmp_path / "kernel.cpp"
    source.write_text(
        f"namespace {namespace} {{ template <class T> __attribute__((noinline)) T twice(T x) {{ return x + x; }} }}\n"
        f"namespace cpu::avx2 {{ int entry(int x) {{ return {namespace}::twice(x); }} }}\n"
    )
    subprocess.run(["g++", "-std=c++20", "-c", source, "-o", folder / "kernel.o"], check=True)
    result = run_tool("check_isa_symbols.py", tmp_path)
    assert result.returncode == status, result.stdout + result.stderr
    assert ("twice" in result.stdout) == (status == 1)


def test_isa_symbols_of_nothing_is_an_error(tmp_path):
    assert run_tool("check_isa_symbols.py", tmp_path).returncode == 2


CLEAN = """ptxas info    : Compiling entry function '_Z6kernelv' for 'sm_80'
ptxas info    : Function properties for _Z6kernelv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers
"""
SERIALISED = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...\n"


@pytest.mark.parametrize(
    ("log", "status"),
    [
        (CLEAN, 0),
        (CLEAN.replace("0 bytes spill stores", "8 bytes spill stores"), 1),
        (CLEAN.replace("0 bytes stack frame", "64 bytes stack frame"), 1),
        (CLEAN + SERIALISED, 1),
        ("[1/9] Building CXX object x.o\n", 2),
    ],
)
def test_ptxas_log_is_judged(tmp_path, log, status):
    path = tmp_path / "build.log"
    path.write_text(log)
    result = run_tool("check_ptxas.py", path)
    assert result.returncode == status, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("log", "status"),
    [
        (CLEAN.replace("0 bytes spill stores", "8 bytes spill stores"), 0),
        (CLEAN.replace("0 bytes spill stores", "8 bytes spill stores").replace("sm_80", "sm_90"), 1),
        (CLEAN.replace("0 bytes spill stores", "8 bytes spill stores").replace("sm_80", "sm_90a"), 1),
        (CLEAN + SERIALISED, 1),
    ],
)
def test_ptxas_log_is_judged_for_one_architecture(tmp_path, log, status):
    path = tmp_path / "build.log"
    path.write_text(log)
    result = run_tool("check_ptxas.py", path, "--arch", "sm_90")
    assert result.returncode == status, result.stdout + result.stderr
    assert ("8 B" in result.stdout) == ("8 bytes" in log)
