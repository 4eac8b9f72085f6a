"""Options that depend on the machine: precision, cores and memory."""

import pytest
import torch
from joblib import cpu_count

from builders.auto import resolve_auto
from runtime.machine import MALLOC_VARIABLES
from tests.runs import validated

CPU = torch.device("cpu")


def resolved(*overrides, saved=None, device=CPU, num_processes=1):
    return resolve_auto(validated(*overrides), saved or {}, device, num_processes).record()


@pytest.fixture(autouse=True)
def unset_malloc_variables(monkeypatch):
    for name in MALLOC_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_a_resumed_run_keeps_its_options():
    for precision, compiled in (("bf16", True), ("no", False)):  # on a machine that would choose one of both
        saved = {"mixed_precision": precision, "compile": compiled, "micro_batch_size": 16}
        assert resolved(saved=saved, num_processes=2).items() > saved.items()
    for written, compiled in (("true", True), ("True", True), ("false", False)):
        fresh = resolved(f"train.compile={written}", "train.mixed_precision=no", num_processes=2)
        assert fresh.items() > {"mixed_precision": "no", "compile": compiled, "micro_batch_size": 16}.items()


def test_micro_batches_shrink_where_processes_cannot_share_the_batch():
    saved = {"mixed_precision": "no", "compile": False, "micro_batch_size": 32}
    assert [resolved(saved=saved, num_processes=n)["micro_batch_size"] for n in (1, 2, 4)] == [32, 16, 8]


def test_no_more_processes_read_ahead_than_there_are_cores():
    most = cpu_count()
    for request, expected in ((0, 0), (most + 7, most)):
        assert resolved(f"train.num_workers={request}", "train.mixed_precision=no")["num_workers"] == expected


def test_the_launcher_may_not_contradict_the_precision(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match="mixed_precision=no gives no here, but the launcher sets fp16"):
        resolved("train.mixed_precision=no")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # the launcher's default
    assert resolved("train.mixed_precision=bf16")


def test_freed_memory_is_kept_on_a_cpu_with_glibc_by_default(monkeypatch):
    fixed, key = "train.mixed_precision=no", "keep_freed_memory"
    assert resolved(fixed)[key] is True
    assert resolved(fixed, "train.keep_freed_memory=false")[key] is False
    assert resolved(fixed, device=torch.device("cuda"))[key] is False
    with monkeypatch.context() as patch:
        patch.setenv("MALLOC_TRIM_THRESHOLD_", "100000")  # the user has configured the C library
        assert resolved(fixed)[key] is False
        assert resolved(fixed, "train.keep_freed_memory=true")[key] is True
    monkeypatch.setattr("runtime.machine.platform.libc_ver", lambda: ("", ""))
    assert resolved(fixed)[key] is False
