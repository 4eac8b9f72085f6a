"""What the machine offers."""

import os
import platform
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from runtime.machine import MALLOC_VARIABLES, keep_freed_memory, start_process
from tests.programs import ROOT

COUNT_FAULTS = """
import ctypes, resource, sys, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: of large pages there would be too few to count
from runtime.machine import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
for turn in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.empty(2**24).fill_(1) for _ in range(12)]  # 64 MiB each, or 16,384 pages
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


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
    faults = {}
    for word in ("keep", "return"):
        command = [sys.executable, "-c", COUNT_FAULTS, word]
        environment = {name: value for name, value in os.environ.items() if name not in MALLOC_VARIABLES}
        result = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        faults[word] = int(result.stdout)
    # A small object that came to lie between two freed tensors can cost one of the twelve a fresh place.
    assert faults["keep"] < faults["return"] / 4, "most of the twelve tensors in the pages of those before"
