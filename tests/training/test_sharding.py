"""Sharded trainings compared with whole ones, and checkpoints that pass from one to the other."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from builders.estimate import sharing_processes
from tests.programs import start
from tests.runs import TINY, metrics, tiny_run, tiny_trainer
from tests.test_two_processes import write_inputs
from training.checkpoint import CheckpointFolder, _cause_of, latest_checkpoint
from training.sharding import is_sharded

# The zeros of adaLN-Zero would hide most weights, and a small eps of Adam would amplify rounding errors.
OPTIONS = ("model.init=xavier", "optimizer.lr=1e-3", "optimizer.eps=1e-3", "ema.decay=0.5", "run_name=r")
FSDP = "train.parallel=fsdp"
assert_close = partial(torch.testing.assert_close, rtol=0)


def run_of(folder, num_processes, *overrides, **variables):
    """Train with some processes; return the folder of the run."""
    keys = (*TINY, *OPTIONS, *overrides, f"output_dir={folder}")
    start("train.py", *keys, num_processes=num_processes, variables=variables)
    return folder


def states_of(folder, *overrides):
    """Return the tensors that one process loads from the newest checkpoint."""
    trainer, run = tiny_trainer(folder, *OPTIONS, *overrides)
    run.unlock()
    optimizer = trainer.optimizer.state_dict()["all"]["state"]
    states = [trainer.net.state_dict(), trainer.ema.net.state_dict(), *optimizer.values()]
    assert not any(is_sharded(tensor) for state in states for tensor in state.values())
    return states


CASES = {
    "clipping": ("train.grad_clip=0.1",),
    "sprint": ("model=sprint",),
    "scores": ("data=digits", "evaluation=digits", "train.eval_every=6", "sampler.num_steps=2"),
    "a process without held-out entries": ("train.eval_every=3",),
    "compiled": ("train.compile=true", "train.total_steps=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_fsdp_trains_the_weights_of_ddp(tmp_path, case):
    """Up to the order of summation."""
    keys = (*CASES[case], "train.micro_batch_size=2")
    whole, sharded = run_of(tmp_path / "whole", 2, *keys), run_of(tmp_path / "sharded", 2, *keys, FSDP)
    assert_close(states_of(whole, *keys), states_of(sharded, *keys), atol=1e-5)
    for line, other in zip(metrics(whole), metrics(sharded), strict=True):
        assert line == {key: pytest.approx(value, rel=1e-5) for key, value in other.items()}


@pytest.mark.slow
def test_fifty_steps_of_fsdp_equal_ddp_bitwise(tmp_path):
    """With routes, masks, two micro-batches for each process, and checkpointing of activations."""
    write_inputs(tmp_path)
    keys = ("data=latents", f"data.path={tmp_path / 'latents'}", "train.masked_loss=true")
    keys += ("model.gradient_checkpointing=true", "train.total_steps=50", "train.micro_batch_size=2")
    keys += ("train.log_every=1",)
    whole, sharded = run_of(tmp_path / "whole", 2, *keys), run_of(tmp_path / "sharded", 2, *keys, FSDP)
    lines = [metrics(run) for run in (whole, sharded)]
    norms = [[line.pop("grad_norm") for line in of_run] for of_run in lines]
    assert len(lines[0]) == 50 and lines[0] == lines[1]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)  # summed in another order
    assert_close(states_of(whole, *keys), states_of(sharded, *keys), atol=0)


@pytest.mark.slow
def test_groups_of_two_processes_share_weights_and_sum_gradients(tmp_path):
    whole = run_of(tmp_path / "whole", 4, "train.micro_batch_size=2")
    keys = ("train.micro_batch_size=2", "train.parallel=hsdp")
    groups = run_of(tmp_path / "groups", 4, *keys, LOCAL_WORLD_SIZE="2")
    shards = [load_file(file) for file in latest_checkpoint(groups).glob("shard-*.safetensors")]
    biases = [shard.get("net/final_layer.linear.bias") for shard in shards]
    # 16 outputs: patches of 2x2 and four channels
    assert [len(bias) for bias in biases if bias is not None] == [8, 8], "each copy is shared by two"
    assert_close(states_of(whole, keys[0]), states_of(groups, keys[0]), atol=1e-5)


@pytest.mark.slow
def test_gradients_that_are_summed_in_bf16_are_rounded(tmp_path):
    keys, rounded = ("train.micro_batch_size=2", "train.total_steps=1"), "train.reduce_dtype=bf16"
    norms = [
        metrics(run_of(tmp_path / name, 2, *keys, FSDP, "train.log_every=1", *more))[0]["grad_norm"]
        for name, more in (("fp32", ()), ("bf16", (rounded,)))
    ]
    assert 0 < abs(norms[1] / norms[0] - 1) < 5e-3


@pytest.mark.slow
def test_checkpoints_pass_between_four_sharding_processes_and_one(tmp_path):
    """Four write and one resumes, and the other way round; each loads the weights that the other wrote."""
    short, one_key = "train.total_steps=4", "train.micro_batch_size=2"
    four = run_of(tmp_path / "four", 4, one_key, FSDP, short)
    assert len(list(latest_checkpoint(four).glob("shard-*.safetensors"))) == 4
    tiny_run(tmp_path / "one", *OPTIONS, one_key, short)
    before = states_of(four, one_key, short), states_of(tmp_path / "one", one_key, short)
    assert_close(*before, atol=1e-5)
    tiny_run(four, *OPTIONS, one_key)
    run_of(tmp_path / "one", 4, one_key, FSDP)
    assert_close(states_of(four, one_key), states_of(tmp_path / "one", one_key), atol=1e-5)


def test_an_interrupt_on_one_rank_precedes_a_full_disk():
    full, interrupt = OSError("disk full"), KeyboardInterrupt()
    assert str(_cause_of(CheckpointException("", {0: (full, None), 1: (full, None)}))) == "disk full"
    assert _cause_of(CheckpointException("", {0: (full, None), 1: (interrupt, None)})) is interrupt


@pytest.mark.parametrize(("local", "message"), [("1", "at least 2"), ("3", "divide"), ("0", "positive")])
def test_groups_need_equal_machines_of_several_processes(monkeypatch, local, message):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    with pytest.raises(ValueError, match=f"LOCAL_WORLD_SIZE={local} must .*{message}"):
        sharing_processes(SimpleNamespace(parallel="hsdp"), 4)


def test_a_damaged_shard_fails_the_save(tmp_path):
    folder, partial = CheckpointFolder(tmp_path, 2, None), tmp_path / ".step_00000001.partial"
    partial.mkdir()
    (partial / "shard-00001.safetensors").write_bytes(b"pickled, not safetensors")
    with pytest.raises(OSError, match="header"):
        folder._write(1, partial, {}, {"shard-00001.safetensors": "0"})
    assert not list(tmp_path.iterdir())


def test_one_process_cannot_share_its_weights(tmp_path):
    with pytest.raises(ValueError, match=r"train\.parallel=fsdp needs several processes"):
        tiny_trainer(tmp_path / "run", FSDP)
