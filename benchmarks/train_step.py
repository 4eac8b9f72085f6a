"""What a training step takes: against the plain step, routed against dense, at several lengths, under masks,
and part by part.

    python -m benchmarks.train_step                    the standard rows of this device, half an hour on two
    cores; the record
                                                       goes to benchmarks/results/
    python -m benchmarks.train_step model/size=b_2 train.batch_size=64 train.compile=false
                                                       one setting, in the keys of train.py, printed; some
                                                       minutes

What is timed is the trainer that train.py builds, on latents read from a folder. Each kind of step runs in a
process of its own, and they take turns. Before that, loss and gradients are compared with those of the plain
step (benchmarks/plain_step.py). benchmarks/README.md has the rules, benchmarks/LOG.md what was tried.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from tqdm import tqdm

from benchmarks.memory import peak_gib, reset_peak
from benchmarks.plain_step import PlainDiT, PlainStep
from benchmarks.processes import ProcessFailed, Worker, serve
from benchmarks.results import markdown, write_results
from benchmarks.runs import Setting, build, compose_config, overrides_of, perturb, write_latents
from evaluation.precision import strict_fp32
from routing import num_tokens_kept
from runtime.config import run_main
from runtime.errors import UserError
from runtime.machine import start_process
from runtime.provenance import environment
from training.speed import PRODUCT_SIZES, speedup
from training.trainer import Trainer

REPEATS, GPU_REPEATS, PART_REPEATS = 9, 5, 3
CHECK_SAMPLES = 4
LOG_EVERY = 100  # steps, as the recipes have it; the trainer that is timed never comes to it
TOLERANCES = {"no": (1e-5, 1e-4), "bf16": (1e-2, 5e-2)}  # of loss and gradients, relative
PEAK_FLOPS = {  # bf16, dense, as NVIDIA specifies them
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
}
PLAIN_KNOWS = {
    "block": "dit",
    "mlp_ratio": 4.0,
    "class_dropout_prob": 0.1,
    "num_prefix_tokens": 0,
    "importance_weight": 0.0,
    "removal": True,
    "fp32_after_route": False,
    "learn_sigma": False,
}
SMALL = (
    "model.hidden_size=32",
    "model.num_heads=4",
    "model.depth=7",
    "train.batch_size=4",
    "train.compile=false",
)
TINY_SETTINGS = [
    Setting("256 tokens", SMALL, 8, plain=True, whole=True),
    Setting("masks, 25%", SMALL, 8, mask_coverage=0.25),
]
COLUMNS = {
    "setting": "{}",
    "step": "{}",
    "ms": "{:.1f}",
    "images_per_sec": "{:.2f}",
    "utilisation": "{:.1%}",
    "peak_memory_gib": "{:.2f}",
    "speedup_over_dense": "{:.3f}x",
    "predicted_speedup": "{:.3f}x",
    "share_of_predicted": "{:.1%}",
    "speedup_over_plain": "{:.2f}x",
    "possible_over_plain": "{:.2f}x",
    "speedup_over_whole": "{:.2f}x",
    "share_outside": "{:.1%}",
    "n": "{}",
    "failed": "{}",
}


def standard_settings(device: torch.device) -> list[Setting]:
    """Return the rows of the table in README, for a CPU or for a GPU."""
    on_gpu = device.type == "cuda"
    size, tokens_at_once = ("b_2", 65536) if on_gpu else ("s_2", 4096)

    def of(size: str, num_samples: int, *more: str) -> tuple[str, ...]:
        return (f"model/size={size}", f"train.batch_size={num_samples}", *more)

    usual, fp32_block = of(size, tokens_at_once // 256), "model.fp32_after_route=true"
    settings = []
    if on_gpu:  # what is wanted most comes first
        settings.append(Setting("XL/2", of("xl_2", 256)))
        settings.append(
            Setting("XL/2, checkpointing", of("xl_2", 256, "model.gradient_checkpointing=true"), check=False)
        )
    settings.append(Setting("256 tokens", usual, plain=True))
    for side in (16, 64, 128):
        num_tokens = (side // 2) ** 2
        overrides = of(size, tokens_at_once // num_tokens)
        settings.append(Setting(f"{num_tokens} tokens", overrides, input_size=side, check=not on_gpu))
    settings += [
        Setting(f"masks, {coverage:.0%}", usual, mask_coverage=coverage) for coverage in (0.0, 0.25, 0.5)
    ]
    settings.append(Setting("256 tokens, fp32 block", (*usual, fp32_block), check=not on_gpu))
    if on_gpu:
        settings.append(Setting("XL/2, fp32 block", of("xl_2", 256, fp32_block), check=False))
        settings.append(Setting("256 tokens, whole network", usual, whole=True, check=False))
        # CUDA graphs keep their memory between turns: at 256 the others would not fit beside them.
        settings.append(Setting("XL/2, batch 64, whole network", of("xl_2", 64), whole=True, check=False))
    return settings


def plan(device: torch.device, tiny: bool, out: Path) -> dict[str, Callable[[], list[dict[str, Any]]]]:
    """Return what measures each setting; see `benchmarks.gpu`."""
    settings = TINY_SETTINGS if tiny else standard_settings(device)
    peaks = {precision: peak_flops(precision, device) for precision in TOLERANCES}
    repeats = 1 if tiny else GPU_REPEATS
    return {setting.name: partial(measure, setting, repeats, peaks) for setting in settings}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides", nargs="*", help="keys of train.py; none: the standard rows of this device"
    )
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, help=f"turns of each process; default {REPEATS}"
    )
    parser.add_argument(
        "--input-size", type=int, default=32, help="side of the latents of one setting; default 32"
    )
    parser.add_argument(
        "--mask-coverage", type=float, help="fraction of the tokens that masks hold; default: no masks"
    )
    parser.add_argument(
        "--record", help="name of the record; default: train_step for the standard rows, none for one setting"
    )
    arguments = parser.parse_intermixed_args()
    if any(override.startswith(("model=", "data=", "data.")) for override in arguments.overrides):
        parser.error(
            "model and data are not yours to give: dense and routed steps are both timed, on latents of noise"
        )
    if arguments.repeats < 1:
        parser.error(f"--repeats {arguments.repeats} must be at least 1")
    if arguments.mask_coverage is not None and not 0 <= arguments.mask_coverage <= 1:
        parser.error(f"--mask-coverage {arguments.mask_coverage} must be in [0, 1]")
    if not arguments.overrides and (arguments.input_size != 32 or arguments.mask_coverage is not None):
        parser.error(
            "--input-size and --mask-coverage are of one setting: give its keys, model/size=s_2 for example"
        )
    device = start_process().device
    found_here = environment(device)
    settings = standard_settings(device)
    if arguments.overrides:
        settings = [
            Setting(
                "given", tuple(arguments.overrides), arguments.input_size, arguments.mask_coverage, plain=True
            )
        ]
    peaks = {precision: peak_flops(precision, device) for precision in TOLERANCES}
    rows, failed = [], False
    for setting in settings:
        print(f"{setting.name}: {' '.join(setting.overrides)}", flush=True)
        try:
            rows += (found := measure(setting, arguments.repeats, peaks))
            print(markdown(found, COLUMNS), flush=True)
        except ProcessFailed as error:  # out of memory, say: the other settings are still worth having
            rows.append({"setting": setting.name, "failed": str(error)})
            failed = True
            print(f"  {error}", flush=True)
        if record := arguments.record or (None if arguments.overrides else "train_step"):
            write_results(record, rows, found_here)
    sys.exit(failed)


def measure(setting: Setting, repeats: int, peaks: dict[str, tuple[float, str]]) -> list[dict[str, Any]]:
    """Compare with the plain step, then time all kinds of step in turn; return a row for each."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        overrides = {kind: overrides_of(setting, kind, Path(folder)) for kind in ("dense", "routed")}
        write_latents(Path(folder) / "latents", setting)
        config = compose_config(overrides["routed"])
        if config["routing"]["schedule"] != "constant" or config["routing"]["off_last_steps"]:
            raise UserError("routing.schedule and routing.off_last_steps: a step is timed at one ratio only")
        unknown = unknown_to_plain(config)
        if unknown:
            print(f"  not compared with the plain step, which does not know {', '.join(unknown)}", flush=True)
        elif setting.check:
            compare(Path(folder), overrides)
        kinds: dict[str, tuple[Any, str]] = {"dense": (ours, "dense"), "routed": (ours, "routed")}
        if setting.plain and not unknown:
            kinds |= {"plain dense": (plain, "dense"), "plain routed": (plain, "routed")}
        if setting.whole:
            kinds |= {"whole dense": (whole, "dense"), "whole routed": (whole, "routed")}
        workers = {
            name: stack.enter_context(Worker(of, Path(folder), kind, overrides[kind]))
            for name, (of, kind) in kinds.items()
        }
        for name, worker in tqdm(workers.items(), desc="  build, compile, warm up", leave=False):
            tqdm.write(f"  {name}: {in_words(worker.ready)}")
            worker.ask(
                "warm up"
            )  # one after the other: together they might not fit into the memory of a device
        seconds = {name: [] for name in workers}
        for _ in tqdm(range(repeats), desc="  turns", leave=False):
            for name, worker in workers.items():
                seconds[name].append(worker.ask("step"))
        rows = []
        for name, worker in tqdm(workers.items(), desc="  parts", leave=False):
            row = {
                "setting": setting.name,
                "step": name,
                "mask_coverage": setting.mask_coverage,
            } | worker.ready
            row |= timing(seconds[name], row, peaks)
            row |= {"peak_memory_gib": worker.ask("memory")}
            rows.append(row | worker.ask("parts"))
    for row in rows:
        if row["step"].endswith("routed"):
            row["speedup_over_dense"] = speedup(
                seconds[row["step"].replace("routed", "dense")], seconds[row["step"]]
            )
            row["share_of_predicted"] = row["speedup_over_dense"] / row["predicted_speedup"]
        if of_whole := seconds.get(f"whole {row['step']}"):
            row["speedup_over_whole"] = speedup(of_whole, seconds[row["step"]])
        if of_plain := seconds.get(f"plain {row['step']}"):
            row["speedup_over_plain"] = speedup(of_plain, seconds[row["step"]])
            # What matrix products alone would take at the peak.
            row["possible_over_plain"] = median(of_plain) * row["peak_tflops"] / row["model_tflop"]
    return rows


