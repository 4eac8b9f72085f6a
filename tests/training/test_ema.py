import pytest
import torch

from training.ema import EMA


def net_with(value):
    net = torch.nn.Linear(1, 1)
    with torch.no_grad():
        net.weight.fill_(value)
        net.bias.fill_(-value)
    return net


@pytest.mark.parametrize("warmup", [False, True])
def test_closed_form(warmup):
    """A skipped step does not count."""
    net = net_with(0.0)
    ema = EMA(net, decay=0.9, warmup=warmup)
    num_updates, expected = 0, 0.0
    for value, skipped in ((1.0, 0), (100.0, 1), (-2.0, 0), (5.0, 0), (3.0, 0)):
        net.load_state_dict(net_with(value).state_dict())
        ema.update(net, torch.tensor(float(skipped)))
        if not skipped:
            decay = min(0.9, (1 + num_updates) / (10 + num_updates)) if warmup else 0.9
            expected = decay * expected + (1 - decay) * value
            num_updates += 1
    assert ema.net.weight.item() == pytest.approx(expected, rel=1e-6)
    assert ema.net.bias.item() == pytest.approx(-expected, rel=1e-6)
    assert ema.num_updates == 4


def test_the_average_is_a_copy_in_eval_mode():
    net = net_with(1.0)
    ema = EMA(net, decay=0.5, warmup=False)
    assert not ema.net.training
    assert not any(parameter.requires_grad for parameter in ema.net.parameters())
    assert ema.net.weight.data_ptr() != net.weight.data_ptr()
