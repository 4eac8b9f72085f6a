import re
import shutil
from copy import deepcopy
from functools import reduce
from operator import getitem

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from builders.evaluators import GRID_SAMPLES
from runtime.provenance import flatten
from tests.latents import write_latents
from tests.runs import TINY, interrupted, metrics, tiny_run, tiny_trainer, validated
from training.checkpoint import latest_checkpoint, steps_in
from training.fit import run_training
from training.run_folder import RunFolder

VARIANTS = {
    "accumulation": ("train.micro_batch_size=2", "optimizer=sgd"),
    "bf16 and clipping": ("train.mixed_precision=bf16", "train.grad_clip=0.1"),
    "sprint": ("model=sprint", "optimizer.warmup_steps=4"),
    "muon": ("optimizer=muon", "optimizer.warmup_steps=3", "model.init=xavier"),
    "mamba": ("model/block=mamba", "train.mixed_precision=bf16"),
    "rwkv": ("model/block=rwkv", "train.micro_batch_size=2", "optimizer.fused=false"),
    "lightning": ("model/block=lightning", "diffusion=flow", "diffusion.loss.cosine_weight=1"),
    "masking": ("experiment=ablation_masking",),
    "alignment": ("alignment=sra2", "model.inner_head=2", "ema=post_hoc", "train.milestone_every=2"),
    "evaluation": ("train.eval_every=2", "train.sample_every=4", "sampler.num_steps=2"),
}


def write_moments(path, seed):
    """Write posterior moments of an encoder that does not exist."""
    stored = np.random.default_rng(seed).standard_normal((40, 8, 8, 8))
    options = {"kind": "moments", "encoder": "some-vae", "scale": 0.18215, "num_held_out": 10}
    write_latents(path, stored, np.arange(40) % 10, **options)


def files(folder):
    return {file.name: load_file(file) for file in sorted(latest_checkpoint(folder).glob("*.safetensors"))}


def assert_same_run(one, other):
    torch.testing.assert_close(files(one), files(other), rtol=0, atol=0)
    assert metrics(one) == metrics(other), "metrics"


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The folder of an undisturbed run with default options."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    tiny_run(folder)
    return folder


def assert_resumes(folder, whole, capsys, overrides, stop_before):
    """Log points (every 3 steps) and checkpoints (every 2) are at different steps on purpose."""
    trainer, run = tiny_trainer(folder, *overrides)
    interrupted(trainer, run, stop_before)
    assert run.manifest()["status"] == "interrupted"
    assert ("nothing is saved yet" in capsys.readouterr().out) == (stop_before < 2)
    tiny_run(folder, *overrides)
    assert run.manifest()["status"] == "finished"
    assert_same_run(whole, folder)


@pytest.mark.parametrize("stop_before", [1, 3, 5])
def test_an_interrupted_run_resumes_bitwise(tmp_path, whole_run, capsys, stop_before):
    assert_resumes(tmp_path, whole_run, capsys, (), stop_before)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_option_resumes_bitwise(tmp_path, capsys, variant):
    overrides = (*VARIANTS[variant], "train.total_steps=4")
    tiny_run(tmp_path / "whole", *overrides)
    assert_resumes(tmp_path / "stopped", tmp_path / "whole", capsys, overrides, 3)


def test_a_longer_run_continues_a_finished_one_bitwise(tmp_path):
    """Also from an end at which the longer run neither logs nor evaluates."""
    options = ("train.eval_every=4", "ema.warmup=true")
    tiny_run(tmp_path / "whole", *options)
    for total_steps in (2, 5, 6):
        tiny_run(tmp_path / "raised", *options, f"train.total_steps={total_steps}")
        assert metrics(tmp_path / "raised")[-1]["step"] == total_steps
    assert_same_run(tmp_path / "whole", tmp_path / "raised")


def test_total_steps_must_not_fall_below_the_checkpoint(whole_run):
    with pytest.raises(ValueError, match=r"^total_steps=3 must be at least the 6 steps"):
        tiny_trainer(whole_run, "train.total_steps=3")


def test_gradient_checkpointing_may_change_on_resume(tmp_path, whole_run):
    tiny_run(tmp_path, "train.total_steps=4")
    tiny_run(tmp_path, "model.gradient_checkpointing=true")
    assert_same_run(whole_run, tmp_path)


