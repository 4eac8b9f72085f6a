"""Compose configurations and run small trainings inside the test process."""

import json
import re
from copy import deepcopy
from functools import lru_cache
from pathlib import Path

import pytest
from accelerate import PartialState
from hydra import compose, initialize_config_dir

import fid  # noqa: F401  each program registers its schema
import sample  # noqa: F401
import train  # noqa: F401
from builders.experiment import Experiment
from builders.public import read_weights_file
from builders.sampling import open_weights
from builders.trainer import build_trainer
from runtime.launch import ALONE, Launch
from tests.programs import ROOT
from training import speed
from training.fit import run_training
from training.run_folder import RunFolder

speed.REPEATS = 1  # of timed steps: which ones are faster does not matter here
# Four-channel random latents, a network of 16 tokens, six steps: a second on a CPU.
TINY = ("data=synthetic", "model.hidden_size=32", "model.num_heads=4", "model.patch_size=2")
TINY += ("train.total_steps=6", "train.batch_size=8", "train.log_every=3", "train.save_every=2")
TINY += ("train.eval_every=null", "train.mixed_precision=no", "train.compile=false")
# Fields of metrics.jsonl that a clock or the machine gives.
CLOCKS = ("images_per_sec", "train_time_sec", "evaluation_time_sec", "tflops_per_sec", "peak_memory_gib")


def composed(*overrides, config_name="config"):
    """Compose a configuration as the command line would, outside Hydra's application."""
    # Composing takes half as long as a tiny run: it is cached, except for the folder.
    folders = [override for override in overrides if re.fullmatch(r"output_dir=[\w./-]+", override)]
    others = tuple(override for override in overrides if override not in folders)
    config = deepcopy(_composed(config_name, others))
    for override in folders:
        config.output_dir = override.partition("=")[2]
    return config


@lru_cache(256)  # objects that are kept slow down every collection of garbage
def _composed(config_name, overrides):
    named = ["run_name=test"] if config_name == "config" else []
    with initialize_config_dir(config_dir=str(ROOT / "configs"), version_base="1.3"):
        return compose(config_name, overrides=[*named, *overrides])


def validated(*overrides, num_processes=1):
    return Experiment.of_config(composed(*overrides), num_processes).check()


def written(*overrides):
    """The configuration of an experiment as plain types."""
    return validated(*overrides).written


def tiny_trainer(folder, *overrides):
    """Build the trainer of a tiny run in `folder`, as train.py does, in one process or in all of a launch."""
    launch = Launch.of(PartialState(cpu=True))
    experiment = validated(*TINY, f"output_dir={folder}", *overrides, num_processes=launch.world_size)
    run, dataset = RunFolder(folder), experiment.data(launch)
    run.lock(launch)
    try:
        run.check(experiment.written, dataset.describe())
        return build_trainer(experiment, run, dataset, launch), run
    except (ValueError, OSError):
        run.unlock()
        raise


def tiny_run(folder, *overrides):
    trainer, run = tiny_trainer(folder, *overrides)
    run_training(trainer, run)
    return trainer


def interrupted(trainer, run, at):
    """Train until `at` steps are done, and be interrupted there."""

    def interrupt(step):
        if step == at:
            raise KeyboardInterrupt

    before_each_step(trainer, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_training(trainer, run)


def before_each_step(trainer, do):
    """Call do(step) before each step, when the trainer requests its batch."""
    from_step = trainer.batches.from_step

    def watched(start):
        for step, micro_batches in enumerate(from_step(start), start):
            do(step)
            yield micro_batches

    trainer.batches.from_step = watched


def metrics(folder, clocks=False):
    """Read metrics.jsonl, without the fields that a clock gives."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    hidden = () if clocks else CLOCKS
    return [{key: value for key, value in line.items() if key not in hidden} for line in lines]


def open_weights_file(file, objective=None, latents=None):
    """Load a network from a file of other code, or of `builders.export`, to sample from."""
    return open_weights(file, read_weights_file(file, objective, latents), file, ALONE)
