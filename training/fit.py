"""Run a training and record how it ended."""

from runtime.errors import UserError
from runtime.launch import is_peer_failure
from training.run_folder import Moved, RunFolder
from training.stopping import INTERRUPT, TIME_LIMIT
from training.trainer import Trainer
from training.window import NotFinite

AGAIN = "run the same command again to resume"


def run_training(trainer: Trainer, run: RunFolder) -> str:
    """Train, and record in the manifest how the run ended.

    Returns:
        The reason for an early stop; empty if the run finished.

    Raises:
        UserError: the run failed, and one line explains why.
    """
    with trainer.stop.listening():
        try:
            reason = _fit(trainer, run)
        except Moved as error:
            raise UserError(str(error)) from error
        trainer.launch.barrier()  # a launcher kills the other ranks once one has exited
    if reason == TIME_LIMIT and trainer.step == trainer.first_step:
        save_sec = f"{trainer.clock.longest_sec['save']:.0f} s"
        raise UserError(
            "train.max_time_sec leaves no time for a step after the start of the run: "
            f"{save_sec} are reserved for saving, and a few seconds for the exit; raise it"
        )
    if reason:
        saved = "which is saved" if trainer.step else "nothing to save"
        trainer.recorder.show(f"stopped at step {trainer.step}, {saved} ({reason}): {AGAIN}")
    return reason


def _fit(trainer: Trainer, run: RunFolder) -> str:
    reason = ""

    def record_end() -> None:
        if trainer.recorder.metrics_file is not None:
            trainer.recorder.metrics_file.flush()
        run.update({"status": "stopped" if reason else "finished", "reason": reason, "step": trainer.step})

    try:
        reason = trainer.fit()
        trainer.launch.broadcast_from_main(record_end)
    except Moved:  # not recorded: another run may own the manifest at this path
        raise
    except KeyboardInterrupt:
        if trainer.launch.is_main:
            run.update({"status": "interrupted", "step": trainer.step})
        saved = trainer.saved_step
        how = f"the checkpoint of step {saved} is kept; {AGAIN}" if saved else "nothing is saved yet"
        reason = INTERRUPT
        trainer.recorder.show(f"interrupted at step {trainer.step}: {how}")
        raise
    except Exception as error:
        _fail(trainer, run, error)
        raise
    finally:
        trainer.recorder.close(stopping=bool(reason))
        run.unlock()
    return reason


def _fail(trainer: Trainer, run: RunFolder, error: Exception) -> None:
    """Record an error in the manifest; raise a UserError if one line explains it."""
    rank, reason = trainer.launch.rank, f"{type(error).__name__}: {error}"
    if is_peer_failure(error):
        reason = f"another process is gone: {reason}"
    details = error.details if isinstance(error, NotFinite) else {}
    first = run.fail(rank, reason, {"step": trainer.step, **details})
    if first["process"] != rank and not isinstance(error, NotFinite):  # raised by all ranks
        raise UserError(f"process {first['process']} failed first: {first['reason']}") from error
    if is_peer_failure(error):
        raise UserError(reason) from error
    if isinstance(error, NotFinite | OSError):
        raise UserError(str(error)) from error
