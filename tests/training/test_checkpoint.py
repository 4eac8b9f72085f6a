import argparse
import hashlib
import os
import pickle
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import sample
from builders.network import build_net
from builders.trainer import check_init_from, check_init_shapes
from tests.networks import small_dit
from tests.runs import TINY, composed, tiny_run, validated
from training.checkpoint import CheckpointFolder, latest_checkpoint, steps_in
from training.ema import EMA
from training.run_folder import RunFolder
from training.weights import LABEL_TABLE, load_weights


class Malicious:
    def __reduce__(self):
        return (os.system, ("touch EXECUTED",))


@cache
def other_weights():
    state = small_dit().state_dict()
    return {name: tensor + 1 for name, tensor in state.items()}


class OfficialPrecond(torch.nn.Module):
    """The preconditioning of the public TREAD code, as far as names in its files go."""

    def __init__(self, model):
        super().__init__()
        self.model = model


@pytest.fixture
def gloo(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def official_file(file, net, average, compiled):
    """Save two networks as the public TREAD code does: preconditioned, DDP around what is trained."""
    wrapped = []
    for part in (net, average):
        if compiled:
            part.blocks = torch.nn.ModuleList(torch.compile(block) for block in part.blocks)
        trained = any(parameter.requires_grad for parameter in part.parameters())
        precond = OfficialPrecond(part)
        wrapped.append(torch.nn.parallel.DistributedDataParallel(precond) if trained else precond)
    model, ema = wrapped
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    content = {"model_state_dict": model.state_dict(), "ema_state_dict": ema.state_dict()}
    torch.save({**content, "optimizer_state_dict": optimizer.state_dict(), "step": 7}, file)


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("compiled", [False, True])
def test_an_official_file_gives_its_averaged_weights(tmp_path, compiled):
    average = small_dit()
    average.load_state_dict(other_weights())
    official_file(tmp_path / "latest.pt", small_dit(), average, compiled)
    net = small_dit()
    assert load_weights(net, tmp_path / "latest.pt")["entry"] == "ema_state_dict"
    assert all(torch.equal(tensor, other_weights()[name]) for name, tensor in net.state_dict().items())
    content = torch.load(tmp_path / "latest.pt", weights_only=True)
    torch.save({"model_state_dict": content["model_state_dict"], "step": 7}, tmp_path / "raw.pt")
    assert load_weights(net, tmp_path / "raw.pt")["entry"] == "model_state_dict"
    expected = small_dit().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in net.state_dict().items())


@pytest.mark.usefixtures("gloo")
def test_an_official_file_starts_a_run_and_is_sampled(tmp_path, capsys):
    trainer = tiny_run(tmp_path / "first")
    average = trainer.ema.net
    official_file(tmp_path / "latest.pt", trainer.net, average, compiled=False)
    start = (f"train.init_from={tmp_path / 'latest.pt'}", "optimizer.lr=1e-12")
    start += ("train.init_from_objective=edm",)
    tiny_run(tmp_path / "second", *start, "train.total_steps=1")
    assert f"start      weights of {tmp_path / 'latest.pt'} (ema_state_dict)\n" in capsys.readouterr().out
    expected = {"file": str(tmp_path / "latest.pt"), "entry": "ema_state_dict", "other_objective": False}
    expected |= {"precond": {"_target_": "diffusion.EDMPrecond", "sigma_data": 0.5}, "label_table": True}
    expected["sha256"] = hashlib.sha256((tmp_path / "latest.pt").read_bytes()).hexdigest()
    assert RunFolder(tmp_path / "second").manifest()["init_from"] == expected
    tiny_run(tmp_path / "second", *start, "train.total_steps=2")
    assert RunFolder(tmp_path / "second").manifest()["init_from"] == expected, "also after a resume"
    samples = []
    for name, output in (("first", "one"), ("second", "two")):
        asked = (f"run={tmp_path / name}", "num_samples=4", f"output={tmp_path / output}.npz")
        sample.main(composed(*asked, config_name="sample"))
        samples.append(np.load(tmp_path / f"{output}.npz")["arr_0"].astype(int))
    assert np.abs(samples[0] - samples[1]).max() <= 1
    assert samples[0].std() > 10


