"""Hydra and OmegaConf, whatever is configured: errors in one line, jobs of sweeps, keys, types, targets."""

import gc
import inspect
import os
import re
import shlex
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields, is_dataclass, make_dataclass
from functools import partial, reduce, wraps
from operator import getitem
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runtime.errors import UserError, did_you_mean
from runtime.lock import TRY_AGAIN, Busy
from runtime.sweep import record_failure, start_sweep, sweep_arguments, take_failures
from runtime.targets import CONFIGS, allowed_targets, check_targets, load_target

SCHEMA = "_schema"  # the suffix of schemas, beside the files of the same names
FOR_DEVELOPERS = (
    "To append to your config",
    "full_key:",
    "reference_type=",
    "object_type=",
    "See https://",
    "^",
)
A_LIST, A_GROUP = "must be a list, [VALUE,VALUE]", "is a group of keys, which are set one by one"
CLEARER = (
    (r"Invalid value assigned: \w+ is not a ListConfig, list or tuple\.", A_LIST),
    (r"Cannot merge DictConfig with ListConfig", A_LIST),
    (r"Invalid type assigned: \w+ is not a subclass of \w+\. value: .*", A_GROUP),
    (r"Cannot assign \w+ to Dict\[.*\]", A_GROUP),
    (r"field '[\w.]+' is not Optional", "must not be null"),
    (r"\w+ \(DictConfig\) does not support deletion", "must not be removed"),
    (r"(Could not load 'hydra/\w+/\w+')\.", r"\1, which `pip install -r requirements-sweeps.txt` brings"),
    (r"list index out of range", "the list has no such item"),
    (
        r"^invalid literal for int\(\) with base 10: ('.*')$",
        r"\1 is not an item of a list: those are 0, 1, ...",
    ),
)
INTERPOLATED = re.compile(r"Interpolation key '(.*)' not found\s+full_key: (\S+)")
KEY_IN_FILE = re.compile(r"^\s*(\w+):", re.MULTILINE)


def register_with_hydra(program: str, schema: type, resolvers: Mapping[str, Callable[..., Any]]) -> None:
    """Tell Hydra the schema of a program and the resolvers of interpolations."""
    ConfigStore.instance().store(name=f"{program}{SCHEMA}", node=schema)
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


@contextmanager
def user_mistakes() -> Iterator[None]:
    """Turn errors of checking and building into UserErrors."""
    try:
        yield
    except (ValueError, OSError, OmegaConfBaseException) as error:
        raise UserError(str(error)) from error


def run_main(main: Callable[[], None]) -> None:
    """Run a Hydra application so that a mistake of the user ends in one line; HYDRA_FULL_ERROR=1 shows the
    traceback. A sweep ends with the jobs that failed.
    """
    show_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing
    start_sweep(sys.argv[1:])  # if it is one, which Hydra finds out
    try:
        main()
    except (UserError, HydraException, OmegaConfBaseException, ValueError) as error:
        _end_sweep()  # a sweeper may have found nothing to choose from
        if show_traceback or not (isinstance(error, UserError) or _is_of_hydra(error)):
            raise
        # One write: lines of processes that share a terminal stay intact. `sys.exit(text)` writes twice.
        sys.stderr.write(f"error: {explanation(error, sys.argv[1:])}\n")
        sys.exit(TRY_AGAIN if isinstance(error.__cause__, Busy) else 1)
    except SystemExit as end:
        if end.code == TRY_AGAIN:
            _leave_launch()
        raise
    _leave_launch()
    _end_sweep()


