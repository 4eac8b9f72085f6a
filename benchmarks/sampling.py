"""The cost of sampling: the stage `sample` of `python -m benchmarks.gpu`.

It times the defaults of `sample.py` against eager fp32, in turn: on a CPU the network of the demo and DiT-S/2
at 256 tokens, on a GPU DiT-XL/2. Images per second count 40 Heun steps, which evaluate the network 79 times.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.processes import Answers, Worker, take_turns
from benchmarks.results import Rows, spread
from benchmarks.runs import compose, perturb
from benchmarks.train_step import peaks_of
from builders.drawing import LEFT_OPEN, Drawing, DrawOptions, ImageModel
from diffusion import CFG, edm_sampler
from models import cost_of
from runtime.machine import peak_gib, start_process
from training.speed import seconds_of, speedup

GUIDANCE_SCALE, NUM_STEPS, REPEATS = 1.5, 40, 5
NUM_TIMED = 3  # evaluations per call: two Heun steps
TURN_SEC = {"cpu": 3.0, "cuda": 1.0}
LATENTS = ("data=synthetic", "data.input_size=32", "data.num_classes=1000")
TINY = (*LATENTS, "model.hidden_size=32", "model.num_heads=4", "model.depth=4", "model.patch_size=4")
SIZES = {
    "cpu": {"the demo's network": ("data=digits",), "S/2, 256 tokens": (*LATENTS, "model/size=s_2")},
    "cuda": {"as sample.py": (*LATENTS, "model/size=xl_2")},
}
# Keys of sample.py; {}: its defaults.
REQUESTS = {
    "eager": {"mixed_precision": "no", "compile": "false", "batch_size": 100},
    "default": {},
    "default, guided": {},
}
COLUMNS = {
    "setting": "{}",
    "evaluation": "{}",
    "batch_size": "{}",
    "ms": "{:.1f}",
    "images_per_sec": "{:.3f}",
    "speedup_over_eager": "{:.2f}x",
    "share_of_peak": "{:.0%}",
    "cost_over_unguided": "{:.2f}x",
    "peak_memory_gib": "{:.1f}",
    "n": "{}",
    "failed": "{}",
}


def plan(device: torch.device, tiny: bool) -> dict[str, Callable[[], Rows]]:
    """Plan a measurement of each network; see `benchmarks.gpu`."""
    sizes = {"as sample.py": TINY} if tiny else SIZES[device.type]
    repeats, turn_sec = (1, 0.0) if tiny else (REPEATS, TURN_SEC[device.type])
    return {name: partial(measure, size, device, repeats, turn_sec) for name, size in sizes.items()}


def measure(size: tuple[str, ...], device: torch.device, repeats: int, turn_sec: float) -> Rows:
    """Time a few steps of each request in turn, each in a separate process. Return a row for each."""
    peak, _ = peaks_of(device)["bf16"]
    with ExitStack() as stack:
        workers = {}
        for name, request in REQUESTS.items():
            arguments = (size, request, "guided" in name, turn_sec)
            workers[name] = stack.enter_context(Worker(drawing, *arguments))
            print(f"  {name}: {workers[name].ready}", flush=True)  # waits until it has warmed up, alone
        seconds = take_turns(workers, "draw", repeats)
        rows = {}
        for name, worker in workers.items():
            row = {"evaluation": name, **worker.ready, "peak_memory_gib": worker.ask("memory")}
            row |= spread([sec / NUM_TIMED for sec in seconds[name]])
            row["images_per_sec"] = 1000 * row["batch_size"] / ((2 * NUM_STEPS - 1) * row["ms"])
            row["share_of_peak"] = row["batch_size"] * row.pop("flops") / (row["ms"] / 1000) / peak
            rows[name] = row
    per_image = {name: [sec / rows[name]["batch_size"] for sec in seconds[name]] for name in rows}
    rows["default"]["speedup_over_eager"] = speedup(per_image["eager"], per_image["default"])
    guided = rows["default, guided"]
    guided["cost_over_unguided"] = speedup(per_image["default, guided"], per_image["default"])
    return [*rows.values()]


def drawing(
    size: tuple[str, ...], request: dict[str, Any], guided: bool, turn_sec: float
) -> tuple[dict[str, Any], Answers]:
    """Prepare to draw batches as sample.py does with the keys of `request`, in a few steps; see `Worker`.

    The network is dense and has random weights; `size` lists keys of its data and model.
    """
    launch = start_process()
    experiment = compose(("model=dit", *size))
    torch.manual_seed(0)
    net = experiment.net(launch.device)
    perturb(net)
    model = ImageModel(
        experiment.precond(net).eval().requires_grad_(False),
        partial(edm_sampler, num_steps=NUM_STEPS),
        CFG(GUIDANCE_SCALE if guided else 1.0),
        lambda latents: latents.cpu().numpy(),
        launch.device,
        np.arange(1000),
    )
    if request:  # freed memory goes back to the kernel
        os.environ["MALLOC_TRIM_THRESHOLD_"] = "131072"
    options = DrawOptions.resolve(asdict(DrawOptions(50_000, 1)) | LEFT_OPEN | request, model, {}, launch)
    if options.compile:
        model = model.compiled
    model = replace(model, sampler=partial(edm_sampler, num_steps=(NUM_TIMED + 1) // 2))
    turn = partial(Drawing(model, replace(options, compile=False)).latents, 0)
    flops = cost_of(model.precond.net).dense_forward_flops * (2 if guided else 1)
    ready = {key: getattr(options, key) for key in LEFT_OPEN} | {"flops": flops}
    # Turns are long, because the threads of the previous process may spin for a while.
    warm = [seconds_of(turn, launch.device) for _ in range(2)][1]
    num_calls = max(1, round(turn_sec / warm))
    return ready, {
        "draw": lambda: seconds_of(lambda: [turn() for _ in range(num_calls)], launch.device) / num_calls,
        "memory": lambda: peak_gib(launch.device),
    }