@pytest.mark.parametrize("saved", [False, True])
def test_only_a_folder_with_saved_steps_refuses_a_changed_configuration(tmp_path, saved):
    options = ("train.log_every=1", "train.sample_every=1", "sampler.num_steps=1", "train.save_every=2")
    trainer, run = tiny_trainer(tmp_path, *options)
    interrupted(trainer, run, 3 if saved else 1)
    assert metrics(tmp_path) and list(tmp_path.glob("samples/*.png"))
    if saved:
        shutil.rmtree(tmp_path / "checkpoints/step_00000002")
        RunFolder(tmp_path).update({"status": "stopped"})  # only its metrics are left
        before = metrics(tmp_path, clocks=True)
        with pytest.raises(ValueError, match=r"optimizer\.lr: 0\.0001 -> 0\.01.*run_name=NAME"):
            tiny_trainer(tmp_path, *options, "optimizer.lr=0.01")
        assert metrics(tmp_path, clocks=True) == before
        return
    RunFolder(tmp_path).update({"of_the_first_start": True})
    _, run = tiny_trainer(tmp_path, *options, "optimizer.lr=0.01")
    assert (run.config()["optimizer"]["lr"], metrics(tmp_path)) == (0.01, [])
    assert "of_the_first_start" not in run.manifest() and not list(tmp_path.glob("samples/*.png"))


def test_other_data_are_refused_with_the_same_configuration(tmp_path):
    """The encoder of the moments does not exist: training without samples does not need it."""
    write_moments(tmp_path / "latents", seed=0)
    overrides = ("data=latents", f"data.path={tmp_path / 'latents'}", *TINY[1:], "train.sample_every=null")
    tiny_run(tmp_path / "run", *overrides, "train.total_steps=2")
    shutil.rmtree(tmp_path / "latents")
    write_moments(tmp_path / "latents", seed=1)
    with pytest.raises(ValueError, match="has a run with other data"):
        tiny_trainer(tmp_path / "run", *overrides)


@pytest.mark.parametrize("num_held_out", [0, 64])
def test_a_run_without_held_out_entries_warns(tmp_path, capsys, num_held_out):
    tiny_trainer(tmp_path, f"data.num_held_out={num_held_out}", "train.eval_every=2")
    warned = "no val_loss_dense: the data have no held-out entries" in capsys.readouterr().out
    assert warned == (num_held_out == 0)


def test_metrics_have_a_line_per_log_point_and_the_last_state_is_evaluated_and_saved(tmp_path):
    options = ("train.save_every=1", "train.keep_last=2", "train.milestone_every=3", "train.eval_every=4")
    trainer = tiny_run(tmp_path, *options, "train.total_steps=7", "train.log_every=2")
    assert trainer.step == 7
    assert [step for step, _ in steps_in(tmp_path / "checkpoints")] == [3, 6, 7]
    lines = metrics(tmp_path, clocks=True)
    assert [line["step"] for line in lines if "val_loss_dense" in line] == [4, 7]
    lines = [line for line in lines if "loss" in line]
    assert [(line["step"], line["num_images"]) for line in lines] == [(2, 16), (4, 32), (6, 48), (7, 56)]
    assert all(line["images_per_sec"] > 0 and line["num_skipped_steps"] == 0 for line in lines)
    assert lines[-1]["train_time_sec"] > lines[0]["train_time_sec"] > 0
    manifest = RunFolder(tmp_path).manifest()
    assert manifest["status"] == "finished"
    expected = {"mixed_precision": "no", "compile": False, "micro_batch_size": 8, "attention": "sdpa"}
    assert manifest["resolved"].items() > expected.items()
    assert {"commit", "versions", "device", "command", "data"} <= manifest.keys()


def test_accumulation_sums_to_the_gradient_of_the_batch(tmp_path):
    """Each micro-batch has its own random draws, so the sum is compared with the same micro-batches."""
    trainer, _ = tiny_trainer(tmp_path / "parts", "train.micro_batch_size=2")
    gradients, seen = [], []
    trainer.net.train()
    for batch in next(trainer.batches.from_step(0)):
        trainer.net.zero_grad()
        losses = trainer.loss(trainer.precond, batch.x, batch.class_labels, generator=batch.generator)
        losses.mean().backward()
        gradients.append([parameter.grad.clone() for parameter in trainer.parameters])
    trainer.net.zero_grad()
    trainer.optimizer.step = lambda skipped: seen.extend(p.grad.clone() for p in trainer.parameters)
    trainer.train_step(next(trainer.batches.from_step(0)))
    assert len(gradients) == 4
    for total, *parts in zip(seen, *gradients, strict=True):
        torch.testing.assert_close(total, sum(parts) / 4)


