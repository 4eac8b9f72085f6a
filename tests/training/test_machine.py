"""What a run makes of the machine, as far as the memory goes; tests/test_configs.py has precision, compilation and batches."""

import subprocess
import sys

import pytest
import torch

from tests.runs import ROOT, validated
from training.machine import MALLOC_VARIABLES, resolve_auto

CPU = torch.device("cpu")
COUNT_FAULTS = """
import resource, sys, torch
from training.machine import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
for turn in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(2**24).fill_(1)  # 64 MiB, or 16,384 pages
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def resolved(*overrides, device=CPU):
    return resolve_auto(validated(*overrides), {}, device, 1)["keep_freed_memory"]


@pytest.fixture
def nothing_chosen(monkeypatch):
    for name in MALLOC_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("nothing_chosen")
def test_freed_memory_is_kept_on_a_cpu_unless_told_otherwise(monkeypatch):
    assert resolved() is True
    assert resolved("train.keep_freed_memory=false") is False
    assert resolved(device=torch.device("cuda")) is False
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "100000")  # the user has told the C library what to do
    assert resolved() is False
    assert resolved("train.keep_freed_memory=true") is True


def test_another_c_library_can_not_be_told(monkeypatch):
    monkeypatch.setattr("training.machine.platform.libc_ver", lambda: ("", ""))
    assert resolved() is False
    with pytest.raises(ValueError, match=r"train\.keep_freed_memory=true needs the C library glibc"):
        resolved("train.keep_freed_memory=true")


def test_kept_memory_is_not_taken_from_the_kernel_again():
    faults = {}
    for word in ("keep", "return"):
        command = [sys.executable, "-c", COUNT_FAULTS, word]
        faults[word] = int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert faults["keep"] < 100
    assert faults["return"] > 10 * (1 + faults["keep"])  # huge pages may make them few
