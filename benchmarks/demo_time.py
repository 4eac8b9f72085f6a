"""Say how long `make demo` will take on this machine, before it starts.

    python -m benchmarks.demo_time

Times a few uncompiled steps of the digits recipe and a few forwards of its sampler, and adds them up.
"""

from statistics import median

import torch

from benchmarks.runs import compose_config
from builders.auto import resolve_auto
from builders.network import build_net, build_precond
from runtime.config import build_node
from runtime.machine import keep_freed_memory, start_process
from training.speed import interleaved_seconds

NUM_SAMPLES, SAMPLING_BATCH = 500, 100  # as in the Makefile
STARTUP_SEC = 60  # imports, compilation, grids, scores; measured on two cores
REPEATS = 3


def main() -> None:
    """Measure and print."""
    config, device = compose_config(()), start_process().device
    resolved = resolve_auto(config, {}, device, 1)
    if resolved["keep_freed_memory"]:
        keep_freed_memory()
    precond = build_precond(config, build_net(config).to(device))
    loss_fn = build_node(config, "diffusion.loss")()
    data, settings, bf16 = config["data"], config["train"], resolved["mixed_precision"] == "bf16"

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (size, data["in_channels"], data["input_size"], data["input_size"])
        return torch.randn(shape, device=device), torch.zeros(size, dtype=torch.int64, device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss_fn(precond.train(), *batch(settings["batch_size"])).mean().backward()

    @torch.no_grad()
    def forward() -> None:
        images, labels = batch(SAMPLING_BATCH)
        precond.eval()(images, torch.ones((), device=device), labels)

    seconds = interleaved_seconds({"step": step, "forward": forward}, device, REPEATS)
    num_forwards = (2 * config["sampler"]["num_steps"] - 1) * NUM_SAMPLES / SAMPLING_BATCH
    training_sec = settings["total_steps"] * median(seconds["step"])
    minutes = (STARTUP_SEC + training_sec + num_forwards * median(seconds["forward"])) / 60
    precision = "bf16" if bf16 else "fp32: this processor has no bf16 instructions"
    print(f"The demo will take about {minutes:.0f} minutes here ({device.type}, {precision}).", flush=True)


if __name__ == "__main__":
    main()