def unknown_to_plain(config: dict[str, Any]) -> list[str]:
    """Return the keys of a configuration that the plain step cannot follow."""
    unknown = [
        f"model.{key}={config['model'][key]}"
        for key, known in PLAIN_KNOWS.items()
        if config["model"][key] != known
    ]
    if len(config["model"]["routes"]) > 1:
        unknown.append("several routes")
    if config["train"]["masked_loss"]:
        unknown.append("masks")
    return unknown


def compare(folder: Path, overrides: dict[str, tuple[str, ...]]) -> None:
    """Compare loss and gradients with those of the plain step, in fp32 and as they will be timed."""
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(check, folder, kind, (*of_kind, *precision)))
            for kind, of_kind in overrides.items()
            for precision in (("train.mixed_precision=no", "train.compile=false"), ())
        ]
        for worker in workers:
            print(f"  {worker.name}, {worker.ready}", flush=True)


def in_words(row: dict[str, Any]) -> str:
    """Return what a process times."""
    sizes = f"{row['parameters'] / 1e6:.1f}M parameters, {row['depth']} blocks, {row['num_tokens']} tokens"
    precision = "bf16" if row["mixed_precision"] == "bf16" else "fp32"
    compiled = (
        row["compile"] if isinstance(row["compile"], str) else "compiled" if row["compile"] else "uncompiled"
    )
    words = [sizes, f"batch {row['batch_size']}", precision, compiled]
    if row["routes"]:
        words.append(f"routes {row['routes']} (blocks:fraction that bypasses)")
    return ", ".join(words)


