"""A run may come from anywhere: its files run nothing, write nowhere else, and take no memory for what they only declare."""

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
from benchmarks import advise
from builders import config as configuration
from builders.sampling import check_sampling, load_net, read_run
from runtime.errors import UserError
from runtime.files import sha256
from runtime.memory import peak_gib, reset_peak
from runtime.targets import CONFIGS
from tests.runs import composed, tiny_run
from tests.test_fuzzing import DAMAGE, FUZZED, VALUES, damaged
from training.run_folder import RunFolder

ASKED = {
    "sample": (sample, ("num_samples=2",)),
    "fid": (fid, ("num_samples=4", "reference=reference.npz", "weights=weights.pth")),
    "advise": (advise, ("repeats=1", "num_samples=1")),
}
# To make a failing example smaller would take minutes.
FEWER = settings(FUZZED, max_examples=150, phases=(Phase.generate,))
CPU = torch.device("cpu")
MAX_GIB, MAX_SEC = 0.2, 20


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


NAMES = {
    ".lock",
    "config.yaml",
    "manifest.json",
    "metrics.jsonl",
    "checkpoints",
    "samples",
    "scores",
    "advice",
    "payload.py",
    "configs",
}
RUNS = "__import__('pathlib').Path('EXECUTED').touch()"
SIZES = {"input_size": 8, "in_channels": 3, "num_classes": 10}
TIMEIT = {"_target_": "timeit.timeit", "stmt": "pass", "setup": RUNS, "number": 0}
TOUCH = {"_target_": "subprocess.call", "args": ["touch", "EXECUTED"]}


def changed(**values):
    """Return what changes keys of a configuration, given with __ in place of dots."""

    def change(run):
        config = yaml.safe_load((run / "config.yaml").read_text())
        for place, value in values.items():
            *groups, key = place.split("__")
            reduce(getitem, groups, config)[key] = value
        (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))

    return change


def added(text):
    return lambda run: (run / "config.yaml").write_text((run / "config.yaml").read_text() + text)


def in_turn(*changes):
    return lambda run: [change(run) for change in changes]


def with_payload(run):
    """Let a function of ours that imports what it is told import a module of the run."""
    (run / "payload.py").write_text(RUNS)
    changed(data={"_target_": "runtime.targets.load_target", "key": "x", "name": "run.payload.x"})(run)


def with_configs(run):
    """Let the run bring a folder like ours, which names what it wants."""
    (run / "configs/sampler").mkdir(parents=True)
    (run / "configs/sampler/own.yaml").write_text("_target_: timeit.timeit\n")
    changed(sampler=TIMEIT)(run)


def manifest(text):
    return lambda run: (run / "manifest.json").write_text(text)


def manifest_of(**fields):
    def change(run):
        told = RunFolder(run).manifest()
        told["data"]["manifest"] |= fields
        (run / "manifest.json").write_text(json.dumps(told))

    return change


def multiplied():
    """Ten lists, each of nine times the one before: a billion strings."""
    lists = "\n".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9 if i else ['x'] * 9)}]" for i in range(10))
    return lambda run: (run / "config.yaml").write_text(f"{lists}\n{(run / 'config.yaml').read_text()}")