def test_the_average_is_updated_after_the_step(tmp_path):
    trainer, _ = tiny_trainer(tmp_path, "ema.decay=0.5", "optimizer.lr=0.1")
    before = [parameter.clone() for parameter in trainer.ema.net.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.net.parameters(), strict=True))
    trainer.train_step(next(trainer.batches.from_step(0)))
    assert not all(torch.equal(a, b) for a, b in zip(before, trainer.net.parameters(), strict=True))
    for old, new, average in zip(before, trainer.net.parameters(), trainer.ema.net.parameters(), strict=True):
        torch.testing.assert_close(average, (old + new) / 2)


def test_samples_and_losses_use_the_network_in_their_name(tmp_path):
    options = ("train.sample_every=2", "train.eval_every=2", "sampler.num_steps=2", "guidance=cfg")
    trainer, _ = tiny_trainer(tmp_path, *options)
    used = []
    for name, net in (("net", trainer.net), ("average", trainer.ema.net)):
        net.register_forward_pre_hook(lambda _, inputs, name=name: used.append((name, len(inputs[0]))))
    (_, grid), (_, losses) = trainer.evaluators
    grid(2)
    assert set(used) == {("average", 2 * GRID_SAMPLES)}, "guidance evaluates each sample twice"
    for key, name in (("val_loss_dense", "net"), ("val_loss_dense_ema", "average")):
        used.clear()
        losses.denoisers[key](torch.zeros(1, 4, 8, 8), torch.ones(1), torch.zeros(1, dtype=torch.int64))
        assert used == [(name, 1)]


def test_logged_values_are_means_over_the_applied_steps(tmp_path):
    for name, log_every in (("single", 1), ("window", 3)):
        trainer, run = tiny_trainer(tmp_path / name, f"train.log_every={log_every}", "train.total_steps=3")
        loss = trainer.loss
        trainer.loss = lambda *a, trainer=trainer, loss=loss, **k: loss(*a, **k) / (trainer.step != 1)
        run_training(trainer, run)
    (first, skipped, last), (window,) = metrics(tmp_path / "single"), metrics(tmp_path / "window")
    assert skipped["loss"] is None
    for key in ("loss", "grad_norm"):
        assert window[key] == pytest.approx((first[key] + last[key]) / 2)
    assert (window["num_skipped_steps"], window["selection_ratio"]) == (1, 0.5)


def test_a_resume_refuses_what_changes_the_weights(short_run):
    """All keys except these and the groups for pictures and scores."""
    config, free = short_run.config(), set()
    for key in flatten(config):
        changed = deepcopy(config)
        *groups, last = key.split(".")
        reduce(getitem, groups, changed)[last] = "another"
        try:
            short_run.check(changed, short_run.manifest()["data"])
            free.add(key)
        except ValueError as error:
            assert f"{key}: " in str(error)
    free = {key for key in free if not key.startswith(("sampler", "guidance", "evaluation", "tracker"))}
    allowed = {"keep_last", "keep_freed_memory", "max_skipped_steps", "max_time_sec", "num_workers"}
    allowed |= {"total_steps", "log_every", "save_every", "eval_every", "sample_every", "milestone_every"}
    allowed |= {"check_resources", "parallel", "reduce_dtype"}
    allowed = {f"train.{name}" for name in allowed}
    allowed |= {"model.gradient_checkpointing", "decoding", "wait", "output_dir", "run_name", "sweep_metric"}
    assert free == allowed
    assert short_run.is_finished(1) and not short_run.is_finished(2)


def test_a_resume_refuses_what_changes_the_scores(short_run, tmp_path):
    run = RunFolder(shutil.copytree(short_run.path, tmp_path / "run"))
    before, data = run.config(), run.manifest()["data"]
    guided = before | {"guidance": {"guidance_scale": 3.0}}
    run.check(guided, data)  # pictures may change
    scored = {"_target_": "evaluation.DigitsEvaluator", "num_samples": 500, "labels": "random"}
    run.check(before | {"evaluation": scored}, data)  # scores may be added
    run.config_file.write_text(yaml.safe_dump(before | {"evaluation": scored}))
    for key, changed in (
        ("guidance.guidance_scale", guided | {"evaluation": scored}),
        ("evaluation.num_samples", before | {"evaluation": scored | {"num_samples": 100}}),
        ("decoding", before | {"evaluation": scored, "decoding": "official"}),
    ):
        with pytest.raises(ValueError, match=f"{re.escape(key)}: "):
            run.check(changed, data)


