import argparse
import hashlib
import shutil
from contextlib import nullcontext
from copy import deepcopy
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from builders.trainer import check_init_from, check_init_shapes
from tests.networks import small_dit
from tests.runs import TINY, tiny_trainer, validated
from training.checkpoint import latest_checkpoint
from training.fit import run_training
from training.weights import LABEL_TABLE, load_weights


@cache
def other_weights():
    return {name: tensor + 1 for name, tensor in small_dit().state_dict().items()}


def official_file(file, net, average):
    """Save two networks like the public TREAD code: compiled and preconditioned, the trained one in DDP."""
    wrapped = []
    for part in (net, average):
        part.blocks = torch.nn.ModuleList(torch.compile(block) for block in part.blocks)
        trained = any(parameter.requires_grad for parameter in part.parameters())
        precond = torch.nn.ModuleDict({"model": part})  # gives the names of the public preconditioning
        wrapped.append(torch.nn.parallel.DistributedDataParallel(precond) if trained else precond)
    model, ema = wrapped
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    content = {"model_state_dict": model.state_dict(), "ema_state_dict": ema.state_dict()}
    torch.save({**content, "optimizer_state_dict": optimizer.state_dict(), "step": 7}, file)
    return content


def assert_equal(net, expected):
    assert all(torch.equal(tensor, expected[name]) for name, tensor in net.state_dict().items())


@pytest.mark.usefixtures("gloo")
def test_an_official_file_starts_a_run_from_its_averaged_weights(tmp_path, capsys):
    trainer, _ = tiny_trainer(tmp_path / "first")
    net, average = trainer.net, trainer.ema.net
    for parameter in average.parameters():
        parameter += 1
    raw, averaged = (deepcopy(part.state_dict()) for part in (net, average))
    content = official_file(tmp_path / "latest.pt", net, average)
    start = (f"train.init_from={tmp_path / 'latest.pt'}", "train.init_from_objective=edm")
    expected = {"file": str(tmp_path / "latest.pt"), "entry": "ema_state_dict", "other_objective": False}
    expected |= {"precond": {"_target_": "diffusion.EDMPrecond", "sigma_data": 0.5}, "label_table": True}
    expected["sha256"] = hashlib.sha256((tmp_path / "latest.pt").read_bytes()).hexdigest()
    trainer, run = tiny_trainer(tmp_path / "second", *start, "train.total_steps=1")
    assert f"start      weights of {tmp_path / 'latest.pt'} (ema_state_dict)\n" in capsys.readouterr().out
    assert_equal(trainer.net, averaged)
    assert_equal(trainer.ema.net, averaged)
    run_training(trainer, run)
    tiny_trainer(tmp_path / "second", *start, "train.total_steps=2")
    assert run.manifest()["init_from"] == expected, "also after a resume"
    torch.save({"model_state_dict": content["model_state_dict"], "step": 7}, tmp_path / "raw.pt")
    assert load_weights(trainer.net, tmp_path / "raw.pt")["entry"] == "model_state_dict"
    assert_equal(trainer.net, raw)


@pytest.mark.parametrize(("objective", "chosen"), [(None, "edm"), (None, "flow"), ("sit", "flow")])
def test_weights_of_another_objective_start_a_run_and_warn(tmp_path, short_run, capsys, objective, chosen):
    warned = chosen == "flow"
    start = [f"diffusion={chosen}", f"train.init_from={tmp_path / 'DiT.pt' if objective else short_run.path}"]
    if objective:
        averaged = load_file(latest_checkpoint(short_run.path) / "ema.safetensors")
        torch.save({"model": averaged}, tmp_path / "DiT.pt")
        start.append(f"train.init_from_objective={objective}")
    _, run = tiny_trainer(tmp_path / "second", *start)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("start ")]
    assert ("warning: they were trained as {'_target_': 'diffusion." in line) == warned
    assert run.manifest()["init_from"]["other_objective"] == warned


