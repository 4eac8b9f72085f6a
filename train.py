"""Train a diffusion transformer with or without token routes.

    python train.py model=tread
    python train.py model=dit model/size=s_2 data=latents data.path=FOLDER
    python train.py -m model=dit,tread seed=0,1

Running the same command again resumes.
"""

import os

import hydra
from omegaconf import DictConfig

from builders.config import register
from builders.experiment import Experiment
from builders.schemas import Config
from builders.trainer import build_trainer, check_files
from runtime.config import INTERRUPTED, as_job, run_main, user_mistakes
from runtime.launcher import check_launcher
from runtime.lock import TRY_AGAIN
from runtime.machine import start_process
from runtime.nodes import config_folders
from training.fit import run_training
from training.run_folder import RunFolder, depends_on_total_steps
from training.stopping import INTERRUPT, notify_submitit
from training.trainer import Trainer

register("train", Config)


@hydra.main(version_base="1.3", config_path="configs", config_name="config")
@as_job
def main(cfg: DictConfig) -> float | None:
    """Check the configuration, build the trainer and train; return the value of `sweep_metric`."""
    register("train", Config)  # again, because a sweep may run its jobs in other processes
    with user_mistakes():
        experiment = Experiment.of_config(cfg, num_processes=int(os.environ.get("WORLD_SIZE", "1"))).check()
        check_launcher()
        run = RunFolder(experiment.output_dir)
        check_files(experiment, run)
        launch = start_process()
        dataset = experiment.data(launch)
        run.lock(launch, experiment.wait)
        try:
            run.check(experiment.written, dataset.describe())
            finished = run.is_finished(experiment.train.total_steps)
            trainer = None if finished else build_trainer(experiment, run, dataset, launch)
        except (ValueError, OSError):
            run.unlock()
            raise
    if trainer is None:
        fixed = depends_on_total_steps(experiment.written)
        longer = "" if fixed else "raise train.total_steps to continue it, or "
        launch.print(f"{run.path} is finished: {longer}start another run with run_name=NAME")
        run.unlock()
    else:
        fit(trainer, run)
    with user_mistakes():
        return run.newest(experiment.sweep_metric) if experiment.sweep_metric else None


def fit(trainer: Trainer, run: RunFolder) -> None:
    """Train to the end; exit if the training is stopped."""
    if reason := run_training(trainer, run):
        notify_submitit(reason)
        raise SystemExit(INTERRUPTED if reason == INTERRUPT else TRY_AGAIN)
    prompt = ' prompt="..."' if trainer.net.text else ""
    folders = "".join(f" --config-dir={folder}" for folder in config_folders()[1:])
    sample = f"python sample.py{folders} run={run.path}{prompt} num_samples=500"
    trainer.recorder.show(f"{run.path} is finished. Sample from it: {sample}")


if __name__ == "__main__":
    run_main(main)
