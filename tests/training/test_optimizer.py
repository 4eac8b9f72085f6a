"""Every optimizer of torch steps, skips and resumes as if there were no bad step."""

from copy import deepcopy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

from tests.runs import metrics, tiny_run
from training.muon import muon
from training.optimizer import Optimizer


def torch_optimizer(name, **options):
    return lambda parameters: getattr(torch.optim, name)(parameters, lr=0.01, **options)


OTHERS = ("Adafactor", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
KINDS = {
    "AdamW, fused": torch_optimizer("AdamW", fused=True, weight_decay=0.1),
    "AdamW": torch_optimizer("AdamW", foreach=False, weight_decay=0.1),
    "AdamW, foreach": torch_optimizer("AdamW", foreach=True, amsgrad=True),
    "SGD": torch_optimizer("SGD"),
    "SGD, momentum": torch_optimizer("SGD", momentum=0.9, dampening=0.1, weight_decay=0.1),
    "SGD, fused": torch_optimizer("SGD", momentum=0.9, fused=True),
    "Muon and AdamW": lambda parameters: muon(parameters, lr=0.01, matrices=r"^0\."),
    **{name: torch_optimizer(name) for name in OTHERS},
}
BAD, GOOD = torch.tensor(1.0), torch.tensor(0.0)


def small_net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))


def backward(net, step):
    net.zero_grad()
    net(torch.randn(5, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()


def trained(kind, bad_steps=(), resumed_at=None):
    net = small_net()
    optimizer = Optimizer(KINDS[kind](net.named_parameters()), warmup_steps=3)
    for step in range(6):
        if step == resumed_at:
            state, optimizer = optimizer.state_dict(), Optimizer(KINDS[kind](net.named_parameters()), 3)
            optimizer.load_state_dict(state)
        optimizer.set_rates(step, 6)
        if step in bad_steps:
            before = deepcopy((net.state_dict(), optimizer.state_dict()))
            for _ in range(2):
                backward(net, step)
                for parameter in net.parameters():
                    parameter.grad[0] = torch.nan
                optimizer.step(BAD)
            assert_equal(before, (net.state_dict(), optimizer.state_dict()))
        backward(net, step)
        optimizer.step(GOOD)
    return net.state_dict(), optimizer.state_dict()


def assert_equal(one, other):
    for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_leaves_no_trace(kind):
    """Neither the first step, before the optimizer has a state, nor a later one."""
    whole = trained(kind)
    assert_equal(whole, trained(kind, bad_steps=(0, 3)))
    assert_equal(whole, trained(kind, resumed_at=1))
    assert not torch.equal(whole[0]["0.weight"], small_net()[0].weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("Adafactor", "Adagrad")])
def test_the_host_does_not_wait_for_a_step(kind):
    net = small_net().cuda()
    optimizer = Optimizer(KINDS[kind](net.named_parameters()))
    x = torch.randn(5, 8, device="cuda")
    for skipped in (GOOD.cuda(), BAD.cuda(), GOOD.cuda()):
        net(x).square().mean().backward()
        before = deepcopy((net.state_dict(), optimizer.state_dict()))
        torch.cuda.set_sync_debug_mode("error" if optimizer._stepped else "default")
        try:
            optimizer.step(skipped)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if skipped:
            assert_equal(before, (net.state_dict(), optimizer.state_dict()))


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("kind", ["AdamW, fused", "AdamW", "SGD, momentum", "Muon and AdamW"])
def test_a_step_of_sharded_weights_is_skipped(kind):
    net = small_net()
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    optimizer = Optimizer(KINDS[kind](net.named_parameters()))
    backward(net, 0)
    optimizer.step(GOOD)
    before = [parameter.to_local().clone() for parameter in net.parameters()]
    backward(net, 1)
    optimizer.step(BAD)
    assert_equal(before, [parameter.to_local() for parameter in net.parameters()])
    optimizer.step(GOOD)
    assert not torch.equal(before[0], next(net.parameters()).to_local())


def test_muon_gets_the_matrices_whose_names_match():
    built = muon(small_net().named_parameters(), lr=0.01, matrices=r"^0\.")
    names = {name: part.param_groups[0]["param_names"] for name, part in built.items()}
    assert names == {"muon": ["0.weight"], "adamw": ["0.bias", "2.weight", "2.bias"]}
    with pytest.raises(ValueError, match="empty parameter list"):
        muon(small_net().named_parameters(), lr=0.01, matrices="blocks")


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_sgd_and_muon_train(tmp_path, optimizer):
    options = ("model.init=xavier", "train.log_every=1", "train.total_steps=30", "train.save_every=30")
    tiny_run(tmp_path, f"optimizer={optimizer}", *options)
    losses = [line["loss"] for line in metrics(tmp_path)]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