def test_a_run_of_other_classes_starts_from_all_but_the_label_table(tmp_path, short_run):
    average = load_file(latest_checkpoint(short_run.path) / "ema.safetensors")
    start = f"train.init_from={short_run.path}"
    for num_classes in (0, 7):
        overrides = (start, f"data.num_classes={num_classes}")
        message = rf"train.init_from=.*: {LABEL_TABLE} is \(11, 32\), .*data.num_classes={num_classes}"
        with pytest.raises(ValueError, match=f"{message} must be the same, or train"):
            check_init_shapes(validated(*TINY, *overrides))
        overrides += ("train.init_from_label_table=false",)
        trainer, run = tiny_trainer(tmp_path / f"{num_classes}", *overrides)
        net = trainer.net.state_dict()
        assert (LABEL_TABLE in net) == bool(num_classes)
        assert all(torch.equal(net[name], average[name]) for name in net if name != LABEL_TABLE)
        assert run.manifest()["init_from"]["label_table"] is False
    with pytest.raises(ValueError, match=r"model/size.* must be the same"):
        check_init_shapes(validated(*TINY, start, "model.depth=9"))


def test_heads_and_classes_that_shapes_do_not_show_must_agree(tmp_path, short_run):
    """The number of heads, and the meaning of the last row of the label table."""
    file = tmp_path / "file.pt"
    options = ("model.hidden_size=384", "model.depth=1", "model=dit", "train.init_from_objective=edm")
    options += (f"train.init_from={file}",)
    state = validated(*TINY, *options, "model.num_heads=6").net().state_dict()
    for num_classes, overrides, message in (
        (10, (f"train.init_from={short_run.path}", "model.num_heads=2"), "num_heads=2 must be 4, as in"),
        (10, (*options, "model.num_heads=6"), None),
        (10, (*options, "model.num_heads=3"), "model.num_heads=3 must be 6, as in train.init_from=.*file.pt"),
        (11, (*options, "model.num_heads=6"), "data.num_classes=10 must be 11, as train.init_from=.* says"),
        (11, (*options, "model.num_heads=6", "train.init_from_label_table=false"), None),
    ):
        torch.save({"ema": state, "args": {"num_classes": num_classes}}, file)
        with nullcontext() if message is None else pytest.raises(ValueError, match=message):
            check_init_shapes(validated(*TINY, *overrides))


def test_the_objective_is_required_for_files_and_refused_for_runs(tmp_path, short_run):
    averaged = latest_checkpoint(short_run.path) / "ema.safetensors"
    torch.save({"model": small_dit().state_dict()}, tmp_path / "weights.pt")
    for file in (tmp_path / "weights.pt", shutil.copy(averaged, tmp_path / "copy.safetensors")):
        with pytest.raises(ValueError, match=r"does not say what it predicts: give train\.init_from_objec"):
            check_init_from(str(file), None)
        check_init_from(str(file), "flow")
    for source in (short_run.path, averaged.parent, averaged):
        check_init_from(str(source), None)
        with pytest.raises(ValueError, match="init_from_objective=edm must not be given for weights of th"):
            check_init_from(str(source), "edm")


# Key of averaged weights, key of raw ones, prefix of names.
KEYS = [("ema", None, ""), ("ema", "model", ""), ("ema_state_dict", "model_state_dict", "module.")]
KEYS += [("model", None, "_orig_mod."), ("state_dict", None, "model.")]
KEYS += [(None, None, "module._orig_mod.model.")]


@pytest.mark.parametrize(("key", "raw", "prefix"), KEYS)
def test_published_weights_load_by_name(tmp_path, prefix, key, raw):
    """Averaged weights, even if the file also has raw ones."""
    weights = {prefix + name: tensor for name, tensor in other_weights().items()}
    # Public training scripts also save their arguments, as a Namespace.
    content = {key: weights, "args": argparse.Namespace(lr=1e-4)} if key else weights
    content |= {raw: small_dit().state_dict(), "opt": {}} if raw else {}
    torch.save(content, tmp_path / "weights.pt")
    net = small_dit()
    assert load_weights(net, tmp_path / "weights.pt")["entry"] == key
    assert_equal(net, other_weights())