def timing(
    seconds: Sequence[float], row: dict[str, Any], peaks: dict[str, tuple[float, str]]
) -> dict[str, Any]:
    """Return time, images per second and utilisation of a step."""
    peak, source = peaks[row["mixed_precision"]]
    return {
        "ms": 1000 * median(seconds),
        "ms_least": 1000 * min(seconds),
        "ms_most": 1000 * max(seconds),
        "n": len(seconds),
        "images_per_sec": row["batch_size"] / median(seconds),
        "utilisation": row["model_tflop"] * 1e12 / median(seconds) / peak,
        "peak_tflops": peak / 1e12,
        "peak_is": source,
    }


def peak_flops(precision: str, device: torch.device) -> tuple[float, str]:
    """Return FLOPs per second of large matrix products in a precision: as specified, else the best of several
    measured.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if precision == "bf16" and name in PEAK_FLOPS:
        return PEAK_FLOPS[name], "specified"
    size, allowed = (
        PRODUCT_SIZES[device.type],
        " in TF32" if precision == "no" and device.type == "cuda" else "",
    )
    a, b = torch.randn(
        2, size, size, device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32
    )
    return 2 * size**3 / min(
        _seconds(lambda: a @ b, device) for _ in range(20)
    ), f"product of {size}{allowed}"


def ours(connection: Connection, folder: Path, overrides: Sequence[str]) -> None:
    """Serve the steps of the trainer."""
    trainer, row = build(folder, overrides)
    batches = trainer.batches.from_step(0)
    _serve_steps(
        connection,
        row,
        partial(_step, trainer, batches),
        trainer.launch.device,
        lambda: shares(trainer, batches),
    )


def whole(connection: Connection, folder: Path, overrides: Sequence[str]) -> None:
    """Serve the steps of the trainer, its network compiled as one and, on a GPU, replayed as CUDA graphs."""
    trainer, row = build(folder, (*overrides, "train.compile=false"))
    trainer.net.compile(dynamic=False, mode="reduce-overhead")
    batches = trainer.batches.from_step(0)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        _step(trainer, batches)

    _serve_steps(connection, row | {"compile": "as a whole"}, step, trainer.launch.device)


def plain(connection: Connection, folder: Path, overrides: Sequence[str]) -> None:
    """Serve the plain step of the same sizes."""
    trainer, row = build(folder, (*overrides, "train.compile=false", "train.keep_freed_memory=false"))
    device, batch_size = trainer.launch.device, trainer.batches.batch_size
    step = plain_step(trainer, _latents(trainer, batch_size))
    del trainer
    gc.collect()
    _serve_steps(
        connection,
        row | {"mixed_precision": "no", "compile": False, "keep_freed_memory": False},
        step,
        device,
    )


def _step(trainer: Trainer, batches: Iterator[Any]) -> None:
    trainer.train_step(next(batches))
    trainer.step += 1


def _serve_steps(
    connection: Connection,
    row: dict[str, Any],
    step: Callable[[], None],
    device: torch.device,
    parts: Callable[[], dict[str, float]] = dict,
) -> None:
    answers = {
        "warm up": lambda: _warm_up(step, device),
        "step": lambda: _turn(step, device),
        "memory": lambda: peak_gib(device),
        "parts": parts,
    }
    serve(connection, row, answers)


def check(connection: Connection, folder: Path, overrides: Sequence[str]) -> None:
    """Compare loss and gradients with those of the plain step, from the same weights, data and random
    numbers.

    Raises:
        AssertionError: they differ by more than `TOLERANCES`.
    """
    overrides = [
        override
        for override in overrides
        if not override.startswith(("train.batch_size=", "train.micro_batch_size="))
    ]
    trainer, row = build(folder, [*overrides, f"train.batch_size={CHECK_SAMPLES}"])
    perturb(trainer.net)
    batch = _latents(trainer, CHECK_SAMPLES)
    with strict_fp32():  # TF32 would hide what is to be found
        loss_error, gradient_error = errors(trainer, batch, plain_step(trainer, batch))
    precision = "bf16" if row["mixed_precision"] == "bf16" else "fp32"
    how = f"{precision}, {'compiled' if row['compile'] else 'uncompiled'}"
    found = f"{how}: loss within {loss_error:.1e}, gradients within {gradient_error:.1e} of the plain step"
    largest_loss_error, largest_gradient_error = TOLERANCES[row["mixed_precision"]]
    assert loss_error <= largest_loss_error and gradient_error <= largest_gradient_error, found
    serve(connection, found, {})


def errors(
    trainer: Trainer, batch: tuple[torch.Tensor, torch.Tensor], step: PlainStep
) -> tuple[float, float]:
    """Return how far loss and gradients of a trainer are from those of the plain step, relative to their
    size.
    """
    expected = step.loss(torch.Generator(trainer.launch.device).manual_seed(0))
    expected.backward()
    generator = torch.Generator(trainer.launch.device).manual_seed(0)
    loss = trainer.loss(trainer.precond.train(), *batch, generator=generator).mean()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in trainer.net.named_parameters()}
    expected_gradients = {name: parameter.grad for name, parameter in step.net.named_parameters()}
    differences = [gradients[name] - gradient for name, gradient in expected_gradients.items()]
    difference, norm = (
        torch.nn.utils.get_total_norm(all_) for all_ in (differences, list(expected_gradients.values()))
    )
    return (abs(loss - expected) / expected).item(), (difference / norm).item()


def plain_step(trainer: Trainer, batch: tuple[torch.Tensor, torch.Tensor]) -> PlainStep:
    """Return the plain step with the weights of a trainer's network."""
    net = trainer.net
    (route,) = net.routes or [None]
    num_kept = num_tokens_kept(net.num_tokens, route.selection_ratio) if route else net.num_tokens
    window = (route.start_layer_idx, route.end_layer_idx) if route else (0, 0)
    attn = net.blocks[0].attn
    sizes = (
        net.input_size,
        net.patch_size,
        net.in_channels,
        attn.proj.in_features,
        len(net.blocks),
        attn.num_heads,
    )
    plain_net = PlainDiT(*sizes, net.num_classes, *window).to(trainer.launch.device)
    plain_net.load_state_dict(net.state_dict())
    return PlainStep(plain_net, *batch, net.num_classes, num_kept)