CODE = {
    "a dotted key beside the nested one": (
        in_turn(
            changed(diffusion__precond=TIMEIT), added("diffusion.precond._target_: diffusion.EDMPrecond\n")
        ),
        r"config\.yaml: diffusion\.precond\._target_: Key 'diffusion\.precond\._target_' not in 'Config'",
    ),
    "another": (
        in_turn(changed(data=TOUCH), added("data._target_: data.synthetic\n")),
        r"config\.yaml: data\._target_: Key 'data\._target_' not in 'Config'",
    ),
    "a dotted key within a group": (
        changed(**{"diffusion__precond": TIMEIT, "data__a._target_": "data.synthetic"}),
        r"config\.yaml: data\.'a\._target_' must be a name without dots: keys are nested",
    ),
    "the nested one alone": (
        changed(diffusion__precond=TIMEIT),
        r"config\.yaml: diffusion\.precond\._target_=timeit\.timeit must be diffusion\.DDPMPrecond",
    ),
    "data": (changed(data=TOUCH), r"config\.yaml: data\._target_=subprocess\.call must be data\.digits or "),
    "our own function for another key": (
        changed(data={"_target_": "diffusion.EDMPrecond"}),
        r"config\.yaml: data\._target_=diffusion\.EDMPrecond must be data\.digits or ",
    ),
    "our own function that imports": (
        with_payload,
        r"config\.yaml: data\._target_=runtime\.targets\.load_target must be data\.digits or ",
    ),
    "another function behind a package that is trusted": (
        changed(optimizer___target_="torch.optim.adam.torch.load"),
        r"config\.yaml: optimizer\._target_=torch\.optim\.adam\.torch\.load must be torch\.optim\.AdamW",
    ),
    "a list": (
        changed(model__routes=[{"_target_": "os.system", "command": "touch EXECUTED"}]),
        r"config\.yaml: model\.routes\._target_=os\.system must not be there",
    ),
    "a value": (
        changed(sampler__rho=TIMEIT),
        r"config\.yaml: sampler\.rho\._target_=timeit\.timeit must not be there",
    ),
    "a group that names nothing": (
        changed(guidance=TIMEIT),
        r"config\.yaml: guidance\._target_=timeit\.timeit must be diffusion\.Auto",
    ),
    "a folder of configurations": (
        with_configs,
        r"config\.yaml: sampler\._target_=timeit\.timeit must be diffusion\.adaptive",
    ),
    "an interpolation": (
        changed(output_dir="${oc.env:HOME}"),
        r"config\.yaml: it has interpolations, which no run writes",
    ),
    "an interpolation in a pair": (
        added("loop: !!pairs [a: '${shard_manifest:http://127.0.0.1:9/${oc.env:HOME},count}']\n"),
        r"config\.yaml is damaged: it has the tag tag:yaml\.org,2002:pairs",
    ),
    "a tag of YAML": (
        added("seed: !!python/object/apply:os.system ['touch EXECUTED']\n"),
        r"config\.yaml is damaged: it has the tag tag:yaml\.org,2002:python/object/apply:os\.system",
    ),
}
VALUES_OF_RUNS = {
    "a way out of the folder": (
        changed(sampler__num_steps="/../../../OUTSIDE"),
        r"config\.yaml: sampler\.num_steps='/\.\./\.\./\.\./OUTSIDE' must be of type int",
    ),
    "wide": (
        changed(model__hidden_size=60_000),
        r"ema\.safetensors: weights do not match the model: \S+ is .*, the model has .*60000",
    ),
    "deep": (
        changed(model__depth=10**7),
        r"config\.yaml: model\.depth=10000000 must be at most 1000",
    ),
    "large": (
        changed(model__input_size=100_000, data={"_target_": "data.open_latents", "path": "x", **SIZES, "input_size": 100_000}),
        r"ema\.safetensors: 2500000000 tokens of latents \(3, 100000, 100000\) are more than 65536",
    ),
    "larger than the weights": (
        changed(model__input_size=16, data__input_size=16),
        r"ema\.safetensors: weights do not match the model: pos_embed is \(1, 16, 32\), .* has \(1, 64, 32\)",
    ),
    "of wide blocks": (changed(model__mlp_ratio=1e7), r"weights do not match the model: blocks\.0\.mlp\.fc1\.bias is \(128,\), the"),
    "of many classes": (
        changed(model__num_classes=10**9, data__num_classes=10**9),
        r"weights do not match the model: y_embedder\.embedding_table\.weight is \(11, 32\), the model",
    ),
    "of many tokens": (changed(model__num_prefix_tokens=10**9), r"weights do not match the model: prefix is missing, the model"),
    "many steps": (changed(sampler__num_steps=10**9), r"config\.yaml: sampler\.num_steps=1000000000 must be in \[1, 100000\]"),
    "much data": (changed(data__num_entries=10**12), r"config\.yaml: data\.num_entries=1000000000000 must give at most"),
    "no number": (changed(sampler__sigma_min=float("nan")), r"config\.yaml: sampler\.sigma_min=nan must be a finite number"),
    "a key that is not known": (changed(train__speed=9), r"config\.yaml: train\.speed: Key 'speed' not in 'TrainConfig'"),
    "a key too few": (
        lambda run: (run / "config.yaml").write_text(re.sub("(?m)^seed: 0\n", "", (run / "config.yaml").read_text())),
        r"config\.yaml: seed is missing: another version of this code wrote it",
    ),
    "lists of lists": (multiplied(), r"config\.yaml is damaged: it has aliases"),
    "a list of itself": (added("loop: &l [*l]\n"), r"config\.yaml is damaged: it has aliases"),
    "deep brackets": (
        added(f"loop: {'[' * 30_000}{']' * 30_000}\n"),
        r"config\.yaml is damaged: it nests more than 20 deep",
    ),
    "deep lists": (added(f"loop:\n  {'- ' * 30_000}x\n"), r"config\.yaml is damaged: it nests more than 20 deep"),
    "no patches": (changed(model__patch_size=0), r"model\.patch_size=0 must be greater than 0"),
    "brackets": (
        lambda run: (run / "config.yaml").write_text("[" * 50_000), r"config\.yaml is damaged: "
    ),
    "a long file": (added(f"# {'x' * 2**16}\n"), r"config\.yaml is damaged: it holds more than 65536 bytes"),
    "bytes": (lambda run: (run / "config.yaml").write_bytes(b"\xff\xfe\x00"), r"config\.yaml is damaged: "),
    "an empty manifest": (manifest("{}"), r"manifest\.json has no manifest of the data \(data\.manifest\)"),
    "a manifest of a list": (manifest('{"data": []}'), r"manifest\.json has no manifest of the data \(data\.manifest\)"),
    "a manifest of brackets": (manifest("[" * 200_000), r"manifest\.json is damaged, not JSON: it holds 200000 brackets"),
    "a manifest without data": (manifest('{"data": {"manifest": {}}}'), r"manifest\.json: data\.manifest is not a latent"),
    "a manifest of others": (manifest_of(shape=[3, 4096, 4096]), r"data\.input_size=8 must be 4096, as in run/manifest\.json"),
}  # fmt: skip


