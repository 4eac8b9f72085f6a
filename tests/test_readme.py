"""The pages hold as written: commands compose, make targets exist, examples run, links resolve, keys are
documented.
"""

import json
import re
import shlex
from dataclasses import fields
from itertools import product

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf

from benchmarks import gpu
from builders import export, recipe  # noqa: F401  each program registers its schema
from builders.config import resolve
from builders.experiment import Experiment
from builders.sampling import SampleConfig
from builders.schemas import RoutingConfig, TrainConfig
from builders.scoring import ScoreConfig, check_request
from data import LatentManifest, convert, encode, report, verify  # noqa: F401
from evaluation import fetch  # noqa: F401
from evaluation.files import PUBLISHED
from examples import finetune
from reports import __main__ as reports  # noqa: F401
from runtime.errors import check_choice
from runtime.provenance import flatten
from study import twins
from study.published import read_header, read_rows
from tests.photos import write_photographs
from tests.programs import start
from tests.runs import ROOT, composed

FOLDERS = ("configs", "training", "routing", "routing/adapters", "models", "diffusion", "data", "evaluation")
FOLDERS += ("benchmarks", "study")
SOURCES = (*FOLDERS, "builders", "runtime", "examples", "tests")
PAPERS = {"TREAD", "DiT", "EDM", "EDM2", "ADM", "KID", "CFG", "SiT", "SG", "SPRINT", "REPA", "MaskDiT"}
PAPERS |= {"PRX", "LightningDiT"}
DOCUMENTS = [ROOT / "README.md", *(ROOT / folder / "README.md" for folder in FOLDERS)]
PAGES = {document.parent.name: document.read_text() for document in DOCUMENTS[1:]}
DOCUMENTS += [ROOT / "CONTRIBUTING.md", ROOT / "GLOSSARY.md"]
RECORDED = ("RESULTS.md", "study/RESULTS.md", "benchmarks/RESULTS.md", "benchmarks/LOG.md")
RECORDED = [ROOT / page for page in RECORDED]
README, CONTRIBUTING = DOCUMENTS[0].read_text(), DOCUMENTS[-2].read_text()
TEXT = "\n".join([README, CONTRIBUTING, *PAGES.values()])
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, flags=re.S)
SHELL = "\n".join(block for language, block in BLOCKS if language == "sh")
COMMANDS = [line for line in re.sub(r"\\\n\s*", "", SHELL).splitlines() if line.strip()]
# The example with open_run needs a run: tests/siblings.
EXAMPLES = [block for language, block in BLOCKS if language == "python" and "open_run" not in block]
PROGRAMS = {
    "train.py": "config",
    "benchmarks.train_step": "config",
    "sample.py": "sample",
    "fid.py": "fid",
    "data.encode": "encode",
    "data.convert": "convert",
    "data.verify": "verify",
    "data.report": "report",
    "evaluation.fetch": "fetch",
    "reports": "reports",
    "builders.export": "export",
    "examples.finetune": "finetune",
}


# Programs with other arguments than overrides of a configuration.
PARSERS = {"benchmarks.gpu": gpu.parse, "study.twins": twins.parse}
FETCHED = (*PUBLISHED, "random")
CHECKS = {
    "evaluation.fetch": lambda request: [check_choice("files", f, FETCHED) for f in request.files],
    "fid.py": check_request,
    "data.encode": encode.check_request,
    "examples.finetune": finetune.check_request,
}


def overrides_of(command):
    """Return the program of a command and its overrides; in a sweep, with the first value of each key."""
    words = shlex.split(command.removeprefix("until ").partition(";")[0], comments=True)
    words = ["train.py" if word == "examples/slurm/train.sbatch" else word for word in words]
    (program,) = [word for word in words if word in PROGRAMS]
    given = words[words.index(program) + 1 :]
    sweep = given[:1] == ["-m"]  # whose launchers and sweepers are in tests/test_sweeps.py
    given = [word for word in given if not re.search(r"=interval\(", word)]  # a sweeper chooses in it
    given = [word for word in given if not word.startswith(("-", "hydra")) and word != "job"]  # --cfg job
    return program, [word.split(",")[0] for word in given] if sweep else given


OTHERS = ("make ", "source ", "diff ", "mkdir ", "cp ", "python -m tests.")


