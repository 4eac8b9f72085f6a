"""Imports between the project's own packages go one way; Hydra stays at the edge; heavy libraries wait until they are used."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"models", "routing", "diffusion", "data", "evaluation", "training", "benchmarks", "examples", "tests"}
ENTRY_POINTS = {"train", "sample", "fid"}
OWN = PACKAGES | ENTRY_POINTS
MAY_IMPORT = {
    "models": {"models", "routing"},
    "routing": {"routing"},
    "diffusion": {"diffusion"},
    "data": {"data"},
    "evaluation": {"evaluation"},
    "training": {"training"},
}
ANYTHING_BUT = {"benchmarks", "examples", "tests"} | ENTRY_POINTS
DATA_ENTRY_POINTS = {"encode", "convert", "verify", "report"}
HYDRA_FILES = {
    "train.py",
    "sample.py",
    "fid.py",
    "data/encode.py",
    "data/convert.py",
    "examples/finetune.py",
    "training/config.py",
}
# Stand-ins for the forward of any model or block.
ANY_CALL = {("routing/attached.py", "_routed_forward"), ("routing/attached.py", "__call__")}
HEAVY = {"diffusers", "torch_fidelity", "webdataset", "lmdb", "wandb", "matplotlib", "sklearn", "peft", "torchao"}
HEAVY |= {"fsspec", "aiohttp", "s3fs", "botocore"}

FILES = sorted(p for p in ROOT.rglob("*.py") if not any(part.startswith(".") for part in p.relative_to(ROOT).parts))


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module


def violations(file, source):
    relative = Path(file)
    top = relative.parts[0].removesuffix(".py")
    tree = ast.parse(source)
    modules = {name.split(".")[0] for name in imports(tree)}
    if top in MAY_IMPORT and not (top == "data" and relative.stem in DATA_ENTRY_POINTS):
        yield from (f"{file} imports {name}" for name in modules & OWN - MAY_IMPORT[top])
    elif top not in ("tests", "benchmarks"):
        yield from (f"{file} imports {name}" for name in modules & ANYTHING_BUT)
    if modules & {"hydra", "omegaconf"} and str(relative) not in HYDRA_FILES and top not in ("tests", "benchmarks"):
        yield f"{file} imports hydra or omegaconf"
    if top != "tests":
        at_import = {
            n.split(".")[0] for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for n in imports(node)
        }
        yield from (f"{file} imports {name} at module level" for name in at_import & HEAVY)
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{file}:{node.lineno} bare except"
        if isinstance(node, ast.FunctionDef) and node.args.kwarg and top != "tests" and (file, node.name) not in ANY_CALL:
            yield f"{file}:{node.lineno} {node.name} takes **{node.args.kwarg.arg}"


@pytest.mark.parametrize("file", [str(p.relative_to(ROOT)) for p in FILES])
def test_rules_hold(file):
    assert not list(violations(file, (ROOT / file).read_text()))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("routing/tokens.py", "from models import DiT"),
        ("diffusion/edm.py", "import data.latents"),
        ("training/trainer.py", "from evaluation import metrics"),
        ("training/trainer.py", "import hydra"),
        ("data/latents.py", "from omegaconf import OmegaConf"),
        ("train.py", "from tests import runs"),
        ("models/dit.py", "import train"),
        ("training/trackers.py", "import wandb"),
        ("data/remote.py", "from fsspec.asyn import sync"),
        ("examples/finetune.py", "import peft"),
        ("models/dit.py", "try:\n    x = 1\nexcept:\n    x = 2"),
        ("models/dit.py", "def f(**kwargs):\n    return kwargs"),
    ],
)
def test_the_rules_see_a_violation(file, source):
    assert list(violations(file, source))


def test_every_package_has_an_init_file():
    folders = {p.parent for p in FILES if p.parent != ROOT}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_no_file_of_the_project_names_an_absolute_path():
    texts = [p for p in FILES if "tests" not in p.parts] + [
        *ROOT.glob("*.md"),
        *ROOT.glob("configs/**/*.yaml"),
        ROOT / "Makefile",
    ]
    for file in texts:
        assert not re.search(r"(^|[\s\"'=:])/(home|root|work|export|tmp)/", file.read_text()), file
