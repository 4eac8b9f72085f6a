"""Targets must be in files of `configs/`, or of a folder that the command line adds."""

import pytest

from runtime.nodes import read_nodes
from runtime.targets import CONFIGS, allowed_targets, check_targets, load_target
from tests.outside import TIMEIT, spoil_run
from tests.programs import start
from tests.runs import ROOT, validated

SAMPLER_CODE = """
import torch

def heun_twice(denoise, noise, path, *, num_steps: int, twice: bool = True, randn_like=torch.randn_like):
    return torch.zeros_like(noise)
"""


@pytest.fixture
def configs(tmp_path):
    """A folder of configurations that names code of the user."""
    (tmp_path / "own/sampler").mkdir(parents=True)
    twice = "# Ours.\n_target_: own_sampler.heun_twice\nnum_steps: 2\n"
    (tmp_path / "own/sampler/twice.yaml").write_text(twice)
    (tmp_path / "own_sampler.py").write_text(SAMPLER_CODE)
    return tmp_path / "own"


def test_targets_are_in_the_project_or_torch_optim(configs):
    rooms = ("data.", "diffusion.", "evaluation.", "models.", "routing.", "training.", "torch.optim.")
    allowed = allowed_targets()
    assert CONFIGS == ROOT / "configs"
    assert len(allowed) > 15
    for key, names in allowed.items():
        for name in names:
            assert name.startswith(rooms), f"{key}: {name}"
            assert callable(load_target(key, name))
    twice = {"own_sampler.heun_twice": "own/sampler/twice.yaml"}
    added = allowed | {"sampler": allowed["sampler"] | twice}
    assert allowed_targets((CONFIGS, configs)) == added


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("", "sampler"),
        ("# Words.\n# @package _group_\n", "sampler"),
        ("# @package _global_\n", ""),
        ("# @package _global_.a.b\n", "a.b"),
        ("# @package model\n", "model"),
        ("x: 1\n# @package model\n", "sampler"),
    ],
)
def test_a_target_is_allowed_at_the_key_of_its_package(tmp_path, header, key):
    (tmp_path / "sampler").mkdir()
    (tmp_path / "sampler/own.yaml").write_text(f"{header}node:\n- - _target_: os.system\n")
    inner = f"{key}.node".lstrip(".")
    assert allowed_targets((tmp_path,)) == {inner: {"os.system": f"{tmp_path.name}/sampler/own.yaml"}}
    check_targets({"_target_": "os.system"}, allowed_targets((tmp_path,)), inner)
    with pytest.raises(ValueError, match=r"\._target_=os\.system is not allowed"):
        check_targets({"_target_": "os.system"}, allowed_targets((tmp_path,)), "other")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "cannot be imported: .*No module named 'nowhere'"),
        ("diffusion.nothing", "cannot be imported: module 'diffusion' has no attribute 'nothing'"),
        ("models", "must be the dotted name of a class or a function"),
        ("..", "cannot be imported: invalid format"),
    ],
)
def test_a_target_that_cannot_be_imported_is_refused(name, message):
    with pytest.raises(ValueError, match=f"^sampler={name} {message}"):
        load_target("sampler", name)


def test_a_file_that_is_not_yaml_is_named(tmp_path):
    (tmp_path / "a.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"a\.yaml is not YAML: ") as raised:
        allowed_targets((tmp_path,))
    assert len(str(raised.value).splitlines()) == 1


def test_a_node_with_a_forbidden_target_is_refused():
    message = r"sampler\._target_=timeit\.timeit must be diffusion\.adaptive_sampler or "
    with pytest.raises(ValueError, match=message):
        read_nodes(TIMEIT, "sampler")
    with pytest.raises(ValueError, match=message):
        validated().sampler_node.changed(TIMEIT)


@pytest.mark.slow
def test_code_of_the_user_is_trained_and_sampled_with_its_folder_alone(configs):
    """Every program needs the folder; without it, such a run is refused."""
    folder, given = configs.parent, f"--config-dir={configs}"
    where = {"folder": folder, "variables": {"PYTHONPATH": str(folder)}}
    small = ("model=tread", "data=synthetic", "train.total_steps=2", "run_name=r")
    start("train.py", given, *small, "sampler=twice", **where)
    start("sample.py", given, "run=runs/r", "num_samples=2", "out=a.npz", **where)
    message = "sampler._target_=own_sampler.heun_twice must be diffusion.adaptive_sampler or "
    chosen = "sampler._target_=own_sampler.heun_twice"
    for arguments in (("sample.py", "run=runs/r"), ("train.py", *small, chosen)):
        result = start(*arguments, **where, check=False)
        assert result.returncode == 1
        assert message in result.stderr
    spoil_run(folder / "runs/r", {"sampler": TIMEIT})
    refused = start("sample.py", given, "run=runs/r", **where, check=False)
    message = "diffusion.sde_sampler or own_sampler.heun_twice, as"
    assert message in refused.stderr
