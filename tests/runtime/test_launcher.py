"""Environment variables are followed, refused or recorded."""

import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from joblib import cpu_count

from runtime import launcher
from runtime.launcher import check_launcher, check_precision, threads_are_chosen
from runtime.provenance import environment
from tests.programs import ROOT, start
from tests.runs import written

ONE = {"OMP_NUM_THREADS": "1"}
MARK = {"ACCELERATE_MIXED_PRECISION": "no"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
FSDP = ("--use_fsdp", "--num_processes=2")


def launched(*options):
    """The variables that `accelerate launch` sets for its processes."""
    arguments = launch_command_parser().parse_args([*options, "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    if FSDP[0] in options:
        return prepare_multi_gpu_env(arguments)
    return prepare_simple_launcher_cmd_env(arguments)[1]


@pytest.mark.parametrize("options", [(), ("--mixed_precision=bf16",), ("--cpu",)])
def test_what_accelerate_sets_by_itself_is_not_refused(monkeypatch, options):
    monkeypatch.setattr(os, "environ", launched(*options))
    check_launcher()
    check_precision("mixed_precision=bf16", "bf16")


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        (FSDP, "ACCELERATE_USE_FSDP=true: train.parallel decides"),
        (("--dynamo_backend=inductor",), "ACCELERATE_DYNAMO_BACKEND=INDUCTOR: train.compile decides"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "_STEPS=4: train.micro_batch_size decides"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "ACCELERATE_USE_DEEPSPEED=true: DeepSpeed is not supported"),
        ({"ACCELERATE_USE_MEGATRON_LM": "True"}, "ACCELERATE_USE_MEGATRON_LM=True: Megatron-LM is not"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "ACCELERATE_USE_PARALLELISM_CONFIG=true: model"),
    ],
)
def test_options_of_launchers_that_are_not_supported_are_refused(monkeypatch, variables, refused):
    variables = variables if isinstance(variables, dict) else launched(*variables)
    monkeypatch.setattr(os, "environ", variables)
    with pytest.raises(ValueError, match=refused):
        check_launcher()


@pytest.mark.parametrize(
    ("program", "variables", "line"),
    [
        ("-m examples.finetune", {"ACCELERATE_USE_FSDP": "true"}, "ACCELERATE_USE_FSDP=true: train.parallel"),
        ("-m examples.finetune", {"ACCELERATE_MIXED_PRECISION": "bf16"}, "mixed_precision=no, but the"),
        ("train.py", {"ACCELERATE_USE_FSDP": "true"}, "ACCELERATE_USE_FSDP=true: train.parallel decides"),
    ],
)
def test_a_program_refuses_such_options_before_any_work(tmp_path, program, variables, line):
    options = () if program == "train.py" else ("transformer=x", "inputs=x")
    result = start(program, *options, folder=tmp_path, check=False, variables=variables)
    assert (result.returncode, result.stderr.count("\n"), result.stdout) == (1, 1, "")
    assert result.stderr.startswith(f"error: {line}")
    assert not list(tmp_path.iterdir())


def test_variables_of_wandb_are_defaults_of_its_keys(monkeypatch):
    for variables, project, mode in (
        ({}, "tread", "offline"),
        ({"WANDB_MODE": "disabled", "WANDB_PROJECT": "mine"}, "mine", "disabled"),
    ):
        monkeypatch.setattr(os, "environ", variables)
        tracker = written("tracker=wandb")["tracker"]
        assert (tracker["project"], tracker["mode"]) == (project, mode)
        assert written("tracker=wandb", "tracker.mode=online")["tracker"]["mode"] == "online"


@pytest.mark.parametrize(
    ("environment", "ancestors", "chosen"),
    [
        ({}, [], False),
        (ONE, [], True),
        ({"OMP_NUM_THREADS": ""}, [], False),
        ({"MKL_NUM_THREADS": "1"}, [], True),
        (MARK | {"OMP_NUM_THREADS": "3"}, [({}, "accelerate launch train.py")], True),
        (MARK | ONE, [({}, "accelerate launch train.py")], False),
        (MARK | ONE, [({}, "accelerate launch --num-cpu-threads-per-process 1 x")], True),
        (MARK | ONE, [(ONE, "accelerate launch train.py")], True),
        # A job of a sweep, in a process of the process that was launched.
        (MARK | ONE, [(MARK | ONE, "train.py -m"), ({}, "torchrun"), (ONE, "sh")], False),
        (MARK | ONE, [(None, "")], False),
    ],
)
def test_one_thread_of_a_launcher_differs_from_one_of_the_user(monkeypatch, environment, ancestors, chosen):
    environs = [psutil.NoSuchProcess(1) if variables is None else variables for variables, _ in ancestors]
    parents = [
        SimpleNamespace(environ=mock.Mock(side_effect=[environ]), cmdline=line.split)
        for environ, (_, line) in zip(environs, ancestors, strict=True)
    ]
    monkeypatch.setattr(launcher.psutil, "Process", lambda: SimpleNamespace(parents=lambda: parents))
    monkeypatch.setattr(os, "environ", environment)
    assert threads_are_chosen() == chosen


@pytest.mark.slow
@pytest.mark.parametrize("launch", [(), ("-m", "accelerate.commands.launch"), TORCHRUN])
@pytest.mark.parametrize("variables", [{}, ONE])
def test_launchers_do_not_limit_threads_on_a_cpu_and_users_do(tmp_path, launch, variables):
    (tmp_path / "program.py").write_text(
        "import os, torch\nfrom runtime.machine import start_process\nstart_process()\n"
        "open(f'threads{os.environ.get(\"RANK\", 0)}', 'w').write(str(torch.get_num_threads()))\n"
    )
    before = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", *MARK)}
    before |= {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", **variables}
    subprocess.run([sys.executable, *launch, "program.py"], cwd=tmp_path, env=before, check=True)
    files = [*tmp_path.glob("threads*")]
    share = 1 if variables else max(1, cpu_count() // len(files))
    assert [file.read_text() for file in files] == [str(share)] * len(files)


def test_variables_that_may_change_numbers_are_recorded_and_no_secrets(monkeypatch):
    known = {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    monkeypatch.setattr(os, "environ", {**known, "WANDB_API_KEY": "secret", "HF_TOKEN": "secret"})
    record = environment(torch.device("cpu"))
    assert record["variables"] == known
    assert record["threads"] == torch.get_num_threads()
