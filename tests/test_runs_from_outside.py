"""A run from outside executes no code, writes to its folder only, and takes no memory for declared sizes."""

import json
import os
import re
import shutil
import sys
import time
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import fid
import sample
from builders import experiment
from builders.sampling import SampleConfig, load_net, read_request, read_run
from runtime.errors import UserError
from runtime.files import sha256
from runtime.machine import peak_gib, reset_peak
from runtime.targets import CONFIGS
from tests.outside import TIMEIT, spoil_run
from tests.runs import composed, tiny_run
from tests.test_outside import DAMAGE, FUZZED, VALUES, damaged
from training.run_folder import RunFolder

PROGRAMS = {
    "sample": (sample, ("num_samples=2",)),
    "fid": (fid, ("num_samples=4", "reference=reference.npz", "weights=weights.pth")),
}
# To make a failing example smaller would take minutes.
FEWER = settings(FUZZED, max_examples=150, phases=(Phase.generate,))
CPU = torch.device("cpu")
MAX_GIB, MAX_SEC = 0.2, 20
NAMES = {".lock", "config.yaml", "manifest.json", "metrics.jsonl", "checkpoints", "samples", "scores"}
NAMES |= {"payload.py", "configs"}
SIZES = {"input_size": 8, "in_channels": 3, "num_classes": 10}
LATENTS = {"_target_": "data.open_latents", "path": "x", **SIZES}
TOUCH = {"_target_": "subprocess.call", "args": ["touch", "EXECUTED"]}
IMPORTS = {"_target_": "runtime.targets.load_target", "key": "x", "name": "run.payload.x"}
# Ten lists, each of nine times the one before: a billion strings.
BILLION = "\n".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}' if i else 'x'] * 9)}]" for i in range(10))
NO_MATCH = "ema.safetensors: weights do not match the model: "

