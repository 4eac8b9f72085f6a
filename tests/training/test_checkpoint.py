import argparse
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.networks import small_dit
from tests.runs import tiny_run
from training.checkpoint import CheckpointFolder, latest_checkpoint, load_weights, steps_in


class Malicious:
    def __reduce__(self):
        return (os.system, ("touch EXECUTED",))


def other_weights():
    state = small_dit().state_dict()
    return {name: tensor + 1 for name, tensor in state.items()}


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "model.", "module._orig_mod.model."])
@pytest.mark.parametrize("key", ["ema", "model", "state_dict", None])
def test_published_weights_load_by_name(tmp_path, prefix, key):
    weights = {prefix + name: tensor for name, tensor in other_weights().items()}
    # The public training scripts save their arguments as a Namespace beside the weights.
    torch.save({key: weights, "args": argparse.Namespace(lr=1e-4)} if key else weights, tmp_path / "weights.pt")
    net = small_dit()
    load_weights(net, tmp_path / "weights.pt")
    assert all(torch.equal(tensor, other_weights()[name]) for name, tensor in net.state_dict().items())


def test_bad_weights_are_one_clear_error_and_change_nothing(tmp_path):
    net = small_dit()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
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
        ("deeper.safetensors", "the weights are not of this network .*: missing .*, not known .*blocks.8"),
        ("classes.safetensors", r"y_embedder.embedding_table.weight has shape \(8, 32\), the network's is \(11, 32\)"),
        ("truncated.safetensors", "is truncated or no safetensors file"),
        ("learn_sigma.safetensors", "final_layer.linear.weight has shape .* need model.learn_sigma=true"),
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
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_a_checkpoint_gives_back_what_was_saved(tmp_path):
    net = small_dit()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    folder = CheckpointFolder(tmp_path, keep_last=2, milestone_every=None)
    folder.save(3, net, small_dit(), optimizer, {"note": [1.5]})
    fresh = small_dit()
    fresh_optimizer = torch.optim.AdamW(fresh.parameters(), fused=True)
    state = folder.load(tmp_path / "step_00000003", fresh, small_dit(), fresh_optimizer, torch.device("cpu"))
    assert (state["step"], state["note"]) == (3, [1.5])
    for parameter, restored in zip(net.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(parameter, restored)
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, fresh_optimizer.state[restored][key])


def test_the_last_n_and_the_milestones_are_kept(tmp_path):
    folder = CheckpointFolder(tmp_path, keep_last=2, milestone_every=4)
    net = torch.nn.Linear(1, 1)
    for step in range(1, 10):
        folder.save(step, net, net, torch.optim.AdamW(net.parameters()), {})
    assert [step for step, _ in steps_in(tmp_path)] == [4, 8, 9]


def test_a_half_written_checkpoint_is_not_seen(tmp_path):
    (tmp_path / "checkpoints" / ".step_00000009.partial").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_00000004").mkdir()
    assert latest_checkpoint(tmp_path).name == "step_00000004"
    assert latest_checkpoint(tmp_path / "nothing") is None


def test_a_run_starts_from_the_average_of_another(tmp_path):
    first = tiny_run(tmp_path / "first")
    second = tiny_run(tmp_path / "second", f"train.init_from={tmp_path / 'first'}", "train.total_steps=1", "optimizer.lr=1e-12")
    for average, parameter in zip(first.ema.net.parameters(), second.net.parameters(), strict=True):
        torch.testing.assert_close(average, parameter, atol=1e-6, rtol=0)
    assert second.step == 1
