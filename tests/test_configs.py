"""Every configuration composes, validates and builds; wrong ones are refused before any work."""

import hashlib
import inspect
import re
from copy import deepcopy
from dataclasses import MISSING, asdict, fields, replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from builders import config as configuration
from builders.experiment import Experiment
from builders.kept_tokens import KeptTokensLoss
from builders.rules import check_rules
from builders.sampling import SampleConfig, complete
from builders.schemas import RoutingConfig
from diffusion import EDMLoss, EDMPrecond, FlowPath, edm_sampler
from models import DiT
from routing import RoutePlan, norm_router
from runtime.provenance import flatten
from study.published import read_header, read_rows
from tests.latents import write_latents
from tests.networks import BLOCKS
from tests.networks import SIZES as PUBLISHED_SIZES
from tests.runs import ROOT, composed, validated, written

SIZES = [p.stem for p in (ROOT / "configs/model/size").glob("*.yaml") if p.stem != "auto"]
EXPERIMENTS = [p.stem for p in (ROOT / "configs/experiment").glob("*.yaml")]
GROUPS = ["data", "parity", "diffusion", "optimizer", "ema", "sampler", "sampler/times", "guidance"]
GROUPS += ["alignment", "evaluation", "tracker"]
# The numbers that the paper's code trains and samples with; no other file may change them.
RECIPE = yaml.safe_load("""
model: {_target_: models.DiT, input_size: 32, patch_size: 2, in_channels: 4, mlp_ratio: 4.0,
  num_classes: 1000, class_dropout_prob: 0.1, text: null, learn_sigma: false, init: adaln_zero,
  block: {_target_: models.blocks.DiTBlock}, attention: auto, num_prefix_tokens: 0,
  router: {_target_: routing.random_router}, rejoin: {_target_: models.rejoin.Bypass}, window: bypass,
  fp32_after_route: false, gradient_checkpointing: false, inner_head: null, head_width: null,
  head_depth: 2, head_num_heads: 16}
diffusion: {sigma_data: 0.5, precond: {_target_: diffusion.EDMPrecond, sigma_data: 0.5},
  loss: {_target_: diffusion.EDMLoss, P_mean: -1.2, P_std: 1.2, contrastive_weight: 0.0, inner_weight: 0.5}}
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-4, betas: [0.9, 0.999], eps: 1.0e-8, weight_decay: 0.0,
  fused: true, warmup_steps: 0, schedule: constant, end_factor: 0.0}
ema: {_target_: training.ema.EMA, decay: 0.9999, warmup: false}
sampler: {_target_: diffusion.edm_sampler, num_steps: 40, sigma_min: 0.002, sigma_max: 80, rho: 7,
  S_churn: 0, S_min: 0, S_max: .inf, S_noise: 1}
guidance: {_target_: diffusion.CFG, guidance_scale: 1.0, guidance_interval: null, schedule: constant,
  num_channels: null}
""")
OPTIONS = [(group, p.stem) for group in GROUPS for p in sorted((ROOT / "configs" / group).glob("*.yaml"))]
WITH_PATH = ("latents", "latents_published", "imagenet256", "imagenet512", "coco256")


def built(*overrides):
    experiment = validated(*overrides)
    experiment.precond(experiment.meta_net)
    experiment.loss_node.bind()()
    experiment.sampler()
    return experiment.written, experiment.meta_net


@pytest.fixture
def latents(tmp_path):
    """A tiny latent folder; returns its path."""
    stored = np.zeros((4, 8, 16, 16))
    write_latents(tmp_path / "latents", stored, np.arange(4), kind="moments", num_classes=7)
    return tmp_path / "latents"