# What is changed in a run (tests.outside.spoil_run), and how sampling refuses it.
CODE = [
    ([{"diffusion/precond": TIMEIT}, "diffusion.precond._target_: diffusion.EDMPrecond\n"],
     "config.yaml: diffusion.precond._target_: Key 'diffusion.precond._target_' not in 'Config'"),
    ([{"data": TOUCH}, "data._target_: data.synthetic\n"],
     "config.yaml: data._target_: Key 'data._target_' not in 'Config'"),
    ({"diffusion/precond": TIMEIT, "data/a._target_": "data.synthetic"},
     "config.yaml: data.'a._target_' must be a name without dots: keys are nested"),
    ({"diffusion/precond": TIMEIT},
     "config.yaml: diffusion.precond._target_=timeit.timeit must be diffusion.DDPMPrecond"),
    ({"data": TOUCH}, "config.yaml: data._target_=subprocess.call must be data.digits or "),
    ({"data": {"_target_": "diffusion.EDMPrecond"}},  # ours, for another key
     "config.yaml: data._target_=diffusion.EDMPrecond must be data.digits or "),
    ([("payload.py", TIMEIT["setup"].encode()), {"data": IMPORTS}],
     "config.yaml: data._target_=runtime.targets.load_target must be data.digits or "),
    ({"optimizer/_target_": "torch.optim.adam.torch.load"},
     "config.yaml: optimizer._target_=torch.optim.adam.torch.load must be torch.optim.AdamW"),
    ({"model/routes": [TOUCH]}, "config.yaml: model.routes._target_=subprocess.call is not allowed"),
    ({"sampler/rho": TIMEIT}, "config.yaml: sampler.rho._target_=timeit.timeit is not allowed"),
    ({"guidance": TIMEIT}, "config.yaml: guidance._target_=timeit.timeit must be diffusion.Auto"),
    ([("configs/sampler/own.yaml", b"_target_: timeit.timeit\n"), {"sampler": TIMEIT}],
     "config.yaml: sampler._target_=timeit.timeit must be diffusion.adaptive"),
    ({"output_dir": "${oc.env:HOME}"}, "config.yaml: it has interpolations, but runs write plain values"),
    ("loop: !!pairs [a: '${latent_manifest:${oc.env:HOME},count}']\n",
     "config.yaml is damaged: it has the tag tag:yaml.org,2002:pairs"),
    ("seed: !!python/object/apply:os.system ['touch EXECUTED']\n",
     "config.yaml is damaged: it has the tag tag:yaml.org,2002:python/object/apply:os.system"),
]  # fmt: skip
VALUES_OF_RUNS = [
    ({"sampler/num_steps": "/../../../OUTSIDE"},
     "config.yaml: sampler.num_steps='/../../../OUTSIDE' must be of type int"),
    ({"model/hidden_size": 60_000}, NO_MATCH),
    ({"model/depth": 10**7}, "config.yaml: model.depth=10000000 must be at most 1000"),
    ({"model/input_size": 100_000, "data": {**LATENTS, "input_size": 100_000}},
     "ema.safetensors: 2500000000 tokens of latents (3, 100000, 100000), must be at most 65536"),
    ({"model/input_size": 16, "data/input_size": 16}, NO_MATCH + "pos_embed is (1, 16, 32), "),
    ({"model/mlp_ratio": 1e7}, NO_MATCH + "blocks.0.mlp.fc1.bias is (128,), the"),
    ({"model/num_classes": 10**9, "data/num_classes": 10**9},
     NO_MATCH + "y_embedder.embedding_table.weight is (11, 32), the model"),
    ({"model/num_prefix_tokens": 10**9}, NO_MATCH + "prefix is missing, the model"),
    ({"sampler/num_steps": 10**9}, "config.yaml: sampler.num_steps=1000000000 must be in [1, 100000]"),
    ({"data/num_entries": 10**12}, "config.yaml: data.num_entries=1000000000000 must give at most"),
    ({"sampler/sigma_min": float("nan")}, "config.yaml: sampler.sigma_min=nan must be a finite number"),
    ({"model/patch_size": 0}, "model.patch_size=0 must be greater than 0"),
    (f"\n{BILLION}\n", "config.yaml is damaged: it has aliases"),
    ("loop: &l [*l]\n", "config.yaml is damaged: it has aliases"),
    (f"loop: {'[' * 30_000}{']' * 30_000}\n", "config.yaml is damaged: nested more than 20 levels deep"),
    (f"loop:\n  {'- ' * 30_000}x\n", "config.yaml is damaged: nested more than 20 levels deep"),
    (f"# {'x' * 2**16}\n", "config.yaml is damaged: it holds more than 65536 bytes"),
    (("config.yaml", b"[" * 50_000), "config.yaml is damaged: "),
    (("config.yaml", b"\xff\xfe\x00"), "config.yaml is damaged: "),
    (("manifest.json", b"{}"), "manifest.json has no manifest of the data (data.manifest)"),
    (("manifest.json", b'{"data": []}'), "manifest.json has no manifest of the data (data.manifest)"),
    (("manifest.json", b"[" * 200_000), "manifest.json is damaged, not JSON: it holds 200000 brackets"),
    (("manifest.json", b'{"data": {"manifest": {}}}'), "manifest.json: data.manifest is not a latent"),
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    tiny_run(folder, "data.in_channels=3", "sampler.num_steps=2", "model.depth=8", "train.total_steps=2")
    return folder


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """A copy of the run, in a folder beside which nothing may appear, and where nothing may be executed."""
    inside = tmp_path / "inside"
    shutil.copytree(trained, inside / "run")
    for name, size in (("reference.npz", 1), ("weights.pth", 100 * 2**20)):
        with (inside / name).open("wb") as file:
            file.truncate(size)  # takes no room
    monkeypatch.chdir(inside)
    monkeypatch.syspath_prepend(str(inside))
    yield Path("run")
    assert not list(tmp_path.rglob("EXECUTED"))
    assert {path.name for path in tmp_path.iterdir()} == {"inside"}
    assert {path.name for path in inside.iterdir()} == {"run", "reference.npz", "weights.pth"}
    assert {path.name for path in (inside / "run").iterdir()} <= NAMES
    assert not [name for name in sys.modules if name.startswith("run.")]


def error(program, overrides=()):
    """The line in which a program refuses a run."""
    module, options = PROGRAMS[program]
    reset_peak(CPU)
    before, started = peak_gib(CPU), time.monotonic()
    with pytest.raises(UserError) as raised:
        module.main(composed("run=run", *options, *overrides, config_name=program))
    assert time.monotonic() - started < MAX_SEC
    assert peak_gib(CPU) - before < MAX_GIB
    line = str(raised.value)
    assert len(line.splitlines()) == 1
    return line


@pytest.mark.parametrize(("change", "expected"), CODE, ids=str)
def test_code_in_a_run_is_refused(run, change, expected):
    spoil_run(run, change)
    assert error("sample").startswith(f"run/{expected}")


def test_scoring_refuses_code_in_a_run_as_well(run):
    spoil_run(run, {"data": TOUCH, "sampler": TIMEIT})
    assert error("fid").startswith("run/config.yaml: data._target_=subprocess.call must be data.digits or ")


@pytest.mark.parametrize(("change", "expected"), VALUES_OF_RUNS, ids=lambda value: str(value)[:60])
def test_wrong_values_in_a_run_are_refused(run, change, expected):
    spoil_run(run, change)
    assert expected in error("sample")


def test_a_manifest_of_other_data_is_refused(run):
    details = RunFolder(run).manifest()
    details["data"]["manifest"]["shape"] = [3, 4096, 4096]
    spoil_run(run, ("manifest.json", json.dumps(details).encode()))
    assert "data.input_size=8 must be 4096, as in run/manifest.json" in error("sample")


def with_sums(checkpoint):
    sums = "".join(f"{sha256(file)}  {file.name}\n" for file in sorted(checkpoint.glob("*.*")))
    (checkpoint / "SHA256SUMS").write_text(sums)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda file: os.truncate(file, 1000), "is truncated or not a "),
        (lambda file: (file.write_bytes(b"x" * 99), with_sums(file.parent)), "is truncated or not a "),
        (lambda file: (file.unlink(), os.mkfifo(file)), "ema.safetensors not found"),
        (lambda file: (file.unlink(), file.symlink_to("/dev/zero")), "ema.safetensors not found"),
        (lambda file: os.truncate(file.with_name("SHA256SUMS"), 2**30), "is damaged (it holds more than"),
    ],
)  # fmt: skip
def test_invalid_weights_are_refused_in_one_line(run, spoil, expected):
    (file,) = run.glob("checkpoints/*/ema.safetensors")
    spoil(file)
    assert expected in error("sample")