@pytest.mark.parametrize("command", [command for command in COMMANDS if not command.startswith(OTHERS)])
def test_commands_compose_and_validate(command, monkeypatch):
    words = shlex.split(command, comments=True)
    if words[:2] == ["python", "-m"] and words[2] in PARSERS:
        PARSERS[words[2]](words[3:])
        return
    program, overrides = overrides_of(command)
    if program not in ("train.py", "benchmarks.train_step"):
        config = composed(*overrides, config_name=PROGRAMS[program])
        request = resolve(config, OmegaConf.get_type(config))
        # The run does not exist.
        monkeypatch.setattr("builders.scoring.read_request", lambda request: (request, None))
        CHECKS.get(program, lambda request: None)(request)
        return
    if program == "benchmarks.train_step":
        overrides = ["model=tread", "data=synthetic", *overrides]
    if "data=latents" in overrides:  # the sizes are in the manifest of the folder
        overrides += ["data.input_size=32", "data.in_channels=4", "data.num_classes=1000"]
        has_captions = any(override.startswith("model/conditioning=") for override in overrides)
        shape = "{num_tokens: 3, vocab_size: 9}" if has_captions else "null"
        overrides += [f"data.text={shape}"]
        manifest = LatentManifest(540, (4, 32, 32), "float16", "samples", 1000, "identity")
        monkeypatch.setattr(recipe, "read_manifest", lambda path: manifest)
    Experiment.of_config(composed(*overrides)).check()


def test_make_targets_exist_and_take_their_arguments():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^(\w+):", makefile, flags=re.M)
    assert targets == re.findall(r"^(\w+):.* ## ", makefile, flags=re.M), "make help explains each target"
    given = [shlex.split(command, comments=True)[1:] for command in COMMANDS if command.startswith("make ")]
    assert {target for target, *_ in given} <= set(targets)
    twin_studies = [words for target, *words in given if target == "twins"]
    assert len(twin_studies) == 4
    for words in twin_studies:
        (arguments,) = [word[5:] for word in words if word.startswith("ARGS=")] or [""]
        twins.parse(["out", *shlex.split(arguments)])


def test_the_documents_have_commands_and_examples():
    assert len(COMMANDS) > 10
    assert len(EXAMPLES) == 9
    assert all(re.search(r"^\|", page.partition("\n#")[0], flags=re.M) for page in PAGES.values())


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "example", "exec"), {})


@pytest.mark.parametrize("folder", ["benchmarks", "study"])
def test_the_pages_of_benchmarks_and_study_name_every_program(folder):
    named = set(re.findall(rf"python -m {folder}\.(\w+)", PAGES[folder]))
    files = (ROOT / folder).glob("*.py")
    assert named == {file.stem for file in files if "if __name__ ==" in file.read_text()}


def test_results_answer_ten_questions_on_one_screen():
    text = RECORDED[0].read_text()
    table = text.partition("## All results")[2].splitlines()
    assert len(text.splitlines()) <= 60 and sum(line.startswith("| ") for line in table) == 1 + 10


def test_linked_records_exist():
    record = re.compile(r"\]\(((?:\w+/)?results/[\w.-]+\.csv)\)")
    pages = [*DOCUMENTS, *RECORDED]
    linked = {page.parent / name for page in pages for name in record.findall(page.read_text())}
    assert len(linked) >= 7 and all(file.is_file() for file in linked)


def test_commands_of_published_results_are_the_recipe_to_the_last_key():
    """Nothing is held out, only the guided row has guidance; all other keys are a row's or paths."""
    free = {"experiment", "parity", "model/size", "data", "data.path"}
    free |= {"run", "run_name", "reference", "source", "out"}
    programs, rows = set(), read_rows()
    for command in COMMANDS:
        if "imagenet256" not in command.lower() or "accelerate launch" not in command:
            continue
        program, overrides = overrides_of(command)
        programs.add(program)
        given = dict(override.split("=", 1) for override in overrides)
        if program == "data.encode":
            assert given.pop("num_held_out") == "0", command
        if given.get("evaluation") == "adm_5k" or "samples" in given:  # scores in training, and of files
            continue
        if "train.init_from" in given:
            (start,) = read_header(given["experiment"])["from"]
            assert given.pop("train.init_from") == f"runs/{start}_seed0"
        if "guidance" in given:
            assert "220ep" in given["run"] and given.pop("guidance") == "cfg" and given.pop("guidance_scale")
        printed = [row.keys for row in rows if row.experiment == given.get("experiment")]
        keys = next((keys for keys in printed if keys and set(keys) <= set(overrides)), ())
        assert given.keys() - {key.partition("=")[0] for key in keys} <= free, command
    assert programs == {"data.encode", "train.py", "fid.py"}


def test_each_rule_for_files_from_outside_names_its_test():
    section = PAGES["data"].partition("## Files from outside\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    named = [re.search(r"\| `(test_\w+)` \|$", line)[1] for line in lines]
    tests = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) >= 8
    for name in named:
        assert f"def {name}(" in tests


def test_keys_that_are_cited_are_in_the_references():
    files = [file for folder in SOURCES for file in (ROOT / folder).rglob("*")]
    code = [file for file in files if file.suffix in (".py", ".yaml", ".md")]
    text = "\n".join(file.read_text() for file in [*code, *ROOT.glob("*.py"), *ROOT.glob("*.md")])
    references = (ROOT / "GLOSSARY.md").read_text().partition("## References")[2]
    listed = set(re.findall(r"^\| \[([A-Z]\w+)\] \|", references, flags=re.M))
    bracketed = set(re.findall(r"(?<![\w\]])\[([A-Z][A-Za-z0-9]+)\](?!\()", text))
    assert bracketed & (listed | PAPERS) == listed