def as_job(main: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
    """Let a job of a sweep fail without ending the sweep, nor leaving its tensors to the next one."""

    @wraps(main)
    def job(cfg: DictConfig) -> Any:
        # Where several processes run a job together, a failing one leaves the others in the middle of it.
        if not is_sweep() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return main(cfg)
        overrides, constants = HydraConfig.get().overrides.task, sweep_arguments()
        name = " ".join(text for text in overrides if text not in constants)
        try:
            return main(cfg)
        except UserError as error:
            sys.stderr.write(f"error: {error} (in the job {name})\n")
            record_failure(name, str(error), again=isinstance(error.__cause__, Busy))
        except Exception as error:  # whatever it is: the other jobs are worth more
            traceback.print_exc()
            record_failure(name, f"{type(error).__name__}: {error}", again=False)
        finally:
            gc.collect()
        return None

    return job


def _leave_launch() -> None:
    """Leave the group of processes, as torch asks: its threads must not outlive the interpreter.

    Only where all end alike: while others wait for it in the group, leaving could wait for them.
    """
    distributed = sys.modules.get("torch.distributed")  # is not loaded for this
    if distributed and distributed.is_initialized():
        distributed.destroy_process_group()


def _end_sweep() -> None:
    """Say which jobs failed, if any, and exit then."""
    if failures := take_failures():
        lines = [f"error: {len(failures)} of the jobs failed:"]
        lines += [f"  {failure['job']}: {failure['reason']}" for failure in failures]
        command = shlex.join(["python", *sys.argv])
        lines.append(f"The same command runs them again, and passes over what is finished: {command}")
        sys.stderr.write("\n".join(lines) + "\n")
        sys.exit(TRY_AGAIN if all(failure["again"] for failure in failures) else 1)


def explanation(error: BaseException, arguments: Sequence[str]) -> str:
    """Return one line for an error of Hydra, of OmegaConf, or of our own."""
    if isinstance(error, OverrideParseException):
        rule = "must be KEY=VALUE, items of a list as routes.0.KEY, other signs in quotes"
        return f"{error.override} cannot be read: {rule}"
    cause = error.__cause__ if isinstance(error, HydraException) else None
    text = ": ".join(filter(None, (one_line(str(e)) for e in (error, cause) if e)))
    if unknown := re.match(r"Could not override '([\w./@]+)'", text):
        return f"{unknown[1]} is not known{did_you_mean(unknown[1], _known_keys())}"
    if "Config group override must be" in text:
        named = [a for a in arguments if (CONFIGS / a.partition("=")[0].lstrip("+~")).is_dir()]
        options = [f"{a} (one of {', '.join(_options(a.partition('=')[0].lstrip('+~')))})" for a in named]
        return f"{'; '.join(options)}: the value of a group must be the name of one of its files"
    text = re.sub(r"^Error merging override (.*?): ", r"\1: ", text)
    for pattern, words in CLEARER:
        text = re.sub(pattern, words, text)
    return text


def one_line(text: str) -> str:
    """Return a message without what Hydra and OmegaConf add for developers."""
    text = INTERPOLATED.sub(r"\2 takes its value from \1, which is not there", text)
    lines = [line.strip() for line in text.split("Config search path")[0].splitlines()]
    joined = " ".join(line for line in lines if line and not line.startswith(FOR_DEVELOPERS))
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", joined)


def _is_of_hydra(error: BaseException) -> bool:
    """Return whether an error comes from composing, where Hydra raises bare ValueErrors, too."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).parts
    return isinstance(error, HydraException | OmegaConfBaseException) or bool(
        {"hydra", "omegaconf"} & {*raised_in}
    )


def _known_keys() -> set[str]:
    """Return the names of groups, and of keys in schemas and files."""
    stored = ConfigStore.instance().repo
    schemas = [OmegaConf.get_type(stored[name].node) for name in stored if name.endswith(f"{SCHEMA}.yaml")]
    keys = {field.name for schema in schemas for field in _fields_within(schema)}
    keys |= {path.name for path in CONFIGS.rglob("*") if path.is_dir()}
    return keys.union(*(KEY_IN_FILE.findall(file.read_text()) for file in CONFIGS.rglob("*.yaml")))


def _fields_within(schema: type) -> Iterator[Field]:
    for found in fields(schema):
        yield found
        if is_dataclass(found.type):
            yield from _fields_within(found.type)


def _options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONFIGS / group).glob("*.yaml"))


def check_keys(node: Any, key: str = "") -> None:
    """Check keys against the schema: Hydra does not where they are given as `++KEY=VALUE` or `~KEY`."""
    if not isinstance(node, DictConfig):
        return
    schema = OmegaConf.get_type(node)
    dotted = f"{key}." if key else ""
    if is_dataclass(schema):
        known = {found.name for found in fields(schema)}
        for name in sorted(set(node) - known):
            raise ValueError(f"{dotted}{name}={node[name]} is not known{did_you_mean(name, known)}")
        for name in sorted(known - set(node)):
            raise ValueError(f"{dotted}{name} must not be removed")
    for name in node:
        if not isinstance(name, str) or "." in name:
            raise ValueError(f"{dotted}{name!r} must be a name without dots: keys are nested")
        check_keys(node._get_node(name), f"{dotted}{name}")


def missing_keys(node: Any, key: str = "") -> list[str]:
    """Return the mandatory keys without a value; OmegaConf's own search fails at interpolations."""
    if not isinstance(node, dict | list):
        return [key] if node == MISSING else []
    children = node.items() if isinstance(node, dict) else enumerate(node)
    nested = (missing_keys(child, f"{key}.{name}" if key else str(name)) for name, child in children)
    return [missing for keys in nested for missing in keys]


def is_sweep() -> bool:
    """Return whether this is a job of a sweep, -m on the command line."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """Compose the configuration of a training, within a program or outside of one."""
    if GlobalHydra.instance().is_initialized():
        return compose("config", list(overrides))
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("config", list(overrides))


def build_node(config: dict[str, Any], key: str) -> Callable[..., Any]:
    """Return what the `_target_` of the node at a dotted key names, with the node's other entries bound."""
    node = reduce(getitem, key.split("."), config)
    check_targets(node, allowed_targets(config_folders()), key)  # again: on the very node that is built
    arguments = {name: value for name, value in node.items() if name != "_target_"}
    return partial(load_target(f"{key}._target_", node["_target_"]), **arguments)


def config_folders() -> tuple[Path, ...]:
    """Return the folders whose files say what may be built: our own, and those of the command line."""
    sources = HydraConfig.get().runtime.config_sources if HydraConfig.initialized() else []
    given = [Path(source.path) for source in sources if source.schema == "file"]
    return (CONFIGS, *(folder for folder in given if folder.resolve() != CONFIGS))


def check_arguments(key: str, target: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Check names and plain types of arguments against a signature, and return them converted."""
    parameters = inspect.signature(target).parameters
    # What stands before / comes from the caller.
    parameters = {n: p for n, p in parameters.items() if p.kind is not inspect.Parameter.POSITIONAL_ONLY}
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    for name, value in given.items():
        if name not in parameters:
            hint = did_you_mean(name, parameters) or f": {target.__name__} takes {', '.join(parameters)}"
            raise ValueError(f"{key}.{name}={value} is not known{hint}")
    checked = {}
    for name, parameter in parameters.items():
        plain = _plain(hints.get(name, Any))
        if name in given:
            schema = make_dataclass("Argument", [(name, plain)])
            try:
                checked[name] = OmegaConf.to_container(OmegaConf.structured(schema(given[name])))[name]
            except OmegaConfBaseException as error:
                expected = getattr(hints[name], "__name__", hints[name])
                raise ValueError(f"{key}.{name}={given[name]!r} must be of type {expected}") from error
        elif parameter.default is parameter.empty and plain is not Any:
            raise ValueError(f"{key}.{name} must be given: {target.__name__} needs it")
    return checked


def _plain(hint: Any) -> Any:
    """Return a type that OmegaConf checks, or Any."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    plain = [option for option in options if option in (bool, int, float, str)]
    if len(plain) != 1:
        return Any
    return plain[0] | None if types.NoneType in options else plain[0]
