"""Checks of programs and trainers for the stage `check`: GPU tests, a skipped step, host syncs, resuming.

Each returns rows: what was checked, the error, its bound, and why it failed.
"""

import io
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import train
from benchmarks.processes import ProcessFailed, start_apart
from benchmarks.results import Rows
from benchmarks.runs import Setting, build, composed, overrides_of, perturb, write_latents
from runtime.provenance import PROJECT
from training.trainer import Trainer

TINY = ("model.hidden_size=32", "model.num_heads=4", "model.depth=7", "model.patch_size=2")
BATCH_SIZE, COVERAGE = 8, 0.25
TOTAL_STEPS, SAVE_EVERY, KILLED_IN = 8, 4, 6
# Of two runs on CUDA, some of whose kernels add up in any order. On a CPU, S/2 is parted by 3e-5, 1e-8 and
# 6e-7 where noise of a thousandth of their size is added to gradients, and by 1e-3, 4e-7 and 3e-4 where the
# optimizer forgets its state.
RUN_BOUNDS = {"weights": 2e-4, "average": 1e-7, "losses": 1e-5}
SPREAD = 5  # times what parts two runs with one seed, a resumed one may be apart


def compared(what: str, error: float, bound: float) -> dict[str, Any]:
    """Return the row of an error; one that is not a number fails, too."""
    failed = "" if error <= bound else "more than the bound"
    return {"what": what, "error": error, "bound": bound, "failed": failed}