@pytest.mark.parametrize(
    ("objective", "chosen", "warned"),
    [
        ("flow", "edm", True),
        ("flow", "flow", False),
        ("sit", "flow", True),
        (None, "flow", True),
        (None, "edm", False),
    ],
)
def test_weights_of_another_objective_start_a_run_with_a_warning(tmp_path, capsys, objective, chosen, warned):
    first = tiny_run(tmp_path / "first", "train.total_steps=1")
    torch.save({"model": first.net.state_dict()}, tmp_path / "DiT.pt")
    capsys.readouterr()
    start = (f"diffusion={chosen}", f"train.init_from={tmp_path / ('DiT.pt' if objective else 'first')}")
    start += (f"train.init_from_objective={objective}",) if objective else ()
    tiny_run(tmp_path / "second", *start, "train.total_steps=1")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("start ")]
    assert ("warning: they were trained as {'_target_': 'diffusion." in line) == warned
    assert RunFolder(tmp_path / "second").manifest()["init_from"]["other_objective"] == warned


def test_a_run_of_other_classes_starts_from_all_but_the_label_table(tmp_path):
    average = tiny_run(tmp_path / "first").ema.net.state_dict()
    start = (f"train.init_from={tmp_path / 'first'}", "train.total_steps=1", "optimizer.lr=1e-12")
    for num_classes in (0, 7):
        asked = (*start, f"data.num_classes={num_classes}")
        told = rf"train.init_from=.*: {LABEL_TABLE} is \(11, 32\), .*data.num_classes={num_classes}"
        with pytest.raises(ValueError, match=f"{told} must be the same, or train"):
            check_init_shapes(validated(*TINY, *asked))
        run = tmp_path / f"{num_classes}"
        net = tiny_run(run, *asked, "train.init_from_label_table=false").net.state_dict()
        assert (LABEL_TABLE in net) == bool(num_classes)
        assert all(torch.allclose(net[name], average[name]) for name in net if name != LABEL_TABLE)
        assert RunFolder(run).manifest()["init_from"]["label_table"] is False
    with pytest.raises(ValueError, match=r"model/size.* must be the same"):
        check_init_shapes(validated(*TINY, start[0], "model.depth=9"))


def test_what_shapes_do_not_tell_of_weights_has_to_agree(tmp_path):
    """Heads of attention, and whether the last row of labels is the null class."""
    tiny_run(tmp_path / "first", "train.total_steps=1")
    with pytest.raises(ValueError, match=r"model.num_heads=2 must be 4, as in train.init_from=.*first"):
        check_init_shapes(validated(*TINY, f"train.init_from={tmp_path / 'first'}", "model.num_heads=2"))
    sizes = ("model.hidden_size=384", "model.depth=4", "model=dit", "train.init_from_objective=edm")
    file = tmp_path / "file.pt"
    asked = (*TINY, *sizes, f"train.init_from={file}", "data.num_classes=10")
    state = build_net(validated(*asked, "model.num_heads=6")).state_dict()
    torch.save({"ema": state, "args": {"num_classes": 10}}, file)
    check_init_shapes(validated(*asked, "model.num_heads=6"))
    with pytest.raises(ValueError, match=r"model.num_heads=3 must be 6, as in train.init_from=.*file.pt"):
        check_init_shapes(validated(*asked, "model.num_heads=3"))
    torch.save({"ema": state, "args": {"num_classes": 11}}, file)
    with pytest.raises(
        ValueError, match=r"data.num_classes=10 must be 11, as train.init_from=.* says, or train.in"
    ):
        check_init_shapes(validated(*asked, "model.num_heads=6"))
    check_init_shapes(validated(*asked, "model.num_heads=6", "train.init_from_label_table=false"))


def test_the_objective_is_required_for_files_and_refused_for_runs(tmp_path):
    run = tiny_run(tmp_path / "first").checkpoints.folder.parent
    torch.save({"model": small_dit().state_dict()}, tmp_path / "weights.pt")
    averaged = latest_checkpoint(run) / "ema.safetensors"
    for file in (tmp_path / "weights.pt", shutil.copy(averaged, tmp_path / "copy.safetensors")):
        with pytest.raises(
            ValueError, match=r"does not say what it predicts: give train\.init_from_objective"
        ):
            check_init_from(str(file), None)
        check_init_from(str(file), "flow")
    for own in (run, averaged.parent, averaged):
        check_init_from(str(own), None)
        with pytest.raises(ValueError, match="init_from_objective=edm must not be given for a run of this"):
            check_init_from(str(own), "edm")


