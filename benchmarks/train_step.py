"""The time of a training step: against a plain step, and routed against dense, at several lengths.

    python -m benchmarks.gpu OUT step                  the standard settings of this device; half an hour on
                                                       two cores
    python -m benchmarks.train_step model/size=b_2 train.batch_size=64 train.compile=false
                                                       one setting, in the keys of train.py

The benchmark times the trainer that train.py builds, on latents read from a folder. Each kind of step runs in
a separate process, and the processes take turns. First, loss and gradients are compared with the plain step's
(benchmarks/plain_step.py). benchmarks/README.md has the rules, benchmarks/LOG.md the trials.
"""

import gc
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.plain_step import PlainDiT, PlainStep
from benchmarks.processes import Answers, Worker, program_parser, take_turns
from benchmarks.results import RESULTS, Record, Rows, markdown, spread
from benchmarks.runs import Setting, build, compose, overrides_of, perturb, write_latents
from builders.experiment import Experiment
from evaluation.precision import strict_fp32
from routing import num_tokens_kept
from runtime.config import run_main
from runtime.errors import UserError
from runtime.machine import peak_gib, reset_peak, start_process
from runtime.provenance import environment
from runtime.tables import aligned
from training.run_folder import depends_on_total_steps
from training.speed import PRODUCT_SIZES, product_flops_per_sec, seconds_of, specified_peak, speedup
from training.trainer import Trainer

REPEATS = {"cpu": 9, "cuda": 5}
CHECK_SAMPLES = 4
TOLERANCES = {"no": (1e-5, 1e-4), "bf16": (1e-2, 5e-2)}  # relative, of loss and gradients
PLAIN_SUPPORTS = {
    "block": {"_target_": "models.blocks.DiTBlock"},
    "mlp_ratio": 4.0,
    "class_dropout_prob": 0.1,
    "num_prefix_tokens": 0,
    "router": {"_target_": "routing.random_router"},
    "window": "bypass",
    "fp32_after_route": False,
    "learn_sigma": False,
}
SMALL = ("model.hidden_size=32", "model.num_heads=4", "model.depth=6")
SMALL += ("train.batch_size=4", "train.compile=false")
TINY_SETTINGS = [
    Setting("256 tokens", SMALL, 8, plain=True),
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
    "n": "{}",
    "failed": "{}",
}
Peaks = dict[str, tuple[float, str]]  # precision -> FLOPs per second, and their source
Batch = tuple[torch.Tensor, torch.Tensor]  # latents and labels


def standard_settings(device: torch.device) -> list[Setting]:
    """Return the standard settings of a device, from short to long, because time on a GPU may run out."""
    on_gpu = device.type == "cuda"
    size, tokens_at_once = ("b_2", 65536) if on_gpu else ("s_2", 4096)

    def keys(num_tokens: int, *more: str, size: str = size) -> tuple[str, ...]:
        return (f"model/size={size}", f"train.batch_size={tokens_at_once // num_tokens}", *more)

    fp32_block, xl_2 = "model.fp32_after_route=true", keys(256, size="xl_2")
    settings = [Setting("256 tokens", keys(256), plain=True)]
    for num_tokens, side in ((64, 16), (1024, 64), (4096, 128)):
        settings.append(Setting(f"{num_tokens} tokens", keys(num_tokens), side, check=not on_gpu))
    for coverage in (0.0, 0.25, 0.5):
        settings.append(Setting(f"masks, {coverage:.0%}", keys(256), mask_coverage=coverage))
    settings.append(Setting("256 tokens, fp32 block", keys(256, fp32_block), check=not on_gpu))
    if on_gpu:
        settings.append(Setting("XL/2", xl_2))
        checkpointing = (*xl_2, "model.gradient_checkpointing=true")
        settings.append(Setting("XL/2, checkpointing", checkpointing, check=False))
        settings.append(Setting("XL/2, fp32 block", (*xl_2, fp32_block), check=False))
    return settings


def plan(device: torch.device, tiny: bool) -> dict[str, Callable[[], Rows]]:
    """Plan a measurement of each setting; see `benchmarks.gpu`."""
    settings = TINY_SETTINGS if tiny else standard_settings(device)
    repeats, peaks = 1 if tiny else REPEATS[device.type], peaks_of(device)
    return {setting.name: partial(measure, setting, repeats, peaks) for setting in settings}


