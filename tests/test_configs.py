"""Every configuration composes, validates and builds; every wrong one is refused before any work."""

import inspect

import pytest
import torch
from hydra.errors import HydraException

from data import LatentManifest, LatentWriter
from models import DiT
from tests.runs import ROOT, composed, validated
from training import config as configuration

SIZES = [p.stem for p in (ROOT / "configs/model/size").glob("*.yaml")]
EXPERIMENTS = [p.stem for p in (ROOT / "configs/experiment").glob("*.yaml")]
GROUPS = ["data", "diffusion", "optimizer", "ema", "sampler", "guidance", "evaluation", "tracker"]
OPTIONS = [(group, p.stem) for group in GROUPS for p in sorted((ROOT / "configs" / group).glob("*.yaml"))]


def built(*overrides):
    config = validated(*overrides)
    with torch.device("meta"):
        net = configuration.build_net(config)
    configuration.build_precond(config, net)
    configuration.build(config["diffusion"]["loss"])()
    configuration.build(config["sampler"])
    return config, net


@pytest.fixture
def latents(tmp_path):
    """A tiny latent folder; returns its path."""
    import numpy as np

    with LatentWriter(tmp_path / "latents", LatentManifest(4, (8, 16, 16), "float16", "moments", 7, "identity")) as writer:
        writer.append(np.zeros((4, 8, 16, 16), np.float16), np.arange(4))
    return tmp_path / "latents"


def needs_path(option):
    return option in ("latents", "imagenet256", "imagenet512")


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_and_builds(group, option, latents):
    extra = [f"data.path={latents}"] if needs_path(option) else []
    config, _ = built(f"{group}={option}", *extra)
    assert config["run_name"] == "test"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model", ["dit", "tread"])
def test_every_size_composes_and_builds(model, size):
    shape = ["data=synthetic", "data.input_size=32"]
    config, net = built(f"model={model}", f"model/size={size}", *shape)
    assert len(net.routes) == (model == "tread")
    assert config["method"] == model


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_says_what_it_reproduces(experiment, latents):
    built(f"experiment={experiment}", f"data.path={latents}")
    header = (ROOT / f"configs/experiment/{experiment}.yaml").read_text()
    for word in ("command:", "paper:", "expected:", "measured:", "hardware:"):
        assert f"# {word}" in header


def test_twins_differ_in_their_name_and_routes_alone():
    tread, dit = validated("model=tread"), validated("model=dit")
    assert tread["model"].pop("routes")
    assert dit["model"].pop("routes") == []
    assert (tread.pop("method"), dit.pop("method")) == ("tread", "dit")
    assert tread == dit


def test_the_model_group_is_the_signature_of_the_network():
    config = validated()
    assert set(config["model"]) - {"_target_"} == set(inspect.signature(DiT).parameters)


def test_a_data_option_brings_its_recipe_and_the_command_line_wins():
    assert validated()["model"]["hidden_size"] == 160
    config = validated("data=imagenet256", "data.path=x")
    assert (config["model"]["depth"], config["train"]["batch_size"], config["optimizer"]["lr"]) == (28, 256, 1e-4)
    config = validated("data=imagenet256", "data.path=x", "model/size=b_2", "optimizer.lr=3e-4", "train.total_steps=5")
    assert (config["model"]["depth"], config["train"]["total_steps"], config["optimizer"]["lr"]) == (12, 5, 3e-4)


def test_a_latent_folder_tells_its_sizes(latents):
    model = validated("data=latents", f"data.path={latents}")["model"]
    assert (model["input_size"], model["in_channels"], model["num_classes"]) == (16, 4, 7)


def test_items_of_the_route_list_are_overridden_by_number():
    assert validated("model.routes.0.selection_ratio=0.7")["model"]["routes"][0]["selection_ratio"] == 0.7
    whole = "model.routes=[{selection_ratio: 0.3, start_layer_idx: 1, end_layer_idx: -2}]"
    assert validated(whole)["model"]["routes"] == [{"selection_ratio": 0.3, "start_layer_idx": 1, "end_layer_idx": -2}]


