"""Losses, gradients and batches that are not finite are skipped and reported; too many end the run."""

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


def poisoned(folder, what, steps, *overrides):
    """A trainer with a bad loss or batch (third of eight samples) or gradient at some steps; and its run."""
    trainer, run = tiny_trainer(folder, *overrides)
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
    return trainer, run


@pytest.mark.parametrize("what", ["nan loss", "inf gradient", "inf batch"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_named(tmp_path, what, capsys):
    trainer, run = poisoned(tmp_path / "run", what, {4})
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
    options = ("train.log_every=4", "train.total_steps=12", "train.max_skipped_steps=3")
    trainer, run = poisoned(tmp_path, "nan batch", {5, 6, 7, 8}, *options)
    with pytest.raises(UserError) as caught:
        run_training(trainer, run)
    message, batch = str(caught.value), trainer.batches.entries(5)
    reason = "no finite loss or gradient in 3 or more consecutive steps, from step 6 on (max_skipped_steps)"
    assert message.startswith(reason) and f"its batch was {batch}" in message
    assert trainer.step == 8
    lines, manifest = metrics(tmp_path), run.manifest()
    assert [line["step"] for line in lines] == [4, 8]
    assert [skipped["step"] for skipped in lines[1]["skipped_steps"]] == [6, 7, 8]
    expected = {"step": 6, "entries": batch, "reason": f"NotFinite: {message}"}
    assert manifest["status"] == "failed" and manifest["failure"].items() >= expected.items()


def test_consecutive_skipped_steps_are_counted_across_log_points_and_resumes(tmp_path):
    options = ("train.log_every=2", "train.total_steps=8", "train.save_every=1", "train.max_skipped_steps=4")
    interrupted(*poisoned(tmp_path, "nan batch", range(1, 8), *options), 3)
    trainer, run = poisoned(tmp_path, "nan batch", range(1, 8), *options)
    with pytest.raises(UserError, match="from step 2 on"):
        run_training(trainer, run)
    assert trainer.step == 6  # steps 2, 3, 4 and 5 are four in a row, step 6 is the next log point


def test_a_checkpoint_amid_skipped_steps_resumes_bitwise(tmp_path):
    run_training(*poisoned(tmp_path / "whole", "inf batch", {3}))
    interrupted(*poisoned(tmp_path / "parts", "inf batch", {3}), 4)
    text = (latest_checkpoint(tmp_path / "parts") / "state.json").read_text()
    rows = json.loads(text, parse_constant=pytest.fail)["window"]["rows"]
    assert any(value is None for row in rows[0] for value in row)
    tiny_run(tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_spike_is_logged_with_its_entries_also_after_a_resume(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("training.window.MIN_STEPS", 8)

    def spoilt(name):
        options = ("train.log_every=7", "train.total_steps=21", "train.save_every=5")
        trainer, run = tiny_trainer(tmp_path / name, *options)
        loss, spike = trainer.loss, torch.ones(8).index_fill(0, torch.tensor([1, 6]), 400.0)
        trainer.loss = lambda *args, **kwargs: loss(*args, **kwargs) * (spike if trainer.step == 15 else 1)
        return trainer, run

    trainer, run = spoilt("whole")
    run_training(trainer, run)
    (spike,) = [spike for line in metrics(tmp_path / "whole") for spike in line.get("loss_spikes", [])]
    batch = trainer.batches.entries(15)
    assert spike["step"] == 16
    assert spike["loss"] > 20
    assert set(spike["entries"][:2]) == {batch[1], batch[6]}
    assert len(spike["entries"]) == MAX_NAMED
    assert "step 16: loss" in capsys.readouterr().out

    interrupted(*spoilt("parts"), 18)
    # The log point has not been reached.
    assert not any("loss_spikes" in line for line in metrics(tmp_path / "parts"))
    trainer, run = spoilt("parts")
    assert trainer.first_step == 15
    run_training(trainer, run)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
