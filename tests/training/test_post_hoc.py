"""Averages of any width from snapshots of two, against closed forms and averages that were kept directly."""

import json
import shutil
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.nn as nn
from safetensors.torch import load_file, save_file

import sample
from tests.runs import composed, tiny_run
from tests.test_runs_from_outside import with_sums
from training.ema.post_hoc import PostHocEMA, PowerEMA, Profile, coefficients, gamma_of, product, reconstruct

PROFILES = [((3.0, 2.0), (5.0, 7.0)), ((5.0, 7.0), (3.0, 2.0)), ((4.0, 1.0), (4.0, 9.0))]
APPLIED, SKIPPED = torch.tensor(0.0), torch.tensor(1.0)


def one(value):
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, value)
    return net


@pytest.mark.parametrize("gamma", [0.5, 3.0, 6.94, 16.97, 40.0])
def test_the_width_of_a_profile_is_its_standard_deviation(gamma):
    """Moments of p(s) = (g + 1) s^g on [0, 1]: E[s] = (g + 1) / (g + 2), E[s^2] = (g + 1) / (g + 3)."""
    std = np.sqrt((gamma + 1) / (gamma + 3) - ((gamma + 1) / (gamma + 2)) ** 2)
    assert gamma_of(std) == pytest.approx(gamma, rel=1e-9)


def test_published_exponents_of_the_two_widths():
    assert gamma_of(0.05) == pytest.approx(16.97, abs=0.01)
    assert gamma_of(0.10) == pytest.approx(6.94, abs=0.01)


@pytest.mark.parametrize(("a", "b"), PROFILES)
def test_the_product_of_profiles_is_the_integral(a, b):
    s = (np.arange(400_000) + 0.5) * min(a[0], b[0]) / 400_000
    values = [(g + 1) / t * (s / t) ** g for t, g in (a, b)]
    integral = (values[0] * values[1]).mean() * min(a[0], b[0])
    assert product(Profile(*a), Profile(*b)) == pytest.approx(integral, rel=1e-6)


def test_the_average_of_a_ramp_has_its_closed_form():
    """With weights w_s = s at step s, the average is the sum of s over the weights of each step."""
    gamma, steps, average = gamma_of(0.1), 50, None
    ema = PowerEMA(one(100.0), 0.1)
    for s in range(1, steps + 1):
        ema.update(one(float(s)), APPLIED)
        beta = (1 - 1 / s) ** (gamma + 1)
        average = s if average is None else beta * average + (1 - beta) * s
    assert ema.net.weight.item() == pytest.approx(average, rel=1e-5), "the initial weights are forgotten"
    # The continuous profile has the mean t (g + 1) / (g + 2); steps shift it by about half a step.
    assert average == pytest.approx(steps * (gamma + 1) / (gamma + 2), abs=0.6)


def test_a_skipped_step_changes_nothing():
    ema = PostHocEMA(one(0.0))
    for s in range(1, 4):
        ema.update(one(float(s)), APPLIED)
    before = deepcopy([ema.state_dict(), ema.wide.state_dict()])
    ema.update(one(7.0), SKIPPED)
    assert [ema.state_dict(), ema.wide.state_dict()] == before


def test_weights_of_late_updates_are_exact():
    """1 - (1 - 1/t)^(g + 1) cancels in fp32."""
    ema = PowerEMA(one(0.0), 0.1)
    for t in (10**5, 10**6, 4 * 10**6):
        ema.num_updates.fill_(t - 1)
        exact = -np.expm1((gamma_of(0.1) + 1) * np.log1p(-1 / t))
        assert ema._weight().item() == pytest.approx(exact, rel=1e-5)


def test_coefficients_minimise_the_distance_of_profiles():
    snapshots = [Profile(t, gamma_of(std)) for t in (4.0, 8.0) for std in (0.05, 0.1)]
    target, s = Profile(8.0, gamma_of(0.15)), (np.arange(80_000) + 0.5) / 10_000

    def profile(p):
        return np.where(s < p.t, (p.gamma + 1) / p.t * (s / p.t) ** p.gamma, 0)

    basis = np.stack([profile(p) for p in snapshots], axis=1)
    best = np.linalg.lstsq(basis, profile(target), rcond=None)[0]
    assert coefficients(snapshots, target) == pytest.approx(best / best.sum(), abs=1e-3)


