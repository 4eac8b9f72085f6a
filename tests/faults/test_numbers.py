"""All processes skip and report losses, gradients and batches that are not finite; too many of them end the
run.
"""

import json

import pytest
import torch
from torch.utils._pytree import tree_leaves

from runtime.errors import UserError
from tests.runs import before_each_step, interrupted, metrics, tiny_run, tiny_trainer
from tests.training.test_trainer import assert_same_run
from training.checkpoint import latest_checkpoint
from training.fit import run_training
from training.window import MAX_NAMED


def poison(trainer, what, steps):
    """Make the loss, gradient or batch of some steps not finite. Losses and batches are bad in the third of
    eight samples.
    """
    loss, to_latents = trainer.loss, trainer.batches.to_latents
    value, bad = {"nan": torch.nan, "inf": torch.inf}[what.split()[0]], torch.tensor(2)

    def spoil_loss(*args, **kwargs):
        spoilt = "loss" in what and trainer.step in steps
        return loss(*args, **kwargs) + torch.zeros(8).index_fill(0, bad, value if spoilt else 0.0)

    def spoil_batch(*args):
        x = to_latents(*args)
        return x.index_fill(0, bad, value) if "batch" in what and trainer.step in steps else x

    def spoil_gradient(gradient):
        return gradient * value if "gradient" in what and trainer.step in steps else gradient

    trainer.loss, trainer.batches.to_latents = spoil_loss, spoil_batch
    trainer.parameters[0].register_hook(spoil_gradient)


@pytest.mark.parametrize("what", ["nan loss", "inf gradient", "inf batch"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_named(tmp_path, what, capsys):
    trainer, run = tiny_trainer(tmp_path / "run", "train.log_every=3")
    poison(trainer, what, {4})
    states = []

    def remember(step):
        tensors = [*trainer.net.parameters(), *trainer.ema.net.parameters(), trainer.ema.num_updates]
        moments = [value for value in tree_leaves(trainer.optimizer.state_dict()) if torch.is_tensor(value)]
        states.append([tensor.detach().clone() for tensor in (*tensors, *moments)])

    before_each_step(trainer, remember)
    run_training(trainer, run)
    remember(6)
    assert all(torch.equal(a, b) for a, b in zip(states[4], states[5], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(states[5], states[6], strict=True))
    assert all(tensor.isfinite().all() for tensor in states[6])
    first, second = metrics(tmp_path / "run")
    assert "skipped_steps" not in first
    (skipped,) = second["skipped_steps"]
    assert (second["num_skipped_steps"], skipped["step"]) == (1, 5)
    batch = trainer.batches.entries(4)
    assert set(skipped["entries"]) <= set(batch)
    if "gradient" not in what:  # the sample at fault comes first
        assert skipped["entries"][0] == batch[2]
    reported = f"step 5: skipped, not finite; largest losses in entries {skipped['entries']}"
    assert reported in capsys.readouterr().out
    assert all(0 < line["loss"] < 10 for line in (first, second))


def test_too_many_skipped_steps_end_the_run_at_the_next_log_point(tmp_path):
    trainer, run = tiny_trainer(
        tmp_path, "train.log_every=4", "train.total_steps=12", "train.max_skipped_steps=3"
    )
    poison(trainer, "nan batch", {5, 6, 7, 8})
    with pytest.raises(UserError) as caught:
        run_training(trainer, run)
    message = str(caught.value)
    batch = trainer.batches.entries(5)
    reason = "no finite loss or gradient in 3 or more consecutive steps, from step 6 on (max_skipped_steps)"
    assert message.startswith(reason)
    assert f"its batch was {batch}" in message
    assert trainer.step == 8
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [4, 8]
    assert [skipped["step"] for skipped in lines[1]["skipped_steps"]] == [6, 7, 8]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["status"] == "failed"
    assert manifest["failure"]["step"] == 6
    assert manifest["failure"]["entries"] == batch
    assert manifest["failure"]["reason"].startswith("NotFinite: no finite loss")


def test_consecutive_skipped_steps_are_counted_across_log_points_and_resumes(tmp_path):
    options = ("train.log_every=2", "train.total_steps=8", "train.save_every=1", "train.max_skipped_steps=4")
    trainer, run = tiny_trainer(tmp_path, *options)
    poison(trainer, "nan batch", range(1, 8))
    interrupted(trainer, run, 3)
    trainer, run = tiny_trainer(tmp_path, *options)
    poison(trainer, "nan batch", range(1, 8))
    with pytest.raises(UserError, match="from step 2 on"):
        run_training(trainer, run)
    assert trainer.step == 6  # steps 2, 3, 4 and 5 are four in a row, step 6 is the next log point


def test_a_checkpoint_amid_skipped_steps_resumes_bitwise(tmp_path):
    options = ("train.log_every=3", "train.save_every=2")
    trainer, run = tiny_trainer(tmp_path / "whole", *options)
    poison(trainer, "inf batch", {3})
    run_training(trainer, run)
    trainer, run = tiny_trainer(tmp_path / "parts", *options)
    poison(trainer, "inf batch", {3})
    interrupted(trainer, run, 4)
    text = (latest_checkpoint(tmp_path / "parts") / "state.json").read_text()
    rows = json.loads(text, parse_constant=pytest.fail)["window"]["rows"]
    assert any(value is None for row in rows[0] for value in row)
    tiny_run(tmp_path / "parts", *options)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_spike_is_logged_with_its_entries_also_after_a_resume(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("training.window.MIN_STEPS", 8)
    options = ("train.log_every=7", "train.total_steps=21", "train.save_every=5", "train.batch_size=8")

    def spoil(trainer):
        loss, spike = trainer.loss, torch.ones(8).index_fill(0, torch.tensor([1, 6]), 400.0)
        trainer.loss = lambda *args, **kwargs: loss(*args, **kwargs) * (spike if trainer.step == 15 else 1)

    trainer, run = tiny_trainer(tmp_path / "whole", *options)
    spoil(trainer)
    run_training(trainer, run)
    (spike,) = [spike for line in metrics(tmp_path / "whole") for spike in line.get("loss_spikes", [])]
    batch = trainer.batches.entries(15)
    assert spike["step"] == 16
    assert spike["loss"] > 20
    assert set(spike["entries"][:2]) == {batch[1], batch[6]}
    assert len(spike["entries"]) == MAX_NAMED
    assert "step 16: loss" in capsys.readouterr().out

    trainer, run = tiny_trainer(tmp_path / "parts", *options)
    spoil(trainer)
    interrupted(trainer, run, 18)
    # The log point has not been reached.
    assert not any("loss_spikes" in line for line in metrics(tmp_path / "parts"))
    trainer, run = tiny_trainer(tmp_path / "parts", *options)
    assert trainer.first_step == 15
    spoil(trainer)
    run_training(trainer, run)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