@pytest.mark.parametrize(("size", "lr", "deep"), [("tiny", 1e-3, 0), ("b_2", 1e-4, 0), ("xl_2", 1e-4, 1)])
def test_defaults_follow_the_size_of_the_network(size, lr, deep):
    for name, blocks in {"sra2": (1, 7), "repa": (3, 7), "irepa": (3, 7), "haste": (3, 7)}.items():
        config = composed(f"model/size={size}", f"alignment={name}", "optimizer=muon")
        assert (config.alignment.block, config.optimizer.lr) == (blocks[deep], lr)


def test_sampling_is_shifted_as_training():
    keys = ("diffusion=flow_shifted", "data=synthetic", "data.in_channels=768", "data.input_size=16")
    config, chosen = composed(*keys), composed("run=x", "sampler=sde", config_name="sample")
    request = complete(configuration.resolve(chosen, SampleConfig), Experiment.of_config(config))
    for times in (config.sampler.times, request.sampler["times"]):
        assert times["shift"] == config.diffusion.loss.shift == pytest.approx(6.93, abs=0.01)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_and_builds(group, option, latents):
    extra = [f"data.path={latents}"] if option in WITH_PATH else []
    extra += ["data=latents", f"data.path={latents}"] if (group, option) == ("ema", "latents") else []
    extra += ["model.inner_head=1"] if option == "internal" else []
    extra += ["train.milestone_every=${train.save_every}"] if option == "post_hoc" else []
    extra += ["evaluation.reference=REFERENCE.npz"] if option in ("adm", "adm_5k", "all", "coco") else []
    extra += ["sampler=heun"] if group == "sampler/times" else []
    extra += ["diffusion=ddpm", "sampler.solve_on=null"] if option == "respaced" else []
    extra += ["diffusion=ddpm"] if (group, option) == ("sampler", "ddpm") else []
    if option == "auto":
        (run := latents.parent / "run").joinpath("checkpoints/step_00000004").mkdir(parents=True)
        (run / "config.yaml").write_text(yaml.safe_dump(written()))
        (run / "manifest.json").write_text("{}")
        extra += [f"guidance.weak_run={run}"]
    config, _ = built(*extra, f"{group}={option}")
    assert config["run_name"] == "test"


@pytest.mark.parametrize("model, size", [("dit", "s_2"), ("sprint", "s_2"), *(("tread", s) for s in SIZES)])
def test_every_size_composes_and_builds(model, size):
    shape = ["data=synthetic", "data.input_size=32"]
    config, net = built(f"model={model}", f"model/size={size}", *shape)
    letter, _, patch_size = size.partition("_")
    widths = PUBLISHED_SIZES.get(letter, (128, 8, 4))  # tiny is not published
    assert tuple(config["model"][key] for key in ("hidden_size", "depth", "num_heads")) == widths
    assert config["model"]["patch_size"] == int(patch_size or 1)
    assert len(net.routes) == (model != "dit")
    assert config["method"] == model


@cache
def of_experiment(experiment, *keys):
    """The written configuration of an experiment, and its routes."""
    data = ["data.path=x"] if experiment.startswith(("imagenet", "coco")) else []
    needs_init = "from" in read_header(experiment) or experiment == "dense_finetune"
    init = ["train.init_from=x"] if needs_init else []
    config, net = built(f"experiment={experiment}", *data, *init, *keys)
    return config, net.routes