KEYS = [("ema", None), ("ema", "model"), ("ema_state_dict", "model_state_dict")]
KEYS += [("model", None), ("state_dict", None), (None, None)]


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "model.", "module._orig_mod.model."])
@pytest.mark.parametrize(("key", "raw"), KEYS)
def test_published_weights_load_by_name(tmp_path, prefix, key, raw):
    """Averaged ones where raw ones are beside them."""
    weights = {prefix + name: tensor for name, tensor in other_weights().items()}
    # The public training scripts save their arguments as a Namespace beside the weights.
    content = {key: weights, "args": argparse.Namespace(lr=1e-4)} if key else weights
    content |= {raw: small_dit().state_dict(), "opt": {}} if raw else {}
    torch.save(content, tmp_path / "weights.pt")
    net = small_dit()
    assert load_weights(net, tmp_path / "weights.pt")["entry"] == key
    assert all(torch.equal(tensor, other_weights()[name]) for name, tensor in net.state_dict().items())


def test_bad_weights_are_refused_in_one_line(tmp_path):
    net = small_dit()
    save_file(small_dit(depth=9).state_dict(), tmp_path / "deeper.safetensors")
    save_file(small_dit(num_classes=7).state_dict(), tmp_path / "classes.safetensors")
    save_file(other_weights(), tmp_path / "truncated.safetensors")
    os.truncate(tmp_path / "truncated.safetensors", 1000)
    save_file(small_dit(learn_sigma=True).state_dict(), tmp_path / "learn_sigma.safetensors")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "noise.pt").write_bytes(b"noise")
    (tmp_path / "malicious.pt").write_bytes(pickle.dumps({"ema": Malicious()}))
    torch.save({"ema": Malicious()}, tmp_path / "malicious_zip.pt")
    for name, message in (
        ("deeper.safetensors", "weights do not match the model: blocks.8.* the model has None"),
        ("classes.safetensors", r"y_embedder.embedding_table.weight is \(8, 32\), the model has \(11, 32\)"),
        ("learn_sigma.safetensors", "weights do not match the model: final_layer.linear.bias"),
        ("list.pt", "must hold named tensors"),
        ("noise.pt", "is damaged, or holds more than plain tensors"),
        ("malicious.pt", "is damaged, or holds more than plain tensors"),
        ("malicious_zip.pt", "is damaged, or holds more than plain tensors"),
    ):
        with pytest.raises(ValueError, match=message):
            load_weights(net, tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pt not found"):
        load_weights(net, tmp_path / "nowhere.pt")
    assert not Path("EXECUTED").exists()


class Part:
    """A part of a run that keeps one state."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def stepped(net, seed):
    """Return an optimizer of a network after a step."""
    optimizer = torch.optim.AdamW(net.named_parameters(), fused=True)
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    return optimizer


def test_a_checkpoint_restores_its_parts(tmp_path):
    net, other = small_dit(), small_dit()
    other.load_state_dict(other_weights())
    average, note = EMA(other, 0.9, False), Part({"a": [1.5]})
    average.num_updates += 3
    parts = {"net": net, "ema": average, "optimizer": stepped(net, 0), "note": note}
    CheckpointFolder(tmp_path, keep_last=2, milestone_every=None).save(3, parts)
    fresh = small_dit()
    again = {"net": fresh, "ema": EMA(fresh, 0.9, False), "optimizer": stepped(fresh, 1), "note": Part()}
    checkpoint = tmp_path / "step_00000003"
    assert CheckpointFolder(tmp_path, 2, None).load(checkpoint, again) == 3
    for name in ("net", "ema"):
        saved, loaded = parts[name].state_dict(), again[name].state_dict()
        assert all(np.array_equal(value, loaded[key]) for key, value in saved.items())
    for parameter, restored in zip(net.parameters(), fresh.parameters(), strict=True):
        for key, value in parts["optimizer"].state[parameter].items():
            assert torch.equal(value, again["optimizer"].state[restored][key])
    assert again["note"].state == {"a": [1.5]}
    tensors = load_file(checkpoint / "ema.safetensors")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in other_weights().items())


def test_the_last_n_and_the_milestones_are_kept(tmp_path):
    folder = CheckpointFolder(tmp_path, keep_last=2, milestone_every=4)
    for step in range(1, 12):
        folder.save(step, {"net": torch.nn.Linear(1, 1)})
    assert [step for step, _ in steps_in(tmp_path)] == [4, 8, 10, 11]