def test_links_in_a_run_are_not_written_through(run, tmp_path_factory):
    """Links at the lock and at temporary files are not followed."""
    victim = tmp_path_factory.mktemp("elsewhere") / "victim"
    victim.write_text("mine")
    _, options = PROGRAMS["sample"]
    request = composed("run=run", *options, config_name="sample")
    unfinished = ".step_00000002_n2_seed0_2steps"
    (folder := run / "samples").mkdir()
    (lock := folder / f"{unfinished}.npz.lock").symlink_to(victim)
    with pytest.raises(UserError, match="cannot be written: "):
        sample.main(request)
    lock.unlink()
    for end in ("npy", "partial.npz", "partial.json"):
        (folder / f"{unfinished}.{end}").symlink_to(victim)
    sample.main(request)
    assert victim.read_text() == "mine"


def test_a_folder_of_a_run_that_leads_elsewhere_is_not_written_to(run, tmp_path_factory):
    outside = tmp_path_factory.mktemp("elsewhere")
    (run / "samples").symlink_to(outside)
    assert re.match(rf"run/samples\S* leads out of the run, to {outside}", error("sample"))
    assert list(outside.iterdir()) == []


def test_a_run_in_a_folder_of_configurations_is_refused(run, monkeypatch):
    """The run's config.yaml would be one of the files that allow targets."""
    monkeypatch.setattr(experiment, "config_folders", lambda: (CONFIGS, Path()))
    assert error("sample").startswith("run=run must not be inside a folder of configurations")


def reads_or_refuses(run, request, weights):
    """Read a run as sampling does: what comes out is a network, or one line that names a file of the run."""
    try:
        read_request(request)
        load_net(read_run(run), weights)
    except (ValueError, FileNotFoundError) as error:
        assert len(str(error).splitlines()) == 1
        assert str(run) in str(error) or str(error).startswith("model.")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["config.yaml", "manifest.json", "any values"])
def test_any_files_of_a_run_are_read_or_refused(run, name):
    config, (weights,) = RunFolder(run).config(), run.glob("checkpoints/*/ema.safetensors")
    request = SampleConfig(run=str(run))
    groups = [group for group, node in config.items() if isinstance(node, dict)]
    paths = [(group,) for group in config] + [(group, key) for group in groups for key in config[group]]
    content = b"" if name == "any values" else (run / name).read_bytes()

    @FEWER
    @given(DAMAGE)
    def fuzz_bytes(damage):
        (run / name).write_bytes(damaged(content, damage))
        reads_or_refuses(run, request, weights)

    @FEWER
    @given(st.sampled_from(paths), VALUES)
    def fuzz_values(place, value):
        spoilt = yaml.safe_load(yaml.safe_dump(config))
        reduce(getitem, place[:-1], spoilt)[place[-1]] = value
        (run / "config.yaml").write_text(yaml.safe_dump(spoilt))
        reads_or_refuses(run, request, weights)

    (fuzz_bytes if content else fuzz_values)()
