"""Run programs with Hydra: errors in one line, jobs of sweeps, checks of keys."""

import gc
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from joblib import cpu_count
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runtime.command_line import SCHEMA, explanation, is_of_hydra, options_first
from runtime.errors import UserError, check_choice, did_you_mean
from runtime.help import explained_help
from runtime.lock import TRY_AGAIN, Busy
from runtime.sweep import is_main, job_name, pop_records, record_end, start_sweep, summary
from runtime.targets import CONFIGS, walk

T = TypeVar("T")
INTERRUPTED = 130  # exit status after Ctrl-C, as in shells: 128 + SIGINT


def register_with_hydra(program: str, schema: type, resolvers: Mapping[str, Callable[..., Any]]) -> None:
    """Register the schema of a program and the resolvers of interpolations."""
    ConfigStore.instance().store(name=f"{program}{SCHEMA}", node=schema)
    share_of_cores = {"share_of_cores": lambda num_jobs: max(1, cpu_count() // max(1, num_jobs))}
    for name, resolver in {**resolvers, **share_of_cores}.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def command(
    name: str, schema: type[T], description: str | None
) -> Callable[[Callable[[T], None]], Callable[[], None]]:
    """Decorate the main function of a program without groups, `python -m ROOM.NAME KEY=VALUE ...`.

    Args:
        schema: a dataclass of the keys; the function gets an instance. Keys without a default are required.
        description: the first part of --help; the keys follow.
    """
    register_with_hydra(name, schema, {})
    quiet = [{f"override hydra/{key}": "none"} for key in ("job_logging", "hydra_logging")]
    options = {
        "help": {"template": f"{description}\nKeys (set as KEY=VALUE):\n\n$CONFIG\n"},
        "run": {"dir": "."},
        "sweep": {"dir": "runs", "subdir": "."},
        "output_subdir": None,
        "job": {"chdir": False},
    }
    node = {"defaults": [f"{name}{SCHEMA}", "_self_", *quiet], "hydra": options}
    ConfigStore.instance().store(name=name, node=node)

    def decorate(main: Callable[[T], None]) -> Callable[[], None]:
        def run(cfg: DictConfig) -> None:
            with user_mistakes():
                main(schema(**to_plain(cfg)))

        return hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=name)(run)

    return decorate


@contextmanager
def user_mistakes() -> Iterator[None]:
    """Turn errors of checks and of building into UserErrors."""
    try:
        yield
    except (ValueError, OSError, OmegaConfBaseException) as error:
        raise UserError(str(error)) from error


def run_main(main: Callable[[], None]) -> None:
    """Run a program, with or without Hydra, and report a mistake of the user in one line.

    HYDRA_FULL_ERROR=1 shows the traceback. A sweep ends with a list of the jobs that failed.
    """
    show_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing
    arguments = sys.argv[1:]
    start_sweep(arguments)  # also if this is not a sweep: only Hydra can tell
    try:
        uses_hydra = hasattr(main, "__wrapped__")  # other programs parse their own arguments
        if uses_hydra:
            sys.argv[1:] = options_first(arguments)
        with explained_help() if uses_hydra and {"--help", "-h"} & {*arguments} else nullcontext():
            main()
    except (UserError, HydraException, OmegaConfBaseException, ValueError) as error:
        _end_sweep()  # a sweeper fails if all jobs failed
        if show_traceback or not (isinstance(error, UserError) or is_of_hydra(error)):
            raise
        # One write: lines of processes that share a terminal stay intact. `sys.exit(text)` writes twice.
        sys.stderr.write(f"error: {explanation(error)}\n")
        sys.exit(TRY_AGAIN if isinstance(error.__cause__, Busy) else 1)
    except SystemExit as end:
        pop_records()  # a job was stopped: so is the sweep
        if end.code in (TRY_AGAIN, INTERRUPTED):
            _leave_launch()
        raise
    except KeyboardInterrupt:  # already reported: end by the signal, as shells expect
        pop_records()
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    _leave_launch()
    _end_sweep()


def as_job(main: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
    """Keep a sweep running when a job fails, and free the tensors of a job before the next one."""

    @wraps(main)
    def job(cfg: DictConfig) -> Any:
        if not is_sweep():
            return main(cfg)
        hydra = HydraConfig.get()
        name = job_name(hydra.overrides.task)
        if is_main():
            print(f"job {hydra.job.num + 1}: {name}", flush=True)
        # In a job of several processes, the others would wait for the one that failed.
        caught = (UserError, Exception) if int(os.environ.get("WORLD_SIZE", "1")) == 1 else ()
        value = None
        try:
            value = main(cfg)
            if is_main():
                record_end(name, folder=cfg.get("output_dir"))
        except caught as error:  # any error: continue with the other jobs
            if isinstance(error, UserError):
                sys.stderr.write(f"error: {error} (in the job {name})\n")
                record_end(name, reason=str(error), again=isinstance(error.__cause__, Busy))
            else:
                traceback.print_exc()
                record_end(name, reason=f"{type(error).__name__}: {error}")
        finally:
            gc.collect()
        return value

    return job


def _leave_launch() -> None:
    """Leave the process group: torch requires its threads to end before the interpreter.

    Call this only where all processes end in the same way: it can wait for processes that still compute.
    """
    distributed = sys.modules.get("torch.distributed")  # without importing it
    if distributed and distributed.is_initialized():
        distributed.destroy_process_group()


def _end_sweep() -> None:
    """Report the jobs of a sweep that finished and that failed; exit if any failed."""
    ended = pop_records()
    failed = [job for job in ended if job["reason"]]
    if ended and is_main():
        print(summary([job for job in ended if not job["reason"]], len(ended)), flush=True)
    if failed and is_main():
        lines = [f"error: {len(failed)} of the jobs failed:"]
        lines += [f"  {job['job']}: {job['reason']}" for job in failed]
        command = shlex.join(["python", *sys.argv])
        lines.append(f"The same command runs these jobs again and skips the finished ones: {command}\n")
        sys.stderr.write("\n".join(lines))
    if failed:
        sys.exit(TRY_AGAIN if all(job["again"] for job in failed) else 1)


def check_keys(node: Any, key: str = "") -> None:
    """Check keys against the schema: Hydra does not check `++KEY=VALUE` and `~KEY`."""
    if not isinstance(node, DictConfig):
        return
    schema = OmegaConf.get_type(node)
    dotted = f"{key}." if key else ""
    if is_dataclass(schema):
        known = {field.name for field in fields(schema)}
        for name in sorted(set(node) - known):
            raise ValueError(f"{dotted}{name}={node[name]} is not known{did_you_mean(name, known)}")
        for name in sorted(known - set(node)):
            raise ValueError(f"{dotted}{name} must not be removed")
    for name in node:
        if not isinstance(name, str) or "." in name:
            raise ValueError(f"{dotted}{name!r} must be a name without dots: keys are nested")
        check_keys(node._get_node(name), f"{dotted}{name}")


def to_plain(cfg: DictConfig, hints: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Check keys and types against the schema, resolve interpolations, and return plain types.

    Args:
        hints: text to add to the error, by missing key.
    """
    check_keys(cfg)
    # OmegaConf's search for missing keys fails at interpolations.
    missing = sorted(key for key, value in walk(OmegaConf.to_container(cfg)) if value == MISSING)
    if missing:
        more = "".join(hint for key, hint in (hints or {}).items() if key in missing)
        raise ValueError(f"{', '.join(missing)} must be given, as KEY=VALUE{more}")
    return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))


def is_sweep() -> bool:
    """True in a job of a sweep (-m on the command line)."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def chosen_overrides() -> list[str]:
    """Return the overrides of the command line or of a sweep's job; none outside of a program."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """Compose the configuration of a training, inside or outside a program."""
    with _composing():
        return compose("config", list(overrides))


def compose_group(group: str, choice: str, key: str) -> dict[str, Any]:
    """Compose an option of a group, which messages call `key`; raise a ValueError if it does not exist."""
    with _composing():
        options = GlobalHydra.instance().config_loader().get_group_options(group)
        check_choice(key, choice, [option for option in options if option != "none"])
        return cast(dict[str, Any], OmegaConf.to_container(compose(f"{group}/{choice}")[group]))


def _composing() -> AbstractContextManager[None]:
    """Use Hydra as the running program started it, with its --config-dir; otherwise start it with CONFIGS."""
    if GlobalHydra.instance().is_initialized():
        return nullcontext()
    return initialize_config_dir(str(CONFIGS), version_base="1.3")
