"""What a run makes of the machine: precision and memory; tests/test_configs.py has the rest."""

import json
from types import SimpleNamespace

import pytest
import torch

from builders.auto import resolve_auto
from builders.trainer import _resolve
from runtime.launch import ALONE
from runtime.machine import MALLOC_VARIABLES
from tests.runs import validated
from training.run_folder import RunFolder

CPU = torch.device("cpu")


def resolved(*overrides, device=CPU):
    return resolve_auto(validated(*overrides), {}, device, 1)["keep_freed_memory"]


@pytest.fixture
def nothing_chosen(monkeypatch):
    for name in MALLOC_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_the_first_rank_measures_the_precision_and_the_others_take_it(tmp_path, monkeypatch):
    config, run = validated("train.keep_freed_memory=false"), RunFolder(tmp_path)
    monkeypatch.setattr("runtime.machine.bf16_speedup", lambda device: 2.654)
    monkeypatch.setattr("builders.trainer.bf16_speedup", lambda device: 2.654)
    first = _resolve(config, run, ALONE)
    assert (first["mixed_precision"], first["bf16_speedup"]) == ("bf16", 2.65)
    monkeypatch.setattr("runtime.machine.bf16_speedup", lambda device: pytest.fail("measured again"))
    decided = {key: first[key] for key in ("mixed_precision", "bf16_speedup")}
    collective = {"broadcast_from_main": lambda decide: decided, "assert_ranks_agree": lambda values: None}
    second = SimpleNamespace(device=CPU, world_size=2, **collective)
    assert _resolve(config, run, second).items() >= decided.items()
    (tmp_path / "checkpoints/step_00000001").mkdir(parents=True)
    run.manifest_file.write_text(json.dumps({"resolved": first}))
    assert _resolve(config, run, ALONE) == first, "a resumed run does not measure"


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