def anchors(document):
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)", document.read_text(), flags=re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings():
    for document in [*DOCUMENTS, *RECORDED]:
        for path, _, anchor in re.findall(r"\]\(([^)#]*)(#?)([^)]*)\)", document.read_text()):
            page = document.parent / path if path else document
            assert path.startswith("http") or page.exists(), path
            assert not anchor or path.startswith("http") or anchor in anchors(page), f"{document}: {anchor}"


def keys_of(file, prefix):
    """The dotted keys of a YAML file of a group, without `_target_`."""
    content = yaml.safe_load((ROOT / "configs" / file).read_text())
    return {key for key in flatten(content.get(prefix, content), prefix) if not key.endswith("._target_")}


def keys_of_group(group):
    files = (ROOT / "configs" / group).glob("*.yaml")
    keys = {key for file in files for key in keys_of(file, group.replace("/", "."))}
    return {key for key in keys if not key.partition(".")[2].startswith(("defaults", "_target_"))}


def test_every_key_is_on_its_page():
    training = [f"train.{field.name}" for field in fields(TrainConfig)]
    training += [f"routing.{field.name}" for field in fields(RoutingConfig)]
    training += [*keys_of_group("optimizer"), *keys_of_group("ema"), *keys_of_group("alignment")]
    documented = {
        "training": training,
        "models": keys_of("model/dit.yaml", "model")
        | keys_of("model/size/tiny.yaml", "model")
        | keys_of_group("model/rejoin"),
        "routing": keys_of_group("model/router"),
        "diffusion": {
            *(keys_of_group("diffusion") - {"diffusion.precond.sigma_data"}),
            *keys_of_group("sampler"),
            *keys_of_group("sampler/times"),
            *keys_of_group("guidance"),
            *(field.name for field in fields(SampleConfig)),
        },
        "evaluation": [field.name for field in fields(ScoreConfig)],
    }
    for page, keys in documented.items():
        assert not [key for key in keys if f"`{key}`" not in PAGES[page]], page
    data = PAGES["data"]
    for field in (*fields(encode.EncodeConfig), *fields(convert.ConvertConfig)):
        assert f"`{field.name}" in data or f"{field.name}=" in data, field.name


def test_every_published_row_is_on_the_page_of_recipes():
    named = set()
    for pattern in re.findall(r"`((?:imagenet\d+|coco)_[\w{},]+)`", PAGES["training"]):
        parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
        named |= {"".join(chosen) for chosen in product(*parts)}
    files = (ROOT / "configs/experiment").glob("*.yaml")
    assert named == {file.stem for file in files if file.stem.startswith(("imagenet", "coco"))}


def test_every_option_of_a_group_is_on_the_page_of_configurations():
    groups = "model model/routes model/router model/rejoin model/block data parity diffusion sampler guidance"
    groups += " alignment"
    for group in (*groups.split(), "optimizer", "ema", "evaluation", "tracker"):
        for file in (ROOT / "configs" / group).glob("*.yaml"):
            assert f"`{file.stem}`" in PAGES["configs"], file


RANDOM = ("weights=evaluation_files/inception-random.pth", "allow_unpublished_weights=true")
SHORTER = {
    "train.py": ("train.total_steps=8", "train.compile=false", "sampler.num_steps=2"),
    "sample.py": ("num_steps=2", "compile=false"),
    "fid.py": ("num_steps=2", "compile=false", *RANDOM),
}


@pytest.mark.slow
def test_six_commands_lead_from_pictures_to_scores(tmp_path):
    """Run them as written, with keys that make them short, and random weights of the Inception network."""
    write_photographs(tmp_path / "IMAGES", per_class=10)
    section = README.split("## Your own images")[1]
    lines = re.search(r"```sh\n(.*?)```", section, flags=re.S)[1].splitlines()
    assert len(lines) == 6
    for line in lines:
        program, *arguments = shlex.split(re.sub(r"^accelerate launch |^python ", "", line))
        if program == "-m":
            program, arguments = f"-m {arguments[0]}", arguments[1:]
        arguments = [argument.replace("inception", "random") for argument in arguments]
        more = RANDOM if "mode=reference" in arguments else SHORTER.get(program, ())
        start(program, *arguments, *more, folder=tmp_path)
    run = tmp_path / "runs/tread_auto_latents_seed0"
    assert len([*(run / "samples").glob("step_????????.png")]) == 8
    (samples,) = (run / "samples").glob("*.npz")
    with np.load(samples) as arrays:
        assert arrays["arr_0"].shape == (100, 32, 32, 3)
    (scores,) = (run / "scores").glob("*.json")
    record = json.loads(scores.read_text())
    assert record["num_images"] == 200
    assert "fid200_of_random_weights" in record["values"]
    assert any("these scores mean nothing" in warning for warning in record["warnings"])
