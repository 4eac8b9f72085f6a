"""Guarantees of a training: a step of NaN is skipped, no step waits for the device, a kill loses nothing."""

import json
import math
import os
import re
import signal
import traceback
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from safetensors.torch import load_file, save_file

import train
from benchmarks.processes import CONTEXT
from benchmarks.runs import Setting, build, overrides_of, perturb, write_latents
from runtime.config import compose_config
from runtime.provenance import PROJECT
from tests.gpu.test_precision import BATCH_SIZE, CPU, TINY, relative
from training.trainer import Trainer

COVERAGE, CUDA = 0.25, torch.device("cuda")
TOTAL_STEPS, SAVE_EVERY, KILL_STEP = 8, 4, 6
# Of two runs on CUDA, some of whose kernels add up in any order. On a CPU, S/2 is parted by 3e-5, 1e-8 and
# 6e-7 where noise of a thousandth of their size is added to gradients, and by 1e-3, 4e-7 and 3e-4 where the
# optimizer forgets its state.
RUN_BOUNDS = {"weights": 2e-4, "average": 1e-7, "losses": 1e-5}
SPREAD = 5  # times what parts two runs with one seed, a resumed one may be apart


def setting_of(tiny, *overrides, mask_coverage=None):
    """A small training: S/2 at batch 8, or less."""
    # What keeps freed memory would keep it in the tests that follow.
    own = (f"train.batch_size={BATCH_SIZE}", "train.compile=false", "train.keep_freed_memory=false")
    size, side = (TINY, 8) if tiny else (("model/size=s_2",), 32)
    return Setting("check", (*size, *own, *overrides), side, mask_coverage)


def trainer_of(folder, setting):
    """The trainer that train.py would build, on latents of noise and on the device of the process."""
    write_latents(folder / "latents", setting)
    return build(folder, overrides_of(setting, "routed", folder))[0]


