"""What the documents say can be done as written: commands compose, make targets exist, examples run, links lead somewhere."""

import re
import shlex

import pytest

import fid
from data import encode
from evaluation.files import PUBLISHED
from examples import finetune
from tests.runs import ROOT, composed
from training import config as configuration

FOLDERS = ("data", "routing", "evaluation", "benchmarks")
DOCUMENTS = [ROOT / "README.md", *(ROOT / folder / "README.md" for folder in FOLDERS)]
TEXT = "\n".join(document.read_text() for document in DOCUMENTS)
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, flags=re.S)
COMMANDS = [
    line
    for language, block in BLOCKS
    if language == "sh"
    for line in re.sub(r"\\\n\s*", "", block).splitlines()
    if line.strip()
]
EXAMPLES = [block for language, block in BLOCKS if language == "python"]
PROGRAMS = {
    "train.py": "config",
    "sample.py": "sample",
    "fid.py": "fid",
    "data.encode": "encode",
    "data.convert": "convert",
    "benchmarks.advise": "advise",
    "examples.finetune": "finetune",
}
WITHOUT_CONFIG = {"data.verify": 1, "data.report": 1, "data.make_shards": 2}  # programs and how many paths they take


def overrides_of(command):
    """Split a command into the program it starts and its overrides; a sweep takes the first of its values."""
    words = shlex.split(command.removeprefix("until ").partition(";")[0])
    (program,) = [word for word in words if word in PROGRAMS]
    given = words[words.index(program) + 1 :]
    sweep = given[:1] == ["-m"]
    return program, [word.split(",")[0] if sweep else word for word in given if not word.startswith("-")]


@pytest.mark.parametrize("command", [command for command in COMMANDS if not command.startswith("make ")])
def test_commands_compose_and_validate(command):
    if command.startswith("python -m evaluation.fetch "):
        assert set(shlex.split(command)[3:]) <= PUBLISHED.keys()
        return
    words = shlex.split(command)
    if words[:2] == ["python", "-m"] and words[2] in WITHOUT_CONFIG:
        assert len(words[3:]) == WITHOUT_CONFIG[words[2]]
        return
    if words[:2] == ["python", "-m"] and words[2] == "benchmarks.train_step":
        configuration.validate(composed("model=tread", "data=synthetic", *words[3:]))
        return
    program, overrides = overrides_of(command)
    if program != "train.py":
        request = configuration.resolve(composed(*overrides, config_name=PROGRAMS[program]))
        checks = {
            "fid.py": fid.check_request,
            "data.encode": encode.check_request,
            "examples.finetune": finetune.check_request,
        }
        checks.get(program, lambda request: None)(request)
        return
    if {"data=latents", "data=stream"} & set(overrides):  # its sizes come from the manifest of a folder that is there
        overrides = [*overrides, "data.input_size=32", "data.in_channels=4", "data.num_classes=1000"]
    configuration.validate(composed(*overrides))


def test_the_documents_have_commands_and_examples():
    assert len(COMMANDS) > 10
    assert len(EXAMPLES) == 8


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "example", "exec"), {})


def test_benchmarks_that_are_named_exist_and_the_other_way_round():
    named = set(re.findall(r"python -m benchmarks\.(\w+)", (ROOT / "benchmarks" / "README.md").read_text()))
    programs = {file.stem for file in (ROOT / "benchmarks").glob("*.py") if "__main__" in file.read_text()}
    assert named == programs


def test_records_that_are_named_exist():
    texts = [document.read_text() for document in [*DOCUMENTS, ROOT / "RESULTS.md", ROOT / "benchmarks" / "LOG.md"]]
    named = {name for text in texts for name in re.findall(r"benchmarks/results/([\w.-]+\.csv)", text)}
    assert named <= {file.name for file in (ROOT / "benchmarks" / "results").iterdir()}
    assert len(named) >= 7


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for command in COMMANDS:
        if command.startswith("make "):
            assert re.search(rf"^{command.split()[1]}:", makefile, flags=re.M)


def test_links_lead_to_files():
    for document in [*DOCUMENTS, ROOT / "RESULTS.md", ROOT / "benchmarks" / "LOG.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert target.startswith("http") or (document.parent / target).exists(), target


def test_every_train_key_and_group_option_is_in_the_readme():
    from dataclasses import fields

    readme = DOCUMENTS[0].read_text()
    assert not [field.name for field in fields(configuration.TrainConfig) if f"`train.{field.name}`" not in readme]
    assert not [field.name for field in fields(configuration.RoutingConfig) if f"`routing.{field.name}`" not in readme]
    scoring = (ROOT / "evaluation" / "README.md").read_text()
    assert not [field.name for field in fields(configuration.ScoreConfig) if f"`{field.name}" not in scoring]
    encoding = (ROOT / "data" / "README.md").read_text()
    for schema in (configuration.EncodeConfig, configuration.ConvertConfig):
        assert not [
            field.name for field in fields(schema) if f"`{field.name}" not in encoding and f"{field.name}=" not in encoding
        ]
    for group in ("model", "model/routes", "model/block", "data", "diffusion", "sampler", "guidance", "evaluation", "tracker"):
        for file in (ROOT / "configs" / group).glob("*.yaml"):
            assert f"`{file.stem}`" in readme, file