def test_refused_widths():
    for std in (0.0, 0.3):
        with pytest.raises(ValueError, match=r"must be greater than 0 and at most 0\.28"):
            PowerEMA(one(0.0), std)
    with pytest.raises(ValueError, match=r"ema\.wide_std=1"):
        PostHocEMA(one(0.0), wide_std=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 12 steps with snapshots of every other step."""
    folder = tmp_path_factory.mktemp("post_hoc") / "run"
    tiny_run(folder, "ema=post_hoc", "train.total_steps=12", "train.milestone_every=2", "data.in_channels=3")
    return folder


def test_a_kept_width_is_reconstructed(run):
    for width, name in ((0.05, "ema"), (0.1, "ema_wide")):
        kept = load_file(run / f"checkpoints/step_00000012/{name}.safetensors")
        made = load_file(reconstruct(run, width) / "ema.safetensors")
        assert made.keys() == kept.keys()
        assert all(torch.allclose(made[key], kept[key], atol=1e-6) for key in kept)


def test_another_width_is_near_to_an_average_that_was_kept_directly(run, tmp_path):
    """Constant weights stay; a ramp over time gets the average of the wanted profile."""
    folder, snapshots = tmp_path / "run", range(100, 2001, 100)
    emas = {name: PowerEMA(one(0.0), std) for name, std in (("ema", 0.05), ("ema_wide", 0.1), ("kept", 0.15))}
    for s in range(1, 2001):
        for ema in emas.values():
            ema.update(one(s / 2000), APPLIED)
        if s in snapshots:
            checkpoint = folder / f"checkpoints/step_{s:08d}"
            checkpoint.mkdir(parents=True)
            for name in ("ema", "ema_wide"):
                tensors = {"weight": emas[name].net.weight, "constant": torch.full((2,), 7.0)}
                save_file(tensors, checkpoint / f"{name}.safetensors")
            state = {name: {"num_updates": s, "std": emas[name].std} for name in ("ema", "ema_wide")}
            (checkpoint / "state.json").write_text(json.dumps(state))
            with_sums(checkpoint)
    made = load_file(reconstruct(folder, 0.15) / "ema.safetensors")
    assert made["constant"].tolist() == pytest.approx([7.0, 7.0], abs=1e-5)
    kept = emas["kept"].net.weight.item()
    assert made["weight"].item() == pytest.approx(kept, abs=2e-3)
    assert abs(emas["ema_wide"].net.weight.item() - kept) > 0.02, "it differs from the stored widths"


def test_samples_are_drawn_with_a_width_that_is_made_on_the_way(run):
    out = run.parent / "drawn.npz"
    keys = (f"run={run}", "checkpoint=std.08", "num_samples=2", "num_steps=1", f"out={out}")
    sample.main(composed(*keys, "mixed_precision=no", config_name="sample"))
    assert (run / "checkpoints/step_00000012_std0.08/ema.safetensors").exists()
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["checkpoint"].endswith("step_00000012_std0.08")


@pytest.mark.parametrize(
    ("std", "message"),
    [
        (0.03, r"an average of 6 snapshots .* would be \d+% off this width"),
        (0.5, "std=0.5 must be greater than 0 and at most 0.28"),
    ],
)
def test_wrong_widths_are_refused(run, std, message):
    with pytest.raises(ValueError, match=message):
        reconstruct(run, std)


def test_other_averages_and_damaged_snapshots_are_refused(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    file = copy / "checkpoints/step_00000004/ema_wide.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"step_00000004 is damaged .*: move it away to leave it out"):
        reconstruct(copy, 0.12)
    for checkpoint in (copy / "checkpoints").glob("step_*"):
        if (state_file := checkpoint / "state.json").exists():
            state = json.loads(state_file.read_text())
            del state["ema"]["std"]
            state_file.write_text(json.dumps(state))
            with_sums(checkpoint)
    with pytest.raises(ValueError, match="has no averages of two widths: train with ema=post_hoc"):
        reconstruct(copy, 0.12)