def shares(trainer: Trainer, batches: Iterator[Any]) -> dict[str, float]:
    """Run steps whose parts are timed one by one, and return the share of each in the whole.

    The parts wait for the device in turn, so that what usually overlaps is counted in full.
    """
    device, spent, loss = trainer.launch.device, {}, trainer.loss

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            _wait(device)
            start = time.perf_counter()
            result = function(*arguments)
            _wait(device)
            spent[part] = spent.get(part, 0.0) + time.perf_counter() - start
            return result

        return call

    def forward(
        *tensors: Any, generator: Any, selection_ratio: Any, force_keep: Any, loss_mask: Any
    ) -> torch.Tensor:
        routing = {"selection_ratio": selection_ratio, "force_keep": force_keep}
        return timed("forward", partial(loss, generator=generator, **routing, loss_mask=loss_mask))(*tensors)

    read = timed("data", lambda: list(next(batches)))
    trainer.loss = forward
    trainer.ema.update = timed("ema", trainer.ema.update)
    trainer.update_weights = timed("optimizer", trainer.update_weights)

    stepping = partial(_step, trainer, iter(read, None))
    with patch.object(torch.Tensor, "backward", timed("backward", torch.Tensor.backward)):
        stepping()
        spent.clear()
        whole = sum(_seconds(stepping, device) for _ in range(PART_REPEATS))
    spent["optimizer"] -= spent["ema"]  # with clipping
    trainer.clock.resume()
    trainer.clock.pause()
    spent["log"] = PART_REPEATS * _seconds(trainer.log_training, device) / LOG_EVERY
    whole += spent["log"]
    _hand_back(device)
    found = {f"share_{part}": seconds / whole for part, seconds in spent.items()}
    return found | {"share_outside": 1 - found["share_forward"] - found["share_backward"]}


def _latents(trainer: Trainer, num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    net, device = trainer.net, trainer.launch.device
    generator = torch.Generator(device).manual_seed(1)
    shape = (num_samples, net.in_channels, net.input_size, net.input_size)
    x = 0.5 * torch.randn(shape, generator=generator, device=device)
    return x, torch.randint(net.num_classes, (num_samples,), generator=generator, device=device)


def _warm_up(step: Callable[[], None], device: torch.device) -> None:
    reset_peak(device)
    for _ in range(3):  # CUDA graphs are recorded in the second
        step()
    _wait(device)
    _hand_back(device)


def _turn(step: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of a step; on a GPU the mean of ten, after one untimed, and the memory is left to
    the next process.
    """
    if device.type != "cuda":
        return _seconds(step, device)
    step()
    seconds = _seconds(lambda: [step() for _ in range(10)], device) / 10
    _hand_back(device)
    return seconds


def _hand_back(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the other processes need the memory


def _seconds(function: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    function()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    run_main(main)
