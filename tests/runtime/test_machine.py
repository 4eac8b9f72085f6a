"""Device, threads, memory, precision and compilation of the machine."""

import os
import platform
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from runtime import machine, openmp
from runtime.machine import MALLOC_VARIABLES, keep_freed_memory, start_process
from tests.programs import ROOT

COUNT_FAULTS = """
import ctypes, resource, sys, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: large pages would be too few to count
from runtime.machine import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
for turn in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.empty(2**24).fill_(1) for _ in range(12)]  # 64 MiB each, or 16,384 pages
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def printed(code, *arguments, environment=None):
    """Run code in a new process, and return what it prints."""
    command = [sys.executable, "-c", code, *arguments]
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "check": True}
    return subprocess.run(command, **options).stdout


def test_a_rank_does_not_wait_for_a_launcher_that_has_died(monkeypatch):
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    launched = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OSError, match=f"the launcher at localhost:{port} has died"):
        start_process()


@pytest.mark.parametrize("libc", [{"mallopt": lambda parameter, value: 0}, {}], ids=["refuses", "has none"])
def test_a_failure_of_mallopt_is_an_error(monkeypatch, libc):
    monkeypatch.setattr("runtime.machine.ctypes.CDLL", lambda name: SimpleNamespace(**libc))
    with pytest.raises(OSError, match=r"mallopt\(-4, 0\) failed: set train\.keep_freed_memory=false"):
        keep_freed_memory()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
@pytest.mark.slow
def test_kept_memory_is_not_taken_from_the_kernel_again():
    unset = {name: os.environ[name] for name in os.environ.keys() - {*MALLOC_VARIABLES}}
    faults = {word: int(printed(COUNT_FAULTS, word, environment=unset)) for word in ("keep", "return")}
    # A small object between two freed tensors can force one of the twelve tensors to take new pages.
    assert faults["keep"] < faults["return"] / 4, "most of the twelve tensors in the pages of those before"


HELD_BY_FREED_TENSORS = """
import psutil, torch
from builders.estimate import free_memory
from runtime.launch import ALONE
from runtime.machine import keep_freed_memory
keep_freed_memory()
tensors = [torch.ones(2**22) for _ in range(32)]  # 16 MiB each
del tensors
before = psutil.Process().memory_info().rss
free_memory(ALONE)
print(before - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
@pytest.mark.slow
def test_kept_memory_counts_as_free_for_the_next_job_of_a_sweep():
    assert int(printed(HELD_BY_FREED_TENSORS)) > 400 * 2**20, "most of the 512 MiB"


@pytest.mark.parametrize(
    ("processor", "fast"),
    [
        ("vendor_id : GenuineIntel\nflags : fpu avx512_bf16 amx_bf16 amx_tile", True),
        ("vendor_id : GenuineIntel\nflags : fpu avx512_bf16", False),
        ("vendor_id : AuthenticAMD\nflags : fpu avx512_bf16", True),
        ("vendor_id : AuthenticAMD\nflags : fpu avx512f", False),
        ("", False),
    ],
)
def test_the_kind_of_processor_decides_whether_bf16_is_fast(monkeypatch, processor, fast):
    monkeypatch.setattr(machine, "cpuinfo", lambda: processor)
    assert machine.has_fast_bf16(torch.device("cpu")) == fast


@pytest.mark.parametrize("name", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_nothing_is_compiled_where_a_variable_switches_it_off(monkeypatch, name):
    monkeypatch.setattr(machine.shutil, "which", lambda program: program)
    monkeypatch.setattr(machine.Path, "exists", lambda path: True)
    monkeypatch.delenv(name, raising=False)
    assert machine.can_compile(torch.device("cpu"))
    monkeypatch.setenv(name, "1")
    assert not machine.can_compile(torch.device("cpu"))


PRINT_ENVIRONMENT = """
import importlib, os, sys
class TorchFinder:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, TorchFinder())
importlib.import_module(sys.argv[1])
"""


MODULES = ["train", "sample", "fid", "data.encode", "examples.finetune", "benchmarks.train_step"]


@pytest.mark.parametrize(
    ("module", "given"), [*((module, {}) for module in MODULES), ("train", {"OMP_WAIT_POLICY": "ACTIVE"})]
)
def test_the_spin_count_is_set_before_torch_is_imported(module, given):
    unset = {name: os.environ[name] for name in os.environ.keys() - {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}}
    expected = "None ACTIVE" if given else f"{openmp.SPIN_COUNT} None"
    assert printed(PRINT_ENVIRONMENT, module, environment=unset | given).strip() == expected


def test_empty_compiled_libraries_are_removed(tmp_path, monkeypatch):
    """Ctrl-C in the first minute of a run may leave an empty library, which later runs would load."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "ab").mkdir()
    for name, content, age_sec in (("killed", b"", 60), ("being_written", b"", 0), ("whole", b"ELF", 60)):
        file = tmp_path / f"ab/{name}.so"
        file.write_bytes(content)
        os.utime(file, 2 * (time.time() - age_sec,))
    machine.compile_blocks([], 0)
    assert {file.stem for file in tmp_path.glob("*/*.so")} == {"being_written", "whole"}