@pytest.fixture
def on_device(device, monkeypatch):
    """Let a training use this device, whatever the one before used."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", str(device.type == "cpu").lower())
    PartialState._reset_state()
    yield
    PartialState._reset_state()


@pytest.mark.usefixtures("on_device")
def test_a_step_of_nan_is_skipped(tmp_path, tiny, check):
    trainer = trainer_of(tmp_path, setting_of(tiny))
    perturb(trainer.net)  # fresh weights are mostly zero, and most gradients with them
    check(spoil_one_step(trainer))


def spoil_one_step(trainer):
    """Take a good step, one on NaN latents, and a good one: what moved and what did not."""
    states = []
    for factor, batches in zip((1.0, math.nan, 1.0), trainer.batches.from_step(0), strict=False):
        trainer.train_step(batch._replace(x=factor * batch.x) for batch in batches)
        trainer.step += 1
        states.append(state_of(trainer))
    before, after, at_last = states
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    stayed = [name for name in after if torch.equal(after[name], at_last[name])]
    of = f"of {len(before)} tensors of weights, average and optimizer"
    return [
        (f"{of}, changed by a step of NaN", len(changed), 0),
        (f"{of}, left by the good step after it", len(stayed), 0),
    ]


def state_of(trainer):
    state = {"updates of the average": trainer.ema.num_updates}
    state |= {f"average/{name}": parameter for name, parameter in trainer.ema.net.named_parameters()}
    for name, parameter in trainer.net.named_parameters():
        kept = trainer.optimizer.optimizers["all"].state[parameter]
        state |= {name: parameter, **{f"{key}/{name}": value for key, value in kept.items()}}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(
    ("coverage", "compiled"),
    [(None, "false"), (COVERAGE, "false"), pytest.param(None, "true", marks=pytest.mark.slow)],
)
def test_no_step_waits_for_the_device(tmp_path, device, tiny, check, coverage, compiled):
    """In steps of two micro-batches; waiting is an error of CUDA, and a CPU has nothing to wait for."""
    overrides = (f"train.micro_batch_size={BATCH_SIZE // 2}", f"train.compile={compiled}")
    waited = where_it_waits(trainer_of(tmp_path, setting_of(tiny, *overrides, mask_coverage=coverage)))
    what = f"steps {'without' if coverage is None else 'with'} masks{', compiled' * (compiled == 'true')}"
    check([(f"{what} that waited for the device", float(waited != ""), 0)])
    assert waited == ""


def where_it_waits(trainer):
    """Take steps between two log points: where one, after the first two, waited for the device."""
    batches = trainer.batches.from_step(0)
    for step in range(5):
        with waiting_is_an_error(trainer.launch.device) if step > 1 else nullcontext():
            try:
                trainer.train_step(next(batches))
            except RuntimeError as error:
                frames = traceback.extract_tb(error.__traceback__)
                own = [f for f in frames if f.filename.startswith(f"{PROJECT}/")]
                frame = [f for f in own if "/.venv/" not in f.filename][-1]
                return f"{Path(frame.filename).name}, line {frame.lineno}: {error}"
        trainer.step += 1
    return ""


@contextmanager
def waiting_is_an_error(device):
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.slow
@pytest.mark.usefixtures("on_device")
def test_a_killed_run_resumes(tmp_path, device, tiny, check):
    """As an undisturbed run ends, and as another one with the same seed."""
    # No loader processes: they would outlive a killed run.
    every = ("train.num_workers=0", "train.log_every=2", f"train.save_every={SAVE_EVERY}")
    setting = setting_of(tiny, *every, f"train.total_steps={TOTAL_STEPS}")
    write_latents(tmp_path / "latents", setting)
    overrides = overrides_of(setting, "routed", tmp_path)
    undisturbed, resumed, again = (tmp_path / name for name in ("undisturbed", "resumed", "again"))
    assert train_in_process(resumed, overrides, KILL_STEP) == -signal.SIGKILL
    assert [train_in_process(run, overrides) for run in (undisturbed, resumed, again)] == [0, 0, 0]
    starts = [start["step"] for start in json.loads((resumed / "manifest.json").read_text())["starts"]]
    assert starts == [0, SAVE_EVERY]
    check(compared_runs(undisturbed, resumed, again, device))


def train_in_process(run, overrides, kill_step=None):
    arguments = ([*overrides, f"output_dir={run}"], kill_step, dict(os.environ))
    process = CONTEXT.Process(target=train_here, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def train_here(overrides, kill_step, variables):
    """Train as the command line would; a kill may end the process at a step."""
    os.environ.update(variables)  # the server that forks still has the variables of an earlier test
    train_step = Trainer.train_step

    def killed(trainer, *batches):
        if trainer.step + 1 == kill_step:
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(trainer, *batches)

    Trainer.train_step = killed
    train.main(compose_config(["run_name=benchmark", *overrides]))


def compared_runs(undisturbed, resumed, again, device):
    """Rows that compare runs of one seed, bitwise on a CPU; on CUDA, where some kernels are not
    deterministic, two undisturbed runs give the bound for a resumed one.
    """
    spread, found = differences(undisturbed, again), differences(undisturbed, resumed)
    bounds = spread_bounds = dict.fromkeys(spread, 0.0)
    if device.type == "cuda":
        bounds = {what: max(bound, SPREAD * spread[what]) for what, bound in RUN_BOUNDS.items()}
        spread_bounds = dict.fromkeys(spread, math.inf)
    rows = [(f"two runs with one seed: {what}", spread[what], spread_bounds[what]) for what in spread]
    return rows + [(f"killed and resumed: {what}", found[what], bounds[what]) for what in found]


def differences(wanted, found):
    """The differences of weights, average and logged losses between two runs."""
    errors, checkpoint = {}, f"checkpoints/step_{TOTAL_STEPS:08d}"
    for what, file in (("weights", "net"), ("average", "ema")):
        a, b = (load_file(run / checkpoint / f"{file}.safetensors") for run in (found, wanted))
        errors[what] = relative([a[key] for key in b], list(b.values()))
    logged = ((run / "metrics.jsonl").read_text().splitlines() for run in (found, wanted))
    a, b = (torch.tensor([json.loads(line)["loss"] for line in lines]) for lines in logged)
    errors["losses"] = relative([a], [b])
    return errors


@pytest.fixture
def trainer(tmp_path):
    with torch.random.fork_rng():
        trainer = trainer_of(tmp_path, setting_of(True, "train.mixed_precision=no"))
        perturb(trainer.net)
        yield trainer


def test_a_wrong_skip_is_detected(trainer):
    step = trainer.optimizer.step
    for spoilt, row in ((lambda skipped: step(torch.zeros_like(skipped)), 0), (lambda skipped: None, 1)):
        trainer.optimizer.step = spoilt
        assert spoil_one_step(trainer)[row][1] >= len(trainer.parameters)


def test_the_waiting_line_is_named(trainer):
    def wait():
        raise RuntimeError("called a synchronizing CUDA operation")

    trainer.update_weights = wait
    line = where_it_waits(trainer)
    assert re.fullmatch(r"test_trainings.py, line \d+: called a synchronizing CUDA operation", line)


@pytest.mark.parametrize(
    ("resumed", "again", "exceeded_on"),
    [
        ({"average": 1.01}, {}, ["cpu", "cuda"]),
        ({"loss": 0.51}, {}, ["cpu", "cuda"]),
        ({"weight": 1.04}, {"weight": 1.01}, ["cpu"]),  # as far as CUDA parts two equal runs
        ({"weight": 1.06}, {"weight": 1.01}, ["cpu", "cuda"]),
    ],
)
def test_a_different_final_state_is_detected(tmp_path, resumed, again, exceeded_on):
    runs = {"first": {}, "resumed": resumed, "again": again}
    for name, ends in runs.items():
        checkpoint = tmp_path / name / f"checkpoints/step_{TOTAL_STEPS:08d}"
        checkpoint.mkdir(parents=True)
        for file, key in (("net", "weight"), ("ema", "average")):
            tensors = {"a": torch.ones(100), "b": torch.full((1,), ends.get(key, 1.0))}
            save_file(tensors, checkpoint / f"{file}.safetensors")
        lines = [{"step": 2, "loss": 0.5}, {"step": 4, "loss": ends.get("loss", 0.5)}]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    folders = [tmp_path / name for name in runs]
    for device in (CPU, CUDA):
        exceeded = any(error > bound for _, error, bound in compared_runs(*folders, device))
        assert exceeded == (device.type in exceeded_on)