def relative(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return the norm of the difference of all tensors over the norm of those that are wanted."""
    wanted = [tensor.detach().cpu().double() for tensor in wanted]
    apart = [a.detach().cpu().double() - b for a, b in zip(found, wanted, strict=True)]
    return (torch.nn.utils.get_total_norm(apart) / torch.nn.utils.get_total_norm(wanted)).item()


def gpu_tests(device: torch.device, tiny: bool) -> Rows:
    """Run the tests that need a GPU, which nothing else runs."""
    tests = (PROJECT / "tests").rglob("test_*.py")
    files = sorted(str(file) for file in tests if "mark.gpu" in file.read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
    result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    if result.returncode:
        print(result.stdout + result.stderr, flush=True)
    return [outcome(result.stdout, result.returncode, device)]


def outcome(said: str, status: int, device: torch.device) -> dict[str, str]:
    """Return the row of the output of pytest; without a GPU all tests may be skipped."""
    last, failed = said.strip().rpartition("\n")[2], ""
    if status:
        failed = f"pytest ended with status {status}"
    elif device.type == "cuda" and " passed" not in last:
        failed = "no test has passed on a GPU"
    return {"what": last, "failed": failed}


@contextmanager
def small_trainer(tiny: bool, *overrides: str, mask_coverage: float | None = None) -> Iterator[Trainer]:
    """Build the trainer that train.py would build, on latents of noise."""
    setting = setting_of(tiny, *overrides, mask_coverage=mask_coverage)
    with tempfile.TemporaryDirectory() as folder:
        write_latents(Path(folder) / "latents", setting)
        yield build(Path(folder), overrides_of(setting, "routed", Path(folder)))[0]


def setting_of(tiny: bool, *overrides: str, mask_coverage: float | None = None) -> Setting:
    """Return a small training: S/2 at batch 8, or less."""
    # What keeps freed memory would keep it in the settings that follow.
    own = (f"train.batch_size={BATCH_SIZE}", "train.compile=false", "train.keep_freed_memory=false")
    size, side = (TINY, 8) if tiny else (("model/size=s_2",), 32)
    return Setting("check", (*size, *own, *overrides), side, mask_coverage)


def skipped_step(device: torch.device, tiny: bool) -> Rows:
    """Train on latents that are not a number for a step."""
    with small_trainer(tiny) as trainer:
        perturb(trainer.net)  # fresh weights are mostly zero, and most gradients with them
        return spoil_one_step(trainer)


def spoil_one_step(trainer: Trainer) -> Rows:
    """Take a good step, one on NaN latents, and a good one; return what moved and what did not."""
    states = []
    for factor, batches in zip((1.0, math.nan, 1.0), trainer.batches.from_step(0), strict=False):
        trainer.train_step(batch._replace(x=factor * batch.x) for batch in batches)
        trainer.step += 1
        states.append(_state(trainer))
    before, after, at_last = states
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    stayed = [name for name in after if torch.equal(after[name], at_last[name])]
    of = f"of {len(before)} tensors of weights, average and optimizer"
    return [
        compared(f"{of}, changed by a step of NaN", len(changed), 0),
        compared(f"{of}, left by the good step after it", len(stayed), 0),
    ]


def _state(trainer: Trainer) -> dict[str, torch.Tensor]:
    state = {"updates of the average": trainer.ema.num_updates}
    state |= {f"average/{name}": parameter for name, parameter in trainer.ema.net.named_parameters()}
    for name, parameter in trainer.net.named_parameters():
        kept = trainer.optimizer.optimizers["all"].state[parameter]
        state |= {name: parameter, **{f"{key}/{name}": value for key, value in kept.items()}}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def no_host_synchronisation(device: torch.device, tiny: bool) -> Rows:
    """Take steps of two micro-batches each while it is an error to wait for the device."""
    kinds = {"without masks": (None, "false"), "with masks": (COVERAGE, "false")}
    kinds |= {} if tiny else {"without masks, compiled": (None, "true")}
    unwatched = "" if device.type == "cuda" else ", unwatched: there is no GPU"
    rows = []
    for name, (coverage, compiled) in kinds.items():
        overrides = (f"train.micro_batch_size={BATCH_SIZE // 2}", f"train.compile={compiled}")
        with small_trainer(tiny, *overrides, mask_coverage=coverage) as trainer:
            rows.append({"what": f"steps {name}{unwatched}", "failed": steps_without_waiting(trainer)})
    return rows


def steps_without_waiting(trainer: Trainer) -> str:
    """Take steps between two log points; return where one, after the first two, waited for the device."""
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
def waiting_is_an_error(device: torch.device) -> Iterator[None]:
    """Let CUDA raise where the host waits for it; on a CPU there is nothing to wait for."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def kill_and_resume(device: torch.device, tiny: bool) -> Rows:
    """Compare a killed and resumed run, and another one with the same seed, with an undisturbed run."""
    # No processes that read ahead: those of a killed run would live on.
    every = ("train.num_workers=0", "train.log_every=2", f"train.save_every={SAVE_EVERY}")
    setting = setting_of(tiny, *every, f"train.total_steps={TOTAL_STEPS}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_latents(folder / "latents", setting)
        overrides = overrides_of(setting, "routed", folder)
        undisturbed, resumed, again = (folder / name for name in ("undisturbed", "resumed", "again"))
        _train(resumed, overrides, -signal.SIGKILL, KILLED_IN)
        for run in (undisturbed, resumed, again):
            _train(run, overrides, 0)
        starts = [start["step"] for start in json.loads((resumed / "manifest.json").read_text())["starts"]]
        assert starts == [0, SAVE_EVERY], f"the killed run started at steps {starts}"
        return compared_runs(undisturbed, resumed, again, device)


def _train(run: Path, overrides: Sequence[str], status: int, killed_in: int | None = None) -> None:
    process = start_apart(train_here, [*overrides, f"output_dir={run}"], killed_in)
    process.join()
    if process.exitcode != status:
        raise ProcessFailed(f"a training ended with {process.exitcode}, not {status}: see above")


def train_here(overrides: Sequence[str], killed_in: int | None) -> None:
    """Train as the command line would; a kill may end the process at a step."""
    train_step = Trainer.train_step

    def killed(trainer: Trainer, *batches: Any) -> None:
        if trainer.step + 1 == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(trainer, *batches)

    Trainer.train_step = killed
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        train.main(composed(overrides))


def compared_runs(undisturbed: Path, resumed: Path, again: Path, device: torch.device) -> Rows:
    """Compare runs of one seed, bitwise on a CPU; on CUDA, where some kernels are not deterministic, two
    undisturbed runs give the bound for a resumed one.
    """
    spread, found = differences(undisturbed, again), differences(undisturbed, resumed)
    bounds = spread_bounds = dict.fromkeys(spread, 0.0)
    if device.type == "cuda":
        bounds = {what: max(bound, SPREAD * spread[what]) for what, bound in RUN_BOUNDS.items()}
        spread_bounds = dict.fromkeys(spread, math.inf)
    rows = [compared(f"two runs with one seed: {what}", spread[what], spread_bounds[what]) for what in spread]
    return rows + [compared(f"killed and resumed: {what}", found[what], bounds[what]) for what in found]


def differences(wanted: Path, found: Path) -> dict[str, float]:
    """Return how far weights, average and logged losses of a run are from those of another."""
    errors, checkpoint = {}, f"checkpoints/step_{TOTAL_STEPS:08d}"
    for what, file in (("weights", "net"), ("average", "ema")):
        a, b = (load_file(run / checkpoint / f"{file}.safetensors") for run in (found, wanted))
        errors[what] = relative([a[key] for key in b], list(b.values()))
    logged = ((run / "metrics.jsonl").read_text().splitlines() for run in (found, wanted))
    a, b = (torch.tensor([json.loads(line)["loss"] for line in lines]) for lines in logged)
    errors["losses"] = relative([a], [b])
    return errors