def test_the_optimizer_is_as_configured_and_warms_up(tmp_path):
    options = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.1}
    keys = [f"optimizer.{key}={list(value) if key == 'betas' else value}" for key, value in options.items()]
    trainer, _ = tiny_trainer(tmp_path, *keys, "optimizer.warmup_steps=4")
    optimizer, step, rates = trainer.optimizer, trainer.optimizer.step, []
    (group,) = optimizer.groups
    assert {key: tuple(group[key]) if key == "betas" else group[key] for key in options} == options
    assert set(group["params"]) == set(trainer.net.parameters())
    optimizer.step = lambda skipped: rates.append(group["lr"]) or step(skipped)
    trainer.fit()
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])


@pytest.mark.parametrize(
    ("schedule", "end_factor", "expected"),
    [
        ("linear", 0.0, [0.5, 1, 1, 2 / 3, 1 / 3, 0]),
        ("cosine", 0.1, [0.5, 1, 1, 0.1 + 0.9 * 0.75, 0.1 + 0.9 * 0.25, 0.1]),
    ],
)
def test_the_learning_rate_follows_its_schedule(tmp_path, schedule, end_factor, expected):
    keys = ("optimizer.lr=0.01", "optimizer.warmup_steps=2", f"optimizer.schedule={schedule}")
    trainer, run = tiny_trainer(tmp_path, *keys, f"optimizer.end_factor={end_factor}")
    optimizer, step, rates = trainer.optimizer, trainer.optimizer.step, []
    optimizer.step = lambda skipped: rates.append(optimizer.groups[0]["lr"]) or step(skipped)
    trainer.fit()
    assert rates == pytest.approx([0.01 * factor for factor in expected])
    config, data = run.config(), run.manifest()["data"]
    run.check(config, data)
    config["train"]["total_steps"] = 12
    with pytest.raises(ValueError, match=r"train\.total_steps: 6 -> 12"):
        run.check(config, data)


def test_preconditioning_and_loss_are_as_configured(tmp_path):
    options = ("diffusion.sigma_data=0.7", "diffusion.loss.P_mean=-0.4", "train.eval_every=2")
    trainer, _ = tiny_trainer(tmp_path, *options)
    ((_, evaluator),) = trainer.evaluators
    assert [precond.sigma_data for precond in (trainer.precond, *evaluator.denoisers.values())] == [0.7] * 3
    for loss in (trainer.loss, evaluator.loss_fn):
        assert loss.P_mean == -0.4


def test_the_reported_entries_are_the_ones_read(tmp_path):
    options = ("seed=3", "train.micro_batch_size=4")
    trainer, _ = tiny_trainer(tmp_path, *options)
    read = [batch.x for batch in next(trainer.batches.from_step(5))]
    dataset = validated(*TINY, *options).data()
    assert torch.equal(torch.cat(read), dataset.read(np.array(trainer.batches.entries(5)))[0])


def test_dense_evaluation_sees_all_tokens_and_draws_the_same_each_time(tmp_path):
    """Evaluation leaves the average in eval mode: otherwise, samples would be drawn with routes."""
    trainer, _ = tiny_trainer(tmp_path, "train.eval_every=2", "train.sample_every=2", "sampler.num_steps=2")
    (_, grid), (_, evaluator) = trainer.evaluators
    trainer.net.train()
    lengths = set()
    trainer.net.blocks[3].register_forward_pre_hook(lambda _, inputs: lengths.add(inputs[0].shape[1]))
    first, _, second = evaluator(2), grid(2), evaluator(4)
    assert first == second
    assert {key.partition("/")[0] for key in first} == {"val_loss_dense", "val_loss_dense_ema"}
    assert lengths == {16}
    assert not any(module.training for module in trainer.ema.net.modules())
    trainer.train_step(next(trainer.batches.from_step(0)))
    assert all(module.training for module in trainer.net.modules())