def job_of_sweep(choices, overrides, params=None):
    """Describe a job like Hydra; params: the swept keys of an experiment."""
    left_out = SimpleNamespace(exclude_keys=["model", "model/size", "data", "experiment", "seed"])
    return SimpleNamespace(
        runtime=SimpleNamespace(choices=choices),
        mode=RunMode.MULTIRUN,
        overrides=SimpleNamespace(task=overrides),
        job=SimpleNamespace(config=SimpleNamespace(override_dirname=left_out)),
        sweeper={"params": params},
    )


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_builds_takes_a_step_and_says_what_it_reproduces(experiment):
    config, _ = of_experiment(experiment)
    header = read_header(experiment)
    assert header.keys() >= {"command", "paper", "expected"} and all(map(all, header.values()))
    assert ("measured" in header) == ("hardware" in header)
    assert f" experiment={experiment} " in f"{header['command'][0]} "
    small = Experiment.of_config(OmegaConf.create(config))
    small = small.with_model({"hidden_size": 32, "num_heads": 4, "input_size": 8})
    net = small.net()
    precond, optimizer = small.precond(net), small.optimizer(net.named_parameters())
    x = torch.randn(2, *net.latent_shape)
    small.loss(net)(precond, x, net.null_labels(2)).mean().backward()
    optimizer.step(torch.tensor(0.0))
    assert all(p.isfinite().all() for p in net.parameters())
    assert all(p.grad is not None for p in net.final_layer.parameters())


TWINS = {experiment: read_header(experiment).get("twin") for experiment in EXPERIMENTS}


@pytest.mark.parametrize("experiment", [experiment for experiment, twin in TWINS.items() if twin])
def test_an_experiment_and_its_twin_differ_in_the_routes_alone(experiment):
    (twin,) = TWINS[experiment]
    routed, _ = deepcopy(of_experiment(experiment))
    dense, routes = deepcopy(of_experiment(experiment, twin) if "=" in twin else of_experiment(twin))
    assert routes == () and routed["model"]["routes"]
    method = "sprint" if "sprint" in experiment else "tread"
    assert (dense.pop("method"), routed.pop("method")) == ("dit", method)
    of_routes = ("routes", "router", "rejoin") if "sprint" in experiment else ("routes",)
    for config in (dense, routed):
        for key in of_routes:
            config["model"].pop(key)
    assert dense == routed


def test_every_published_row_has_a_twin_or_starts_from_one_that_has():
    twins = {twin for (twin,) in filter(None, TWINS.values())}
    for row in read_rows():
        header = read_header(row.experiment)
        assert {"twin", "from"} & header.keys() or row.experiment in twins, row.experiment
        for start in header.get("from", ()):
            experiment, *keys = start.split()
            of_experiment(experiment, *keys)
            assert experiment in TWINS


@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if "_sweep_" in name])
def test_jobs_of_a_sweep_are_the_published_rows(experiment, monkeypatch):
    ((key, values),) = yaml.safe_load((ROOT / f"configs/experiment/{experiment}.yaml").read_text())["hydra"][
        "sweeper"
    ]["params"].items()
    parser = OverridesParser.create()
    override = parser.parse_override(f"{key}={values}")
    jobs = [f"{key}={value}" for value in override.sweep_string_iterator()]
    rows = [row for row in read_rows() if row.experiment == experiment]
    assert [row.keys for row in rows] == [(job,) for job in jobs]
    names, config = set(), composed(f"experiment={experiment}", "data.path=x")
    for job in jobs:
        OmegaConf.update(config, key, parser.parse_override(job).value())
        Experiment.of_config(config.copy()).check()
        choices = {"model": "tread", "model/size": "b_2", "data": "imagenet256", "experiment": experiment}
        hydra = job_of_sweep(choices, [job, f"experiment={experiment}"], {key: values})
        monkeypatch.setattr(configuration.HydraConfig, "get", lambda hydra=hydra: hydra)
        monkeypatch.setenv("TREAD_SWEEP_COMMAND", f"-m experiment={experiment}")
        names.add(configuration._default_run_name(0))
    assert len(names) == len(jobs) and all(key in name for name in names)


def test_the_row_of_lightningdit_has_its_latents_and_times():
    experiment = validated("experiment=imagenet256_lightningdit_tread_80k", "data.path=x")
    net = experiment.meta_net
    assert net.latent_shape == (32, 16, 16) and net.num_tokens == 256
    sampler = experiment.sampler().keywords
    times = sampler["times"](FlowPath(), sampler["num_steps"])
    public = torch.linspace(0, 1, 250, dtype=torch.float64)  # from noise to data
    public = 0.3 * public / (1 + (0.3 - 1) * public)
    torch.testing.assert_close(times, 1 - public[:-1])