WRONG = [
    (["+model.hiden_size=3"], r"model\.hiden_size=3 is not known: DiT takes .*hidden_size"),
    (["model.depth=abc"], r"model\.depth='abc' must be of type <class 'int'>"),
    (["model.num_heads=3.5"], r"model\.num_heads=3\.5 must be of type"),
    (["model.fp32_after_route=7.5"], r"model\.fp32_after_route=7\.5"),
    (["diffusion.loss.P_mean=x"], r"diffusion\.loss\.P_mean='x' must be of type <class 'float'>"),
    (["sampler.num_steps=many"], r"sampler\.num_steps='many' must be of type <class 'int'>"),
    (["+sampler.num_step=3"], r"sampler\.num_step=3 is not known: edm_sampler takes .*num_steps"),
    (["sampler._target_=diffusion.nothing"], r"sampler\._target_=diffusion\.nothing can not be imported"),
    (["+tracker.mode=online"], r"tracker=\{'mode': 'online'\} must name a _target_"),
    (["model.routes=[]"], r"model\.routes=\[\]: TREAD training requires you to configure the routes"),
    (["model/routes=off"], "TREAD training requires you to configure the routes"),
    (["model=dit", "model/routes=paper"], r"must be empty for model=dit"),
    (["model.routes.0.end_layer_idx=8"], r"model\.routes\.0\.end_layer_idx=8 must be in \[-8, 7\] for depth=8"),
    (["model.routes.0.selection_ratio=1.5"], r"model\.routes\.0\.selection_ratio=1\.5 must be in \[0, 1\)"),
    (["model.routes.0.selection_ratio=half"], r"model\.routes\.0\.selection_ratio='half' must be of type"),
    (
        ["model.routes=[{selection_rate: 0.5, start_layer_idx: 2, end_layer_idx: 4}]"],
        r"model\.routes\.0\.selection_rate=0\.5 is not",
    ),
    (["model.num_heads=7"], r"model\.num_heads=7 must divide model\.hidden_size=160"),
    (["train.batch_size=0"], r"train\.batch_size=0 must be greater than 0"),
    (["train.micro_batch_size=5"], r"train\.batch_size=64 must be a multiple of train\.micro_batch_size=5"),
    (["train.mixed_precision=fp16"], r"train\.mixed_precision=fp16 must be one of auto, no, bf16"),
    (["train.compile=maybe"], r"train\.compile=maybe must be one of auto, true, false"),
    (["train.grad_clip=0"], r"train\.grad_clip=0\.0 must be greater than 0"),
    (["seed=-1"], r"seed=-1 must not be negative"),
    (["ema.decay=1"], r"ema\.decay=1\.0 must be in \[0, 1\)"),
    (["optimizer.lr=-1e-4"], r"optimizer\.lr=-0\.0001 must be greater than 0"),
    (["data=imagenet256"], r"data\.path must be given, as KEY=VALUE \(a latent folder"),
]


@pytest.mark.parametrize(("overrides", "message"), WRONG, ids=[" ".join(overrides) for overrides, _ in WRONG])
def test_a_wrong_configuration_is_refused_with_key_value_and_rule(overrides, message):
    with pytest.raises(ValueError, match=message):
        validated(*overrides)


@pytest.mark.parametrize(
    "override", ["train.total_stepz=3", "train.total_steps=abc", "optimizer.lr=fast", "model.hiden_size=3", "modle=dit"]
)
def test_a_misspelt_or_mistyped_key_does_not_compose(override):
    with pytest.raises(HydraException):
        composed(override)


def test_a_misspelt_key_in_a_file_does_not_compose(tmp_path):
    """The schema comes first, so files are held to it as the command line is."""
    from hydra import compose, initialize_config_dir

    for folder in ("train_schema", "ok"):
        (tmp_path / folder).mkdir()
    (tmp_path / "config.yaml").write_text("defaults: [train_schema, _self_]\ntrain: {total_stepz: 3}\n")
    with (
        initialize_config_dir(config_dir=str(tmp_path), version_base="1.3"),
        pytest.raises(HydraException, match="total_stepz"),
    ):
        compose("config")


def test_processes_must_divide_the_batch():
    with pytest.raises(ValueError, match=r"train\.batch_size=64 must be a multiple of .* number of processes=3"):
        validated(num_processes=3)
    validated(num_processes=4)


def test_auto_is_decided_once_and_kept(monkeypatch):
    config, cpu = validated(), torch.device("cpu")
    saved = {"mixed_precision": "bf16", "compile": True, "micro_batch_size": 16}
    assert configuration.resolve_auto(config, saved, cpu, 2) == saved
    fresh = configuration.resolve_auto(validated("train.compile=false", "train.mixed_precision=no"), {}, cpu, 2)
    assert fresh == {"mixed_precision": "no", "compile": False, "micro_batch_size": 32}


def test_the_launcher_may_not_contradict_the_precision(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match=r"train\.mixed_precision=no gives no here, but the launcher asks for fp16"):
        configuration.resolve_auto(validated("train.mixed_precision=no"), {}, torch.device("cpu"), 1)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # what the launcher sets where nobody chose
    assert configuration.resolve_auto(validated("train.mixed_precision=bf16"), {}, torch.device("cpu"), 1)


@pytest.mark.parametrize("name", ["sample", "fid"])
def test_requests_of_the_other_entry_points_are_checked(name):
    with pytest.raises(ValueError, match="must be given"):
        configuration.resolve(composed(config_name=name))
    with pytest.raises(HydraException):
        composed("num_sampels=3", config_name=name)