def main() -> None:
    """Measure and print one setting, and record it if `--record` is given."""
    device = start_process().device
    parser = program_parser("benchmarks.train_step", __doc__)
    parser.add_argument("overrides", nargs="+", help="keys of train.py")
    parser.add_argument("--repeats", type=int, default=REPEATS[device.type], help="turns of each process")
    parser.add_argument("--record", help="name of a record in benchmarks/results")
    request = parser.parse_intermixed_args()
    if any(override.startswith(("model=", "data=", "data.")) for override in request.overrides):
        parser.error("model and data cannot be set: the benchmark times model=dit and model=tread on noise")
    record = Record(request.record, RESULTS, environment(device)) if request.record else None
    rows = measure(Setting("given", tuple(request.overrides), plain=True), request.repeats, peaks_of(device))
    print(aligned(markdown(rows, COLUMNS)))
    if record:
        record.add("given", rows)


def measure(setting: Setting, repeats: int, peaks: Peaks) -> Rows:
    """Compare with the plain step, then time all kinds of step in turn. Return a row for each."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        overrides = {kind: overrides_of(setting, kind, folder) for kind in ("dense", "routed")}
        write_latents(folder / "latents", setting)
        experiment = compose(overrides["routed"])
        if depends_on_total_steps(experiment.written):
            raise UserError("routing.schedule and routing.off_last_steps: a step is timed at one ratio only")
        if unsupported := unsupported_by_plain(experiment):
            listed = ", ".join(unsupported)
            print(f"  not compared with the plain step, which does not support {listed}", flush=True)
        elif setting.check:
            compare(folder, overrides)
        with_plain = setting.plain and not unsupported
        builders = {"": trainer_worker} | ({"plain ": plain_worker} if with_plain else {})
        workers = {
            name + kind: stack.enter_context(Worker(builder, folder, overrides[kind]))
            for name, builder in builders.items()
            for kind in overrides
        }
        for name, worker in workers.items():  # one by one, because together they might not fit into memory
            shown = {key: worker.ready[key] for key in ("batch_size", "mixed_precision", "compile", "routes")}
            print(f"  {name}: {shown}", flush=True)
            worker.ask("warm up")
        seconds = take_turns(workers, "step", repeats)
        rows = []
        for name, worker in workers.items():
            row = {"setting": setting.name, "step": name, "mask_coverage": setting.mask_coverage}
            row |= worker.ready | timing(seconds[name], worker.ready, peaks)
            rows.append(row | {"peak_memory_gib": worker.ask("memory")})
    for row in rows:
        name = row["step"]
        if name.endswith("routed"):
            row["speedup_over_dense"] = speedup(seconds[name.replace("routed", "dense")], seconds[name])
            row["share_of_predicted"] = row["speedup_over_dense"] / row["predicted_speedup"]
        if plain_sec := seconds.get(f"plain {name}"):
            row["speedup_over_plain"] = speedup(plain_sec, seconds[name])
            # Time of the plain step over the time of the matrix products alone at the peak.
            row["possible_over_plain"] = median(plain_sec) * row["peak_tflops"] / row["model_tflop"]
    return rows


def unsupported_by_plain(experiment: Experiment) -> list[str]:
    """Return the settings of an experiment that the plain step does not support."""
    model = experiment.model_node.written
    settings = [f"model.{key}={model[key]}" for key, value in PLAIN_SUPPORTS.items() if model[key] != value]
    settings += ["several routes"] if len(model["routes"]) > 1 else []
    return settings + (["masks"] if experiment.train.masked_loss else [])


def compare(folder: Path, overrides: dict[str, tuple[str, ...]]) -> None:
    """Compare loss and gradients with the plain step's, in fp32 and in the timed precision, all at once."""
    with ExitStack() as stack:
        workers = [
            (kind, stack.enter_context(Worker(check, folder, (*keys, *precision))))
            for kind, keys in overrides.items()
            for precision in (("train.mixed_precision=no", "train.compile=false"), ())
        ]
        for kind, worker in workers:
            print(f"  {kind}, {worker.ready}", flush=True)


def timing(seconds: Sequence[float], row: dict[str, Any], peaks: Peaks) -> dict[str, Any]:
    """Return time, images per second and utilisation of a step."""
    peak, source = peaks[row["mixed_precision"]]
    return spread(seconds) | {
        "images_per_sec": row["batch_size"] / median(seconds),
        "utilisation": row["model_tflop"] * 1e12 / median(seconds) / peak,
        "peak_tflops": peak / 1e12,
        "peak_is": source,
    }


def peaks_of(device: torch.device) -> Peaks:
    """Return the FLOPs per second of large products: specified, or the best of several measurements."""
    size, peaks = PRODUCT_SIZES[device.type], {}
    for precision, dtype in (("no", torch.float32), ("bf16", torch.bfloat16)):
        if peak := specified_peak(device, precision == "bf16"):
            peaks[precision] = peak, "specified"
            continue
        in_tf32 = " in TF32" if precision == "no" and device.type == "cuda" else ""
        rate = product_flops_per_sec(device, dtype, size, repeats=20)
        peaks[precision] = rate, f"product of {size}{in_tf32}"
    return peaks