def test_the_stages_of_sprint_are_one_network():
    first, net = built("experiment=imagenet256_sprint_xl_2_400k", "data.path=x")
    second, full = built("experiment=imagenet256_sprint_xl_2_stage2", "data.path=x", "train.init_from=x")
    (window,), (of_all,) = net.routes, full.routes
    assert (window.start_layer_idx, window.end_layer_idx) == (2, 25)  # 2, 24, 2 blocks
    assert replace(window, selection_ratio=0) == of_all
    for config, ratio in ((first, 0.75), (second, 0)):
        assert config["model"]["routes"][0].pop("selection_ratio") == ratio
    assert first["model"] == second["model"]
    assert first["model"]["router"] == {"_target_": "routing.grid_router", "side": 2}
    assert first["model"]["rejoin"] == {"_target_": "models.rejoin.Fuse", "path_drop_prob": 0.1}
    assert first["model"]["block"]["_target_"] == "models.blocks.SprintBlock"
    assert first["diffusion"] == second["diffusion"]
    assert (second["optimizer"]["lr"], second["optimizer"]["warmup_steps"]) == (2e-4, 5000)
    assert second["train"].items() >= {"batch_size": 1024, "total_steps": 20_000, "grad_clip": 1.0}.items()


@pytest.mark.parametrize("size", ["s_2", "b_2", "l_2", "xl_2"])
def test_published_experiments_are_the_recipe_and_twins_but_for_routes(size):
    path = ("data.path=x",)
    names = (f"experiment=imagenet256_{model}_{size}_400k" for model in ("tread", "dit"))
    tread, dit = (written(name, *path) for name in names)
    assert tread == written("model=tread", f"model/size={size}", "data=imagenet256", *path)
    assert dit == written("model=dit", f"model/size={size}", "data=imagenet256", *path)
    route = {"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -4}
    assert (tread["model"]["routes"], dit["model"].pop("routes")) == ([route], [])
    published = PUBLISHED_SIZES[size.removesuffix("_2")]
    widths = dict(zip(("hidden_size", "depth", "num_heads"), published, strict=True))
    assert {group: dit[group] for group in RECIPE} == {**RECIPE, "model": RECIPE["model"] | widths}
    steps = {"total_steps": 400_000, "batch_size": 256, "grad_clip": None}
    losses = {"masked_loss": False, "kept_tokens_only": False, "reconstruction_weight": 0.0}
    assert dit["train"].items() >= (steps | losses).items()
    assert dit["routing"].items() >= {"schedule": "constant", "off_last_steps": None}.items()


@pytest.mark.parametrize("model", ["tread", "dit"])
def test_parity_turns_all_official_details_together(model):
    ours, official = (written(f"model={model}", f"parity={parity}") for parity in ("none", "official"))
    assert (ours.pop("decoding"), official.pop("decoding")) == ("rounded", "official")
    for key, values in {"init": ("adaln_zero", "xavier"), "fp32_after_route": (False, True)}.items():
        assert (ours["model"].pop(key), official["model"].pop(key)) == values
    assert ours == official
    for evaluation in (["evaluation=adm_5k", "evaluation.reference=x"], ["evaluation=digits"]):
        assert written(f"model={model}", "parity=official", *evaluation)["evaluation"]["labels"] == "random"


def test_the_model_group_is_the_signature_of_the_network():
    written_keys = set(written("data=scenes")["model"])
    assert written_keys - {"_target_"} == set(inspect.signature(DiT).parameters)
    of_captions = {"conditioning", "pool_text"}  # its option class has no key
    assert written_keys - set(written()["model"]) == of_captions


@pytest.mark.parametrize(
    ("node", "target"),
    [
        (RECIPE["model"], DiT),
        (RECIPE["diffusion"]["loss"], EDMLoss),
        (RECIPE["diffusion"]["precond"], EDMPrecond),
        (RECIPE["sampler"], edm_sampler),
    ],
)
def test_python_defaults_are_the_recipe(node, target):
    parameters = inspect.signature(target).parameters.items()
    defaults = {name: p.default for name, p in parameters if name in node and p.default is not p.empty}
    for part, module in (("block", "models.blocks"), ("router", "routing"), ("rejoin", "models.rejoin")):
        if part in defaults:
            defaults[part] = {"_target_": f"{module}.{defaults[part].__name__}"}
    assert len(defaults) >= len(node) - 4  # all but _target_ and the sizes
    assert node.items() >= defaults.items()


def test_the_command_line_wins_over_the_recipe_of_a_data_option():
    recipe, changes = ("data=imagenet256", "data.path=x"), ("optimizer.lr=3e-4", "train.total_steps=5")
    config = flatten(written(*recipe, "model/size=b_2", *changes))
    assert config.items() >= {"model.depth": 12, "train.total_steps": 5, "optimizer.lr": 3e-4}.items()


def test_a_latent_folder_gives_its_sizes(latents):
    model = written("data=latents", f"data.path={latents}")["model"]
    assert (model["input_size"], model["in_channels"], model["num_classes"]) == (16, 4, 7)


def test_items_of_the_route_list_are_overridden_by_number():
    assert written("model.routes.0.selection_ratio=0.7")["model"]["routes"][0]["selection_ratio"] == 0.7
    one = "model.routes=[{selection_ratio: 0.3, start_layer_idx: 1, end_layer_idx: -2}]"
    expected = {"selection_ratio": 0.3, "start_layer_idx": 1, "end_layer_idx": -2}
    assert written(one)["model"]["routes"] == [expected]


@pytest.mark.parametrize(
    ("file", "content", "key"),
    [
        ("optimizer/mine.yaml", "_target_: torch.optim.AdamW\nlrr: 1.0e-4", "lrr"),
        ("optimizer/mine.yaml", "_target_: torch.optim.AdamW\nlr: fast", "lr"),
        ("data/mine.yaml", "# @package _global_\ndefaults: [synthetic]\ntrain: {steps: 3}", "steps"),
        ("ema/mine.yaml", "_target_: training.ema.EMA\ndecay: 0.9\nwarm_up: true", "warm_up"),
    ],
)
def test_a_misspelt_or_mistyped_key_in_a_file_is_refused(tmp_path, file, content, key):
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(content)
    with pytest.raises((HydraException, OmegaConfBaseException, ValueError), match=key):
        validated(f"hydra.searchpath=[file://{tmp_path}]", f"{file.split('/')[0]}=mine")


def test_values_are_converted_to_the_types_of_the_signature():
    model = written("model.fp32_after_route=no", "model.mlp_ratio=3", "model.depth='8'")["model"]
    assert (model["fp32_after_route"], model["mlp_ratio"], model["depth"]) == (False, 3.0, 8)
    assert isinstance(model["mlp_ratio"], float)


def test_processes_must_divide_the_batch():
    with pytest.raises(ValueError, match=r"batch_size=32 must be a multiple of .* number of processes=3"):
        validated(num_processes=3)
    validated(num_processes=4)


@pytest.mark.parametrize("routes", [p.stem for p in (ROOT / "configs/model/routes").glob("*.yaml")])
def test_every_known_route_composes_at_a_depth_where_it_fits(routes):
    model = {"off": "dit", "sprint": "sprint"}.get(routes, "tread")
    config, net = built(f"model={model}", f"model/routes={routes}", "data=synthetic", "model/size=xl_2")
    expected = {"off": 0, "advanced": 3, "wan": 5}.get(routes, 1)
    assert len(net.routes) == len(config["model"]["routes"]) == expected


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_composes_and_builds(block):
    _, net = built(f"model/block={block}")
    assert isinstance(net.blocks[0], BLOCKS[block])
    assert (net.positions is None) == (block in ("dit", "self_logit", "rwkv"))


def test_ablation_arms_differ_only_in_what_their_name_says():
    names = ("dense", "tread", "no_removal", "kept_loss", "fp32_after_route", "token_drop", "masking")
    arms = {name: built(f"experiment=ablation_{name}")[0] for name in names}
    tread, masked = written("model=tread"), {"rejoin": {"_target_": "models.rejoin.Mask"}}
    reconstructed = {"kept_tokens_only": True, "reconstruction_weight": 0.1}
    route = {"selection_ratio": 0.5, "start_layer_idx": 0}
    to_end, before_end = ({"routes": [route | {"end_layer_idx": end}]} for end in (-1, -3))
    assert arms["dense"] == written("model=dit")
    for name, changes in {
        "tread": {},
        "no_removal": {"model": {"window": "context"}},
        "fp32_after_route": {"model": {"fp32_after_route": True}},
        "kept_loss": {"train": {"kept_tokens_only": True}},
        "token_drop": {"model": to_end, "train": {"kept_tokens_only": True}},
        "masking": {"model": before_end | masked, "train": reconstructed},
    }.items():
        expected = tread | {group: tread[group] | keys for group, keys in changes.items()}
        assert arms[name] == expected, name
        assert changes == {} or arms[name] != tread


PUBLISHED = {"experiment": "imagenet256_dit_xl_2_400k", "model": "dit", "data": "imagenet256"}


@pytest.mark.parametrize(
    ("choices", "name"),
    [
        ({}, "tread_tiny_digits_seed3"),
        (PUBLISHED | {"model/size": "xl_2"}, "imagenet256_dit_xl_2_400k_seed3"),
        (PUBLISHED | {"model/size": "l_2"}, "imagenet256_dit_xl_2_400k_l_2_seed3"),
        ({"experiment": "ablation_tread"}, "ablation_tread_tiny_digits_seed3"),
        ({"parity": "official"}, "tread_tiny_digits_parity_seed3"),
        ({"parity": "none"}, "tread_tiny_digits_seed3"),
        ({"guidance": "cfg", "model/router": "norm"}, "tread_tiny_digits_seed3_guidance-cfg_router-norm"),
        ({"guidance": "none", "tracker": "wandb"}, "tread_tiny_digits_seed3"),
        ({"data": "scenes", "model/conditioning": "prefix"}, "tread_tiny_scenes_seed3"),
        ({"data": "scenes", "model/conditioning": "class"}, "tread_tiny_scenes_seed3_conditioning-class"),
        ({"data": "coco256", "optimizer": "adamw"}, "tread_tiny_coco256_seed3"),
    ],
)
def test_names_of_runs_tell_them_apart(monkeypatch, choices, name):
    chosen = {"model": "tread", "model/size": "tiny", "data": "digits", "experiment": None, **choices}
    overrides = SimpleNamespace(task=[f"{group}={choice}" for group, choice in choices.items()])
    hydra = SimpleNamespace(runtime=SimpleNamespace(choices=chosen), mode=None, overrides=overrides)
    monkeypatch.setattr(configuration.HydraConfig, "get", lambda: hydra)
    assert configuration._default_run_name(3) == name


@pytest.mark.parametrize(
    ("line", "job", "name"),
    [
        ("-m model=dit,tread seed=0,1", "model=dit seed=1", "tread_tiny_digits_seed3"),
        ("-m seed=0,1 optimizer.lr=1e-4,3e-4", "seed=1 optimizer.lr=1e-4", "{}_optimizer.lr-1e-4"),
        ("-m train.batch_size=8 +a=1,2", "train.batch_size=8 +a=2", "{}_-a-2_{}"),
        ("-m 'x=[1,2],[3,4]' 'y=glob(*)'", "x=[3,4] y=b", "{}_x-3-4-y-b_{}"),
        ("-m train.batch_size=8", "searched=1.5 train.batch_size=8", "{}_searched-1.5_{}"),
    ],
)
def test_jobs_of_a_sweep_are_named_by_what_is_swept(monkeypatch, line, job, name):
    """Whole, with a hash of the others."""
    chosen = {"model": "tread", "model/size": "tiny", "data": "digits", "experiment": None}
    params = {"searched": "interval(1, 2)", "constant": "1"}
    monkeypatch.setattr(configuration.HydraConfig, "get", lambda: job_of_sweep(chosen, job.split(), params))
    monkeypatch.setenv("TREAD_SWEEP_COMMAND", line)
    hashed = hashlib.sha256(b"x=[3,4]" if "x=" in job else b"train.batch_size=8").hexdigest()[:8]
    assert configuration._default_run_name(3) == name.format("tread_tiny_digits_seed3", hashed)


@pytest.mark.parametrize(
    "jobs",
    [
        ("data.path=lat_a/x", "data.path=lat_a-x", "data.path=lat_a x", "data.path=lat_a//x"),
        ("a=-1", "a=1", "a='-1'"),
        ("a=[1,2]", "a=[1-2]", "a=1-2"),
        ("optimizer.lr=1e-4", "optimizer.lr=1e4", "optimizer.lr=1e-05"),
        ("a=x-b-y b=z", "a=x b=y-b-z"),
        ("a=é", "a=è", "a=e"),
    ],
)
def test_jobs_that_differ_in_any_sign_have_names_of_their_own(jobs):
    swept = {"a", "b", "data.path", "optimizer.lr"}
    names = [configuration._sweep_label(re.split(r" (?=b=)", job), set(), swept) for job in jobs]
    assert len(set(names)) == len(jobs)
    assert all(re.fullmatch(r"[\w.-]+", name) for name in names)


def test_the_router_is_as_configured():
    _, net = built("model/router=norm", "model.router.weight=0.5")
    assert (net.router.func, net.router.keywords) == (norm_router, {"weight": 0.5})


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (lambda x, num_kept: x, r"model\.router: .*unexpected keyword argument 'force_keep'"),
        (lambda x, num_kept, **options: x @ torch.zeros(64, 1), r"model\.router: .* \(64x128 and 64x1\)"),
        (lambda x, num_kept, **options: torch.arange(num_kept), r"here \(1, 2\): it returned \(2,\)"),
    ],
)
def test_a_router_of_ones_own_is_tried_before_the_run(router, message):
    """It gets tokens of the network's width, so that a router with weights works."""
    experiment = validated("model=tread")
    experiment.model_node.arguments["router"] = SimpleNamespace(bind=lambda: router)
    with pytest.raises(ValueError, match=message):
        experiment.check()


def test_the_loss_of_kept_tokens_is_built_when_configured():
    for arm, kind in (("tread", EDMLoss), ("kept_loss", KeptTokensLoss), ("masking", KeptTokensLoss)):
        experiment = validated(f"experiment=ablation_{arm}")
        loss = experiment.loss(experiment.meta_net)
        assert type(loss) is kind
    assert loss.reconstruction_weight == 0.1


def test_the_schema_of_routing_and_the_plan_have_the_same_defaults():
    """They are two because the schema may not import routing, and the plan may not know of a schema."""
    plan = {field.name: field.default for field in fields(RoutePlan) if field.default is not MISSING}
    assert asdict(RoutingConfig()) == plan


def test_the_loss_of_kept_tokens_needs_a_backbone_with_a_router():
    experiment = validated("train.kept_tokens_only=true")
    del experiment.model_node.arguments["router"]
    with pytest.raises(ValueError, match="kept_tokens_only=true needs model/router=random"):
        check_rules(experiment, num_processes=1)
