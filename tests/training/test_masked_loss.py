"""Masked-loss training: masked tokens never bypass, and the mask weights the loss."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.latents import growing_masks, write_latents
from tests.runs import TINY, metrics, tiny_run, tiny_trainer

MASKED = (*TINY[1:], "model/size=tiny", "train.num_workers=0", "train.masked_loss=true")
MASKED += ("train.log_every=1", "train.sample_every=null")


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    """Write 24 entries of 16 tokens with 0 to 16 masked tokens; return overrides that train on them."""
    folder = tmp_path_factory.mktemp("latents") / "latents"
    stored = np.random.default_rng(0).standard_normal((24, 4, 8, 8))
    write_latents(folder, stored, np.arange(24) % 10, growing_masks(24), dtype="float32", num_held_out=4)
    return ("data=latents", f"data.path={folder}", *MASKED)


def watched(trainer):
    """Record (force_keep, ids_keep) of each forward, and the lengths of the window; return both lists."""
    seen, lengths, router = [], [], trainer.net.router
    trainer.net.router = lambda *a, **k: seen.append((k["force_keep"], router(*a, **k))) or seen[-1][1]
    trainer.net.blocks[3].register_forward_pre_hook(lambda block, args: lengths.append(args[0].shape[1]))
    return seen, lengths


def test_under_grow_every_masked_token_stays_and_k_is_one_per_step(tmp_path, latents):
    options = ("train.micro_batch_size=2", "train.total_steps=12", "train.batch_size=4")
    trainer, _ = tiny_trainer(tmp_path / "run", *latents, *options)
    seen, lengths = watched(trainer)
    trainer.fit()
    for force_keep, ids_keep in seen:
        assert torch.zeros_like(force_keep).scatter(1, ids_keep, True)[force_keep].all()
    by_step = [set(lengths[2 * step : 2 * step + 2]) for step in range(12)]
    assert all(len(step) == 1 for step in by_step)
    assert 1 < len(set.union(*by_step)) <= 5
    lines = metrics(tmp_path / "run")
    assert all(line["num_forced_bypassed"] == 0 for line in lines)
    assert len({line["selection_ratio"] for line in lines}) > 1


def test_under_bypass_k_stays_and_forced_tokens_that_bypass_are_counted(tmp_path, latents):
    options = ("routing.force_keep_overflow=bypass", "train.micro_batch_size=4")
    trainer, _ = tiny_trainer(tmp_path / "run", *latents, *options)
    seen, lengths = watched(trainer)
    trainer.fit()
    assert set(lengths) == {8}
    expected = [int((~torch.zeros_like(f).scatter(1, ids, True) & f).sum()) for f, ids in seen]
    counted = [line["num_forced_bypassed"] for line in metrics(tmp_path / "run")]
    assert counted == [sum(expected[2 * step : 2 * step + 2]) for step in range(6)]
    assert sum(counted) > 0


def test_the_predicted_saving_accounts_for_masks(tmp_path, latents):
    flops = {}
    for overflow in ("bypass", "grow"):
        _, run = tiny_trainer(tmp_path / overflow, *latents, f"routing.force_keep_overflow={overflow}")
        flops[overflow] = run.manifest()["cost"]["routed_training_flops"]
    assert flops["bypass"] < flops["grow"]


@pytest.mark.parametrize("model", ["tread", "dit"])
def test_a_step_weights_the_loss_by_the_mask_and_keeps_what_it_touches(tmp_path, latents, model):
    trainer, _ = tiny_trainer(tmp_path / "run", *latents, f"model={model}")
    stored = next(iter(trainer.batches.read(0)))
    stored.masks[2] = 0
    trainer.batches.read = lambda step: [stored]
    losses, loss = [], trainer.loss
    trainer.loss = lambda *a, **k: losses.append((loss(*a, **k), k)) or losses[-1][0]
    trainer.train_step(next(trainer.batches.from_step(0)))
    ((loss, arguments),) = losses
    assert torch.equal(arguments["mask"], stored.masks)
    touched = torch.nn.functional.max_pool2d(stored.masks, 2).flatten(1) > 0
    assert torch.equal(arguments["routing"].force_keep, touched)
    assert torch.equal(loss.detach() == 0, stored.masks.flatten(1).sum(dim=1) == 0)
    assert 0 < (loss == 0).sum() < len(loss)


def test_the_held_out_loss_is_the_mean_of_masked_errors_over_entries(tmp_path, latents, monkeypatch):
    monkeypatch.setattr("builders.evaluators.EVALUATION_BATCH", 3)  # of four entries
    trainer, _ = tiny_trainer(tmp_path, *latents, "train.eval_every=2")
    ((_, evaluator),) = trainer.evaluators
    seen = []
    precond = evaluator.denoisers["val_loss_dense"]
    denoised = precond.denoised
    precond.denoised = lambda F_x, x, t: seen.append((t, denoised(F_x, x, t))) or seen[-1][1]
    val_loss = evaluator(0)["val_loss_dense"]
    errors = []
    for (_, x, _, masks), (sigma, denoised) in zip(evaluator.batches(), seen, strict=True):
        assert masks.max() == pytest.approx(200 / 255)
        weight = (sigma**2 + 0.5**2) / (sigma * 0.5) ** 2
        squared = weight.view(-1, 1, 1, 1) * (denoised - x) ** 2 * masks[:, None]
        errors += squared.mean(dim=(1, 2, 3)).tolist()
    assert len(errors) == 4
    assert val_loss == pytest.approx(np.mean(errors))


def test_a_masked_run_resumes_bitwise(tmp_path, latents):
    for folder, total_steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        tiny_run(tmp_path / folder, *latents, f"train.total_steps={total_steps}")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")


@pytest.mark.parametrize(("overflow", "optimizer"), [("bypass", "adamw"), ("grow", "muon")])
def test_no_tensor_of_a_whole_training_step_reaches_the_host(tmp_path, latents, overflow, optimizer):
    """Fake tensors have no values: reading one fails."""
    options = ("train.grad_clip=0.1", "train.log_every=2", "train.micro_batch_size=4", "ema.warmup=true")
    options += ("model/router=norm", "model.router.weight=0.5")
    options += (f"routing.force_keep_overflow={overflow}", f"optimizer={optimizer}")
    trainer, _ = tiny_trainer(tmp_path / "run", *latents, *options)
    trainer.train_step(next(trainer.batches.from_step(0)))  # the first step reads its batch and result
    loader = iter(trainer.batches.read(1))
    stored = [next(loader), next(loader)]
    trainer.batches.read = lambda step: stored
    with FakeTensorMode(allow_non_fake_inputs=True):
        trainer.train_step(next(trainer.batches.from_step(1)))
        with pytest.raises(DataDependentOutputException):
            trainer.log_training()  # it reads values