def trainer_worker(folder: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], Answers]:
    """Build the trainer's step. Return its columns and answers; see `Worker`."""
    trainer, row = build(folder, overrides)
    batches = trainer.batches.from_step(0)

    def step() -> None:
        trainer.train_step(next(batches))
        trainer.step += 1

    return row, _answers(step, trainer.launch.device)


def plain_worker(folder: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], Answers]:
    """Build the plain step of the same sizes. Return its columns and answers; see `Worker`."""
    trainer, row = build(folder, (*overrides, "train.compile=false", "train.keep_freed_memory=false"))
    device, step = trainer.launch.device, plain_step(trainer, _latents(trainer, row["batch_size"]))
    del trainer
    gc.collect()
    return row | {"mixed_precision": "no"}, _answers(step, device)


def _answers(step: Callable[[], None], device: torch.device) -> Answers:
    return {
        "warm up": lambda: _warm_up(step, device),
        "step": lambda: _turn(step, device),
        "memory": lambda: peak_gib(device),
    }


def check(folder: Path, overrides: Sequence[str]) -> tuple[str, Answers]:
    """Compare loss and gradients with the plain step's, from the same weights, data and draws."""
    sizes = ("train.batch_size=", "train.micro_batch_size=")
    overrides = [override for override in overrides if not override.startswith(sizes)]
    trainer, row = build(folder, [*overrides, f"train.batch_size={CHECK_SAMPLES}"])
    perturb(trainer.net)
    batch = _latents(trainer, CHECK_SAMPLES)
    with strict_fp32():  # TF32 would hide differences
        differences = errors(trainer, batch, plain_step(trainer, batch))
    mode = f"mixed_precision={row['mixed_precision']} compile={row['compile']}"
    result = "{}: loss within {:.1e}, gradients within {:.1e} of the plain step".format(mode, *differences)
    assert all(a <= b for a, b in zip(differences, TOLERANCES[row["mixed_precision"]], strict=True)), result
    return result, {}


def errors(trainer: Trainer, batch: Batch, step: PlainStep) -> tuple[float, float]:
    """Return the relative errors of a trainer's loss and gradients against the plain step's."""
    expected = step.loss(torch.Generator(trainer.launch.device).manual_seed(0))
    expected.backward()
    generator = torch.Generator(trainer.launch.device).manual_seed(0)
    loss = trainer.loss(trainer.precond.train(), *batch, generator=generator).mean()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in trainer.net.named_parameters()}
    plain_grads = {name: parameter.grad for name, parameter in step.net.named_parameters()}
    difference = torch.nn.utils.get_total_norm([gradients[name] - grad for name, grad in plain_grads.items()])
    norm = torch.nn.utils.get_total_norm(plain_grads.values())
    return (abs(loss - expected) / expected).item(), (difference / norm).item()


def plain_step(trainer: Trainer, batch: Batch) -> PlainStep:
    """Build the plain step with the weights of a trainer's network."""
    net = trainer.net
    (route,) = net.routes or [None]
    num_kept = num_tokens_kept(net.num_tokens, route.selection_ratio) if route else net.num_tokens
    window = (route.start_layer_idx, route.end_layer_idx) if route else (0, 0)
    attn = net.blocks[0].attn
    image = (net.latent_shape[1], net.patch_size, net.in_channels)
    size = (attn.proj.in_features, len(net.blocks), attn.num_heads)
    plain_net = PlainDiT(*image, *size, net.num_classes, *window).to(trainer.launch.device)
    plain_net.load_state_dict(net.state_dict())
    return PlainStep(plain_net, *batch, net.num_classes, num_kept)


def _latents(trainer: Trainer, num_samples: int) -> Batch:
    net, device = trainer.net, trainer.launch.device
    generator = torch.Generator(device).manual_seed(1)
    shape = (num_samples, *net.latent_shape)
    x = 0.5 * torch.randn(shape, generator=generator, device=device)
    return x, torch.randint(net.num_classes, (num_samples,), generator=generator, device=device)


def _warm_up(step: Callable[[], None], device: torch.device) -> None:
    reset_peak(device)
    for _ in range(3):
        step()
    _free_memory(device)


def _turn(step: Callable[[], None], device: torch.device) -> float:
    """Time a step. On a GPU, average over 3 to 10 steps, about a second, after an untimed step."""
    if device.type != "cuda":
        return seconds_of(step, device)
    num_steps = min(10, max(3, round(1 / seconds_of(step, device))))
    seconds = seconds_of(lambda: [step() for _ in range(num_steps)], device) / num_steps
    _free_memory(device)
    return seconds


def _free_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # for the other processes


if __name__ == "__main__":
    run_main(main)