def test_clipping_bounds_the_gradient(tmp_path):
    clipped, _ = tiny_trainer(tmp_path, "train.grad_clip=1e-3", "train.total_steps=2")
    norms, step, norm = [], clipped.optimizer.step, torch.nn.utils.get_total_norm
    clipped.optimizer.step = lambda bad: norms.append(norm([p.grad for p in clipped.parameters])) or step(bad)
    clipped.fit()
    assert max(norms) < 1.001e-3
    assert min(line["grad_norm"] for line in metrics(tmp_path)) > 0.01, "logged before clipping"


def test_golden_loss(tmp_path):
    """Processors differ by rounding. Without the zeros of adaLN-Zero, every part of the network counts."""
    tiny_run(tmp_path, "train.log_every=1", "optimizer.lr=1e-3", "model.init=xavier")
    golden = [2.1746294498443604, 2.247926712036133, 2.1053473949432373]
    golden += [2.2302377223968506, 1.9560341835021973, 2.22166109085083]
    assert [line["loss"] for line in metrics(tmp_path)] == pytest.approx(golden, rel=1e-4)


def test_drawn_tokens_depend_only_on_seed_step_and_micro_batch(tmp_path):
    """The initial weights depend only on the seed."""

    def drawn(folder, *overrides):
        trainer, _ = tiny_trainer(tmp_path / folder, "train.micro_batch_size=4", *overrides)
        weight, ids, router = trainer.net.blocks[0].attn.proj.weight.clone(), [], trainer.net.router
        trainer.net.router = lambda *args, **kwargs: ids.append(router(*args, **kwargs)) or ids[-1]
        for _, batches in zip(range(2), trainer.batches.from_step(0), strict=False):
            trainer.train_step(batches)
        return weight, [tuple(x.flatten().tolist()) for x in ids]

    weight, first = drawn("one")
    assert len(first) == len(set(first)) == 4
    (same, second), (other, third) = drawn("two", "optimizer.lr=1e-2"), drawn("three", "seed=1")
    assert second == first and not set(third) & set(first)
    assert torch.equal(same, weight) and not torch.equal(other, weight)


def test_a_route_schedule_lowers_the_ratio_in_levels_and_ends_dense(tmp_path):
    schedule = ("routing.schedule=linear", "routing.end_factor=0.5", "routing.num_levels=2")
    options = ("train.log_every=1", "routing.off_last_steps=2")
    trainer, _ = tiny_trainer(tmp_path / "run", *schedule, *options)
    lengths = []
    trainer.net.blocks[3].register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    trainer.fit()
    assert lengths == [8, 8, 12, 12, 16, 16]
    assert [line["selection_ratio"] for line in metrics(tmp_path / "run")] == [0.5, 0.5, 0.25, 0.25, 0, 0]


def test_total_steps_cannot_change_if_routing_depends_on_them(tmp_path):
    tiny_run(tmp_path, "routing.off_last_steps=2", "train.total_steps=3")
    with pytest.raises(ValueError, match=r"train\.total_steps: 3 -> 8"):
        tiny_trainer(tmp_path, "routing.off_last_steps=2", "train.total_steps=8")


def test_a_dense_finetune_starts_from_the_average_of_a_routed_run(tmp_path, short_run):
    finetune = ("experiment=dense_finetune", "data=synthetic")
    with pytest.raises(FileNotFoundError, match="runs/NAME not found"):
        tiny_trainer(tmp_path, *finetune)
    trainer, _ = tiny_trainer(tmp_path, *finetune, f"train.init_from={short_run.path}")
    assert trainer.net.routes == ()
    ema = load_file(latest_checkpoint(short_run.path) / "ema.safetensors")
    for net in (trainer.net, trainer.ema.net):
        assert all(torch.equal(tensor, ema[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_a_run_records_the_cost_of_its_fp32_block(tmp_path, monkeypatch, precision):
    monkeypatch.setattr("builders.trainer.fp32_slowdown", lambda net, device, bf16: 2.5 if bf16 else 1.0)
    options = ("parity=official", f"train.mixed_precision={precision}", "train.total_steps=3")
    run = RunFolder(tiny_run(tmp_path, *options).checkpoints.folder.parent)
    cost = run.manifest()["cost"]
    extra = (2.5 - 1) * cost["fp32_training_flops"] if precision == "bf16" else 0
    without = cost["dense_training_flops"] / cost["routed_training_flops"]
    expected = cost["dense_training_flops"] / (cost["routed_training_flops"] + extra)
    assert cost["predicted_speedup"] == pytest.approx(expected)
    assert (expected < without) == (precision == "bf16")