def told(program, overrides):
    """Return the line in which a program refuses a run."""
    module, asked = ASKED[program]
    before, started = reset_peak(CPU), time.monotonic()
    with pytest.raises(UserError) as raised:
        module.main(composed("run=run", *asked, *overrides, config_name=program))
    assert time.monotonic() - started < MAX_SEC
    assert peak_gib(CPU) - before < MAX_GIB
    line = str(raised.value)
    assert len(line.splitlines()) == 1
    return line


@pytest.mark.parametrize("program", ASKED)
@pytest.mark.parametrize("name", CODE)
def test_a_run_names_no_code(run, program, name):
    spoil, expected = CODE[name]
    spoil(run)
    assert re.match(f"run/{expected}", told(program, ()))


@pytest.mark.parametrize("name", VALUES_OF_RUNS)
def test_what_a_run_declares_takes_no_memory_and_leads_nowhere(run, name):
    spoil, expected = VALUES_OF_RUNS[name]
    spoil(run)
    assert re.search(expected, told("sample", ()))


def test_a_run_that_is_not_spoilt_is_sampled(run):
    sample.main(composed("run=run", "num_samples=2", config_name="sample"))
    assert (run / "samples/step_00000002_n2_seed0_2steps.npz").exists()


@pytest.mark.parametrize(
    ("target", "path"), [("data.digits", "../OUTSIDE"), ("data.open_shards", "http://127.0.0.1:9/x")]
)
def test_a_run_neither_writes_its_data_somewhere_nor_sends_anybody_to_fetch_them(run, target, path):
    changed(data={"_target_": target, "path": path, **SIZES})(run)
    assert told("advise", ()) == f"run=run: data.path={path} is not a folder here: set data_path=PATH"


def test_a_batch_that_a_manifest_declares_is_bounded(run):
    details = RunFolder(run).manifest()
    for size in (10**9, "8", None, True, 0):
        (run / "manifest.json").write_text(json.dumps(details | {"resolved": {"micro_batch_size": size}}))
        assert told("advise", ()) == f"run=run: its manifest has micro_batch_size={size}: set batch_size=N"


