"""What a run makes of the machine, as far as the memory goes; tests/test_configs.py has precision,
compilation and batches.
"""

import pytest
import torch

from builders.auto import resolve_auto
from runtime.machine import MALLOC_VARIABLES
from tests.runs import validated

CPU = torch.device("cpu")


def resolved(*overrides, device=CPU):
    return resolve_auto(validated(*overrides), {}, device, 1)["keep_freed_memory"]


@pytest.fixture
def nothing_chosen(monkeypatch):
    for name in MALLOC_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("saved", ["no", "bf16"])
def test_a_resumed_run_keeps_its_precision(saved):
    """On a machine that would choose the other."""
    assert resolve_auto(validated(), {"mixed_precision": saved}, CPU, 1)["mixed_precision"] == saved


@pytest.mark.usefixtures("nothing_chosen")
def test_freed_memory_is_kept_on_a_cpu_by_default(monkeypatch):
    assert resolved() is True
    assert resolved("train.keep_freed_memory=false") is False
    assert resolved(device=torch.device("cuda")) is False
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "100000")  # the user has told the C library what to do
    assert resolved() is False
    assert resolved("train.keep_freed_memory=true") is True


def test_freed_memory_is_not_kept_by_another_c_library(monkeypatch):
    monkeypatch.setattr("runtime.machine.platform.libc_ver", lambda: ("", ""))
    assert resolved() is False
