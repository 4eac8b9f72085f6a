"""Say how long `make demo` will take on this machine, before it starts.

    python -m benchmarks.demo_time

Times a few uncompiled steps of the digits recipe and a few forwards of its sampler, and adds them up.
"""

from pathlib import Path
from statistics import median

import torch
from hydra import compose, initialize_config_dir

from builders import config as configuration
from builders.auto import resolve_auto
from builders.network import build_net, build_precond
from runtime.config import build_node
from runtime.machine import keep_freed_memory, start_process
from training.speed import interleaved_seconds

NUM_SAMPLES = 500  # as in the Makefile
SAMPLING_BATCH = 100
STARTUP_SEC = 60  # imports, compilation, grids, scores; measured on two cores
REPEATS = 3


def main() -> None:
    """Measure and print."""
    configuration.register()
    with initialize_config_dir(
        config_dir=str(Path(__file__).resolve().parents[1] / "configs"), version_base="1.3"
    ):
        config = configuration.validate(compose("config", overrides=["run_name=demo"]))
    launch = start_process()
    resolved = resolve_auto(config, {}, launch.device, 1)
    if resolved["keep_freed_memory"]:
        keep_freed_memory()
    net = build_net(config).to(launch.device)
    precond = build_precond(config, net)
    loss_fn = build_node(config, "diffusion.loss")()
    data, train = config["data"], config["train"]

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.randn(
            size, data["in_channels"], data["input_size"], data["input_size"], device=launch.device
        )
        return images, torch.zeros(size, dtype=torch.int64, device=launch.device)

    def step() -> None:
        with torch.autocast(
            launch.device.type, torch.bfloat16, enabled=resolved["mixed_precision"] == "bf16"
        ):
            loss_fn(precond.train(), *batch(train["batch_size"])).mean().backward()

    @torch.no_grad()
    def forward() -> None:
        images, labels = batch(SAMPLING_BATCH)
        precond.eval()(images, torch.ones((), device=launch.device), labels)

    num_forwards = (2 * config["sampler"]["num_steps"] - 1) * NUM_SAMPLES / SAMPLING_BATCH
    seconds = interleaved_seconds({"step": step, "forward": forward}, launch.device, REPEATS)
    training_sec = train["total_steps"] * median(seconds["step"])
    sampling_sec = num_forwards * median(seconds["forward"])
    minutes = (STARTUP_SEC + training_sec + sampling_sec) / 60
    precision = (
        "bf16" if resolved["mixed_precision"] == "bf16" else "fp32: this processor has no bf16 instructions"
    )
    print(
        f"The demo will take about {minutes:.0f} minutes here ({launch.device.type}, {precision}).",
        flush=True,
    )


if __name__ == "__main__":
    main()