def with_sums(checkpoint):
    sums = "".join(f"{sha256(file)}  {file.name}\n" for file in sorted(checkpoint.glob("*.*")))
    (checkpoint / "SHA256SUMS").write_text(sums)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (
            lambda file: file.write_bytes(file.read_bytes()[:1000]),
            "has no intact checkpoint to sample from",
        ),
        (
            lambda file: (file.write_bytes(b"x" * 99), with_sums(file.parent)),
            "is truncated or not a safetensors file",
        ),
        (lambda file: (file.unlink(), os.mkfifo(file)), "has no intact checkpoint to sample from"),
        (
            lambda file: (file.unlink(), file.symlink_to("/dev/zero")),
            "has no intact checkpoint to sample from",
        ),
        (
            lambda file: os.truncate(file.with_name("SHA256SUMS"), 2**30),
            "has no intact checkpoint to sample from",
        ),
    ],
)
@pytest.mark.parametrize("asked", [False, True])
def test_weights_that_are_none_end_in_one_line(run, spoil, expected, asked):
    (file,) = run.glob("checkpoints/*/ema.safetensors")
    spoil(file)
    line = told("sample", ("checkpoint=2",) if asked else ())
    assert re.search(expected if not asked else "ema.safetensors|damaged", line)


LINKS = {
    "sample": (
        "samples",
        "step_00000002_n2_seed0_2steps",
        (".{}.npz.lock", ".{}.npy", ".{}.partial.npz", ".{}.partial.json"),
    ),
    "advise": (
        "advice",
        "advice",
        (".{}.json.lock", ".{}.partial.json", ".{}.partial.md"),
    ),
}


@pytest.mark.parametrize(
    ("program", "link"), [(program, link) for program, (_, _, links) in LINKS.items() for link in links]
)
def test_no_link_of_a_run_lets_a_file_elsewhere_be_written(run, tmp_path_factory, program, link):
    victim = tmp_path_factory.mktemp("elsewhere") / "victim"
    victim.write_text("mine")
    folder, name, _ = LINKS[program]
    (run / folder).mkdir()
    (run / folder / link.format(name)).symlink_to(victim)
    module, asked = ASKED[program]
    request = composed("run=run", *asked, config_name=program)
    if link.endswith(".lock"):
        with pytest.raises(UserError, match="cannot be written: "):
            module.main(request)
    else:
        module.main(request)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("program", LINKS)
def test_a_folder_of_a_run_that_leads_elsewhere_is_not_written_to(run, tmp_path_factory, program):
    outside = tmp_path_factory.mktemp("elsewhere")
    (run / LINKS[program][0]).symlink_to(outside)
    assert re.match(rf"run/{LINKS[program][0]}\S* leads out of the run, to {outside}", told(program, ()))
    assert list(outside.iterdir()) == []


def test_a_run_in_a_folder_of_configurations_is_refused(run, monkeypatch):
    """Its own config.yaml would be one of those that say what may be built."""
    monkeypatch.setattr(configuration, "config_folders", lambda: (CONFIGS, Path()))
    assert told("sample", ()).startswith("run=run lies in a folder of configurations")


def reads_or_refuses(run, request, weights):
    """Read a run as sampling does: what comes out is a network, or one line that names a file of the run."""
    try:
        check_sampling(request)
        load_net(read_run(run)[0], weights)
    except (ValueError, FileNotFoundError) as error:
        assert len(str(error).splitlines()) == 1
        assert str(run) in str(error) or str(error).startswith("model.")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["config.yaml", "manifest.json"])
@pytest.mark.slow
def test_damaged_files_of_a_run_are_read_or_refused(run, name):
    content, (weights,) = (run / name).read_bytes(), run.glob("checkpoints/*/ema.safetensors")
    request = composed(f"run={run}", config_name="sample")

    @FEWER
    @given(DAMAGE)
    def fuzz(damage):
        (run / name).write_bytes(damaged(content, damage))
        reads_or_refuses(run, request, weights)

    fuzz()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_a_configuration_of_any_values_is_read_or_refused(run):
    config, (weights,) = RunFolder(run).config(), run.glob("checkpoints/*/ema.safetensors")
    request = composed(f"run={run}", config_name="sample")
    places = [(group,) for group in config] + [
        (g, key) for g, node in config.items() if isinstance(node, dict) for key in node
    ]

    @FEWER
    @given(st.sampled_from(places), VALUES)
    def fuzz(place, value):
        text = yaml.safe_dump(config)
        spoilt = yaml.safe_load(text)
        reduce(getitem, place[:-1], spoilt)[place[-1]] = value
        (run / "config.yaml").write_text(yaml.safe_dump(spoilt))
        reads_or_refuses(run, request, weights)

    fuzz()
