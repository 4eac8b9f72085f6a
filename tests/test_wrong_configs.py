"""Wrong values of every key and broken rules across keys: each gives one line, and no device is touched."""

import hashlib
import io
import os
from contextlib import chdir, redirect_stderr
from functools import cache, wraps
from unittest import mock

import numpy as np
import pytest
import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

import fid
import sample
import train
from builders import sampling
from builders.config import SCHEDULE_KEYS
from data import convert, encode
from examples import finetune
from runtime.config import run_main
from runtime.nodes import read_nodes
from runtime.provenance import flatten
from runtime.targets import CONFIGS
from tests.routing.families import FAMILIES
from tests.runs import composed, validated, written

PROGRAMS = {
    program.__name__.rpartition(".")[2]: program
    for program in (train, sample, fid, encode, convert, finetune)
}

POSITIVE, NOT_NEGATIVE, FINITE = "must be greater than 0", "must not be negative", "must be a finite number"
BELOW_ONE, CHOICE = "must be in [0, 1)", "must be one of "
WRONG_TYPE = ("must be of type", "could not be converted to", "is not a valid bool", "Cannot convert")
OTHER_TARGET = "as YAML files in configs/ say: to use"
SYNTHETIC, IMAGENET = "data=synthetic", "data=imagenet256 data.path=x"
ADM = "evaluation=adm_5k evaluation.reference=x"
RUN = "run=r reference=file"
FILES = "samples=file reference=file"
MAKE = "mode=reference images=file out=new.npz"
FINETUNE = "transformer=flux inputs=flux"
ONE_ROUTE = "routes=[{selection_ratio:0.5,start_layer_idx:1,end_layer_idx:-2}]"
ENCODE, CONVERT = "source=file out=new", "format=repa source=file out=new"

# Shapes of what a small FLUX is fine-tuned on.
INPUTS = {"latents": (80, 16, 8, 8), "text": (80, 5, 48), "pooled": (80, 24), "masks": (80, 8, 8)}

# Overrides that complete the request of a program or of an option of a group.
COMPLETE = {
    "train": "", "sample": "run=r", "fid": FILES, "encode": ENCODE, "convert": CONVERT,
    "finetune": FINETUNE, "data=imagenet256": IMAGENET, "evaluation=adm": ADM,
    "evaluation=all": "evaluation=all evaluation.reference=x", "data=coco256": "data=coco256 data.path=x",
    "evaluation=coco": "evaluation=coco evaluation.reference=x", "guidance=auto": "guidance=auto guidance.weak_run=r",
}  # fmt: skip
# (programs, the rule in the message, values of single keys that break it). Keys without a value here or in KEYS
# are only checked for their type.
VALUES = [
    ("train", POSITIVE, "model.input_size=0 model.in_channels=0 model.depth=0 model.num_heads=0 model.mlp_ratio=0"),
    ("train", POSITIVE, "data.num_entries=0 data.num_components=0 data.num_images=0"),
    ("train", POSITIVE, "diffusion.sigma_data=0 diffusion.loss.P_std=0 diffusion.loss.shift=0 diffusion.loss.t_min=0"),
    ("train", POSITIVE, "sampler.sigma_min=0 sampler.rho=0 sampler.rtol=0 sampler.atol=0 sampler.t_min=0"),
    ("train", POSITIVE, "sampler.times.shift=0 sampler.times.rho=0 sampler.times.sigma_min=0 sampler.times.M=0"),
    ("train", POSITIVE, "sampler.times.C_1=0 guidance.num_channels=0 evaluation.batch_size=0 train.total_steps=0"),
    ("train", POSITIVE, "train.batch_size=0 train.log_every=0 train.save_every=0 train.keep_last=0 train.max_skipped_steps=0"),
    ("train", f"{POSITIVE}, or null", "train.micro_batch_size=0 train.grad_clip=0 train.eval_every=0 train.milestone_every=0"),
    ("train", FINITE, "diffusion.loss.P_mean=inf optimizer.lr=nan train.max_time_sec=inf"),
    ("train", OTHER_TARGET, "sampler._target_=os.system"),
    ("train", WRONG_TYPE, "model.window=[1] train.sample_every=[1] train.masked_loss=[1] sweep_metric=[1]"),
    ("train", WRONG_TYPE, "data.text.num_tokens=[1] data.text.vocab_size=[1] data.text.num_features=[1]"),
    ("sample fid", WRONG_TYPE, "prompt=[1]"),
    ("encode convert", WRONG_TYPE, "hflip=[1]"),
    ("finetune", WRONG_TYPE, "parallel=[1]"),
    ("train", NOT_NEGATIVE, "seed=-1 seed=4294967296 data.seed=-1 model.num_prefix_tokens=-1 diffusion.loss.cosine_weight=-1"),
    ("train", NOT_NEGATIVE, "optimizer.lr=-1 optimizer.weight_decay=-1 optimizer.warmup_steps=-1 optimizer.end_factor=-1 train.num_workers=-1"),
    ("train", NOT_NEGATIVE, "sampler.S_churn=-1 sampler.S_min=-1 sampler.S_noise=-1 sampler.times.C_2=-1 sampler.norm=-1"),
    ("train", BELOW_ONE, "model.class_dropout_prob=1 model.rejoin.path_drop_prob=1 model.routes.0.selection_ratio=1"),
    ("train", BELOW_ONE, "diffusion.loss.contrastive_weight=1 ema.decay=1 guidance.strong_ratio=1 guidance.weak_ratio=1"),
    ("train", CHOICE, "method=sit model.init=zero model.attention=flash routing.schedule=sine optimizer.schedule=sine sampler.coefficient=square"),
    ("train", CHOICE, "routing.force_keep_overflow=drop diffusion.loss.distribution=normal sampler.solve_on=ddpm"),
    ("train", CHOICE, "sampler.solver=rk4 sampler.last_step=tweedie sampler.variance=medium guidance.schedule=sine"),
    ("train", CHOICE, "guidance.masks=new guidance.ratio_schedule=sine evaluation.labels=alphabetical"),
    ("train", CHOICE, "train.mixed_precision=fp16 train.compile=maybe train.keep_freed_memory=maybe train.parallel=tensor"),
    ("train sample fid", CHOICE, "decoding=jpeg"),
    ("sample fid", CHOICE, "labels=alphabetical mixed_precision=fp16 compile=maybe"),
    ("fid", CHOICE, "mode=scores suite=dam"),
    ("encode", CHOICE, "conditioning_type=depth"),
    ("encode finetune", CHOICE, "mixed_precision=fp16"),
    ("convert", CHOICE, "format=zip stored_as=jpeg"),
    ("finetune", CHOICE, "train=loha"),
    ("train", "must be in (0, 1]", "model.router.weight=1.5 sampler.midpoint=0"),
    ("train", "must be in (0, 1)", "sampler.times.epsilon_s=1"),
    ("train", "must be in [0, 1000)", "sampler.times.j_0=1000"),
    ("train", "must be in [1, 1000]", "routing.off_last_steps=1001"),
    ("train", "must be at least 2", "guidance.num_levels=1"),
    ("train", "must be two noise levels [LOW, HIGH] or null", "guidance.guidance_interval=[1] guidance.guidance_interval=0.5"),
    ("train", "must be greater than sampler.sigma_min=0.002", "sampler.sigma_max=0.001"),
    ("train", "must be greater than sigma_min=0.02", "sampler.times.sigma_max=0.01"),
    ("train", "must be data.num_classes=10", "model.num_classes=7"),
    ("train", "must divide model.input_size=8", "model.patch_size=3"),
    ("train", "must divide model.hidden_size=128", "model.num_heads=7"),
    ("train", "must divide the side of the token grid, 8", "model.router.side=3"),
    ("train", "must be at most 1000", "model.depth=2000"),
    ("train", "(layer 5) must not come after end_layer_idx=-4 (layer 4) at depth=8", "model.routes.0.start_layer_idx=5"),
    ("train", "must be in [-8, 7] for depth=8", "model.routes.0.end_layer_idx=8"),
    ("train", "needs routing.schedule=linear or cosine", "routing.start_factor=0.5"),
    ("train", "must not be empty", "run_name='' output_dir=''"),
    ("train", "must be a name below runs/: set output_dir for another folder", "run_name=../elsewhere run_name=/elsewhere"),
    ("train", "is not a run directory (no nowhere/config.yaml)", "guidance.weak_run=nowhere"),
    ("train", "not found: see `python -m evaluation.fetch`", "evaluation.reference=nowhere"),
    ("train", "not found: give a weights file, a checkpoint folder or a run folder", "train.init_from=nowhere"),
    ("sample fid", POSITIVE, "num_samples=0 batch_size=0"),
    ("sample fid", "is not a run directory (no nowhere/config.yaml)", "run=nowhere"),
    ("sample fid", "not found: run=r has steps 4", "checkpoint=5"),
    ("sample fid", "must not be given with run: the run has it", "latents=x objective=edm"),
    ("sample fid", f"{NOT_NEGATIVE}, and the last seed less than 4294967296", "first_seed=-1 first_seed=4294967290"),
    ("sample fid", "must be in [0, 9]", "class_label=10"),
    ("sample fid", NOT_NEGATIVE, "guidance_scale=-1"),
    ("sample fid", FINITE, "guidance_scale=nan"),
    ("sample fid", "must be in [1, 100000]", "num_steps=0"),
    ("sample", POSITIVE, "grid_columns=0"),
    ("sample", "must end in .npz", "out=x.png"),
    ("fid", POSITIVE, "detector_batch_size=0"),
    ("fid", "must end in .json", "out=scores.txt"),
    ("encode", POSITIVE, "resolution=0"),
    ("convert", POSITIVE, "num_classes=0 scale=-1 std=0"),
    ("encode convert", NOT_NEGATIVE, "num_held_out=-1"),
    ("encode convert", "not found", "source=nowhere"),
    ("encode convert", "exists: move it away", "out=file"),
    ("encode", "not found", "masks=nowhere"),
    ("convert", "may have another scale than the assumed one: also give scale=NUMBER shift=NUMBER", "encoder=other"),
    ("finetune", POSITIVE, "rank=0 lr=0 shift=0 batch_size=0 total_steps=0 log_every=0 eval_every=0 save_every=0"),
    ("finetune", NOT_NEGATIVE, "seed=-1"),
    ("finetune", BELOW_ONE, "mask_area=1"),
    ("finetune", "is a PixArtTransformer2DModel, must be one of FluxTransformer2DModel, ", "transformer=pixart"),
    ("finetune", "is not a transformer in the format of diffusers: ", "transformer=nowhere"),
    ("finetune", "has no latents.npy", "inputs=r"),
    ("finetune", "is not empty and not a run: choose another folder", "output_dir=r"),
    ("finetune", "must be a list", "routes=5"),
    ("finetune", "is not a SimpleTuner configuration: ", "tread_config=nowhere"),
    ("finetune", "must be less than the 80 rows of flux", "num_held_out=80"),
]  # fmt: skip
# The same with other keys set first: (program, overrides, the last of which is wrong, rule).
KEYS = [
    ("train", f"{SYNTHETIC} data.num_held_out=1024", "must be in [0, 1023]"),
    ("train", f"{SYNTHETIC} data.num_entries=2000000", "must give at most 268435456 numbers"),
    ("train", "model.text=[1]", "must be the shape of captions"),
    ("train", "evaluation=all evaluation.reference=x evaluation.encoders=1", WRONG_TYPE),  # a list of texts
    ("train", "routing.schedule=linear routing.end_factor=2", "times selection_ratio=0.5 of the route of blocks 2 to 4 must be in"),
    ("train", "routing.schedule=linear routing.end_factor=0 routing.num_levels=1", "must be at least 2"),
    ("train", "sampler.S_min=2 sampler.S_max=1", "must be greater than sampler.S_min=2.0"),
    ("train", "alignment=sra2 alignment.tokens=some", "must be one of all, kept"),
    *(("train", f"alignment=sra2 alignment.{key}=0", f"{POSITIVE}, or null") for key in ("until_step", "width")),
    *(("train", f"alignment=sra2 alignment.{key}=0", POSITIVE) for key in ("weight", "num_layers")),
    *(("train", f"sampler={name} sampler.num_steps=0", "must be in [1, 100000]") for name in ("edm", "heun", "sde")),
    ("train", "sampler.num_steps=1000000", "must be in [1, 100000]"),
    ("train", "sampler=ddpm sampler.variance=small sampler.num_steps=1001", "must be in [1, 1000]"),
    ("train", "sampler=heun sampler.times.t_min=1", "must be in [0, 0.98"),
    ("train", "sampler=heun diffusion=flow sampler.times.t_max=2", "must be in (0, 1.0], the range of the path"),
    ("train", "train.init_from=file train.init_from_objective=noise", "must be one of edm, flow, sit, ddpm"),
    ("train", "train.kept_tokens_only=true train.reconstruction_weight=-1", NOT_NEGATIVE),
    ("sample", "checkpoint=file objective=noise", "must be one of edm, flow, sit, ddpm"),
    ("fid", f"{MAKE} resolution=0", POSITIVE),
    ("finetune", f"{FINETUNE} {ONE_ROUTE} router=nearest", "must be one of random, norm"),
    ("finetune", f"{FINETUNE} {ONE_ROUTE} off_last_steps=1001", "must be in [0, total_steps=1000]"),
]  # fmt: skip
# (program, suggested key, misspelt keys).
SUGGESTIONS = [
    ("train", "train.total_steps", "train.total_stepz=3"),
    ("train", "model", "modle=dit"),
    ("train", "model/size", "model/sise=s_2"),
    ("train", "sampler.S_churn", "sampler.S_chrn=2"),
    ("train", "sampler.num_steps", "sampler.steps=2"),
    ("train", "optimizer.lr", "train.lr=2 optimiser.lr=2 lr=1"),
    ("train", "model.routes.0.selection_ratio", "model.route.0.selection_ratio=0.3 routes.0.selection_ratio=0.3"),
    ("train", "sampler.rho", "rho=1"),
    ("sample", "num_steps", "sampler.num_steps=2 steps=2"),
    ("sample", "num_samples", "num_sampels=3"),
]  # fmt: skip

# (program, overrides, beginning of the line): rules across keys, and overrides that are not values.
RULES = [
    ("train", "optimizer.betas=[0.9]", "optimizer: "),
    ("train", "experiment=ablation_masking diffusion=flow", "train.reconstruction_weight=0.1 needs diffusion=edm"),
    ("train", "train.reconstruction_weight=0.1", "train.reconstruction_weight=0.1 needs train.kept_tokens_only=true"),
    ("train", "model/router=norm train.kept_tokens_only=true", "train.kept_tokens_only=true needs model/router=random"),
    ("train", "model.in_channels=3", "the model takes latents of (3, 8, 8), but the data have (1, 8, 8)"),
    ("train", "model/conditioning=prefix", "model/conditioning=prefix needs data with captions"),
    ("train", "model=sprint model.routes=[]", "model.routes=[]: SPRINT training requires you to configure the routes, e.g. model/rou"),
    ("train", "model.rejoin=5", "model.rejoin=5 must name a _target_"),
    ("train", "model=dit guidance=path_drop", "guidance=path_drop needs a network with routes (model=sprint)"),
    ("train", "model=dit model/routes=paper", "model.routes=[{'selection_ratio': 0.5, "),
    ("train", "model.routes.0.selection_ratio=???", "model.routes.0.selection_ratio must be given, as KEY=VALUE"),
    ("train", "+tracker.mode=online", "tracker={'mode': 'online'} must name a _target_"),
    ("train", "data=latents_published", "data.path must be given, as KEY=VALUE (a latent folder"),
    ("train", "model.routes=half", "model.routes=half must be a list of routes, each {KEY: VALUE, ...}; [] for none"),
    ("train", "model.routes=[5]", "model.routes=[5] must be a list of routes"),
    ("train", "model/routes=advanced model.routes.1.end_layer_idx=5", "model.routes.1 (layers 4..5) and model.routes.2 (layers 4"),
    ("train", "model.routes.0.selection_ratio=0.001", "selection_ratio=0.001 lets none of 64 tokens bypass"),
    ("train", "model.hidden_size=30 model.num_heads=15", "model.hidden_size=30 must be a multiple of 4 for the position table"),
    ("train", "model/block=modern model.hidden_size=12", "model.hidden_size / model.num_heads=3 must be a multiple of 4 for"),
    ("train", f"{SYNTHETIC} data.num_classes=-1", "model.num_classes=-1 must not be negative"),
    ("train", "routing.schedule=linear", "routing.schedule=linear needs routing.end_factor"),
    ("train", "train.reduce_dtype=bf16", "train.reduce_dtype=bf16 does not apply to train.parallel=ddp"),
    *(("train", f"sampler={name} sampler/times=respaced", "sampler/times=respaced needs diffusion=ddpm, and sampler=heun")
      for name in ("heun", "euler", "heun sampler.solve_on=edm")),
    ("train", "sampler=ddpm", "sampler.variance=learned needs diffusion=ddpm: use sampler.variance=small"),
    ("train", "diffusion=ddpm model.learn_sigma=false", "sampler.variance=learned needs model.learn_sigma=true: use sampler."),
    ("train", "diffusion=flow sampler=sde sampler.coefficient=sbdm", "sampler.coefficient=sbdm diverges at t=1: "),
    ("train", "guidance.num_channels=2", "guidance.num_channels=2 must be at most 1"),
    ("train", "guidance.guidance_interval=[0,.inf]", "guidance.guidance_interval=[0, '.inf'] must be two noise levels"),
    ("train", "guidance=auto guidance.weak_run=r guidance.weak_checkpoint=5", "guidance.weak_run=r: checkpoint=5 not found"),
    ("train", "evaluation=digits train.save_every=300", "train.eval_every=500 must be a multiple of train.save_every=300"),
    ("train", "train.micro_batch_size=5", "train.batch_size=32 must be a multiple of train.micro_batch_size=5"),
    ("train", "train.init_from=file", "train.init_from=file does not say what it predicts: give "),
    ("train", "train.init_from_objective=edm", "train.init_from_objective=edm does not apply without train.init_from"),
    ("train", "train.init_from_label_table=false", "train.init_from_label_table=false does not apply without train.init_from"),
    ("train", "model.class_dropout_prob=0 guidance=cfg", "guidance.guidance_scale=1.5 must be 1 for a network whose "),
    ("train", "train.init_from=own train.init_from_objective=flow", "train.init_from_objective=flow must not be given fo"),
    ("train", "~train", "train must not be removed"),
    ("train", "~train.batch_size", "~train.batch_size: TrainConfig (DictConfig) does not support deletion"),
    ("train", "~data.num_classes", "model.num_classes takes its value from data.num_classes, which is missing"),
    ("train", "~model.depth", "model.depth must be given: DiT needs it"),
    ("train", "~sampler", "sampler={} must name a _target_"),
    ("train", "diffusion=flow sampler.times=uniform", "sampler.times=uniform must name a _target_"),
    ("sample", "run=r sampler=heun sampler.times=uniform", "sampler.times=uniform must name a _target_"),
    ("train", "++train.total_stepz=3", "train.total_stepz=3 is not known: did you mean total_steps?"),
    ("train", "++model.hiden_size=3", "model.hiden_size=3 is not known: did you mean hidden_size?"),
    ("train", "qqqq=2", "qqqq is not known"),
    ("train", "optimizer=adam", "optimizer=adam is not known: did you mean adamw?"),
    ("train", "optimizer=lion", "optimizer=lion must be one of adamw, adamw_by_width, muon, sgd"),
    ("train", "experiment=imagenet256_tread_b_2", "experiment=imagenet256_tread_b_2 is not known: did you mean imagenet256_tr"),
    ("train", "sampler=dopri5 sampler.S_churn=20", "sampler.S_churn needs sampler=edm or sampler=heun on the command line"),
    ("train", "train=5", "train=5: is a group of keys, set one by one"),
    ("train", "train.total_steps=null", "train.total_steps=null: field 'train.total_steps' is not Optional"),
    ("train", "train.total_steps", "train.total_steps cannot be read: must be KEY=VALUE"),
    ("train", "model.routes[0].selection_ratio=0.3", "model.routes[0].selection_ratio=0.3 cannot be read: must be KEY=VALUE"),
    ("train", "seed=0,1", "Ambiguous value for argument 'seed=0,1'"),
    ("train", "optimizer.betas=[0.9, 0.99]", "optimizer.betas=[0.9, cannot be read: must be KEY=VALUE without spaces"),
    ("train", "sampler=true", "Config group override must be a string or a list. Got bool"),
    ("train", "model=dit --seed=1", "--seed=1 is not an option (see --help): set keys without dashes, as seed=1"),
    ("train", "model.routes.1.selection_ratio=0.3", "model.routes.1.selection_ratio=0.3: the list has no item with this index"),
    ("train", "model.routes.x=0.3", "'x' is not an index of a list: use 0, 1, ..."),
    ("sample", "num_samples=3", "run=FOLDER or checkpoint=FILE must be given"),
    ("sample", "checkpoint=nowhere.pt", "checkpoint=nowhere.pt is not a file: give a file of weights, or run=FOLDER"),
    ("sample", "run=r sampler=edmm", "sampler=edmm is not known: did you mean edm?"),
    ("sample", "run=r sampler.S_churn=20", "sampler.S_churn needs sampler=edm or sampler=heun on the command line"),
    ("sample", "run=r sampler=dopri5 num_steps=5", "num_steps=5 is not known: adaptive_sampler takes "),
    ("sample", "run=empty", "run=empty has no checkpoint yet"),
    ("sample", "run=unconditional class_label=0", "class_label=0 must be null for an unconditional network (num_classes=0)"),
    ("sample", "run=unconditional guidance_scale=2", "guidance_scale=2.0 must be 1 for an unconditional network"),
    ("fid", f"{FILES} suite=none", "suite=none must be one of adm, adm_5k, all, coco, digits, glyphs, scenes"),
    ("fid", "samples=file", "reference must be given for scoring samples in files"),
    ("fid", f"{RUN} samples=file", "samples=file does not apply to scoring a network"),
    ("fid", f"{FILES} suite=digits kid=true", "kid=True does not apply to suite=digits"),
    ("fid", f"{MAKE} num_samples=5", "num_samples=5 does not apply to mode=reference"),
    ("fid", "reference=file samples=r", "samples=r is a folder, which may contain older images"),
    ("fid", "mode=reference images=file", "out must be given for mode=reference"),
    ("encode", "source=file out=new conditioning_type=segmentation", "conditioning_type=segmentation needs masks=FOLDER"),
    ("convert", f"{CONVERT} shift=0", "scale and shift must be given together"),
    ("convert", f"{CONVERT} scale=2", "scale and shift must be given together"),
    ("convert", "source=file", "format, out must be given, as KEY=VALUE"),
    ("finetune", f"{FINETUNE} tread_config=file {ONE_ROUTE}", "tread_config=file and routes=[{'selection_ratio': 0.5, "),
    ("finetune", f"{FINETUNE} off_last_steps=1", "off_last_steps=1 needs routes; without routes all steps are dense"),
    ("finetune", f"{FINETUNE} routes=fast", "routes=fast must be one of advanced, balanced, basic, high_res, lora, masked, "),
    ("finetune", f"{FINETUNE} routes=[{{selection_rate:0.5}}]", "routes.0.selection_rate=0.5 is not known: did you mean "),
    ("finetune", f"{FINETUNE} {ONE_ROUTE.replace('-2', '9')}", "routes.0.end_layer_idx=9 must be in [-7, 6] for depth=7"),
    ("finetune", "transformer=flux inputs=without", "inputs=without has no pooled.npy, which FluxTransformer2DModel needs"),
    ("finetune", "transformer=flux inputs=unequal", "inputs=unequal has arrays of different lengths: {'latents': 80, "),
    ("finetune", "transformer=flux inputs=damaged", "damaged/latents.npy is missing, truncated or not an .npy file"),
    ("sample", "run=unknown", "unknown/config.yaml: speed: Key 'speed' not in 'Config'"),
    ("sample", "run=older", "older/config.yaml: seed is missing: another version of this code wrote it"),
]  # fmt: skip

# Groups whose options have different keys.
GROUPS = ["data", "evaluation", "tracker", "model/router", "model/rejoin", "diffusion", "sampler", "guidance"]
GROUPS += ["optimizer", "ema"]


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Change to a folder with some files, and runs that only have a configuration and empty checkpoints."""
    folder = tmp_path_factory.mktemp("wrong")
    runs = {"r": [], "empty": [], "unconditional": [SYNTHETIC, "data.num_classes=0"]}
    for name, overrides in runs.items():
        checkpoint = folder / name / "checkpoints" / ("" if name == "empty" else "step_00000004")
        checkpoint.mkdir(parents=True)
        (folder / name / "config.yaml").write_text(yaml.safe_dump(written(*overrides)))
        (folder / name / "manifest.json").write_text('{"data": {"manifest": {}}}')
        if name != "empty":
            (checkpoint / "ema.safetensors").touch()
            (checkpoint / "SHA256SUMS").write_text(f"{hashlib.sha256().hexdigest()}  ema.safetensors\n")
    spoilt = {"unknown": ("seed: 0", "speed: 9"), "older": ("seed: 0\n", "")}
    for name, (old, new) in spoilt.items():
        (folder / name).mkdir()
        config = (folder / "r/config.yaml").read_text()
        assert old in config
        (folder / name / "config.yaml").write_text(config.replace(old, new))
        (folder / name / "manifest.json").write_text("{}")
    for name in ("flux", "pixart"):
        FAMILIES[name].build().save_config(folder / name)
    for name in ("flux", "without", "damaged", "unequal"):
        (folder / name).mkdir(exist_ok=True)
        for array, shape in INPUTS.items():
            np.save(folder / name / f"{array}.npy", np.zeros(shape, dtype=np.float32))
    (folder / "without/pooled.npy").unlink()
    (folder / "damaged/latents.npy").write_bytes(b"not an array")
    np.save(folder / "unequal/text.npy", np.zeros((79, 5, 12)))
    (kept := folder / "own/checkpoints/step_00000004").mkdir(parents=True)
    for file in (folder / "file", kept / "ema.safetensors", kept / "SHA256SUMS"):
        file.touch()
    with chdir(folder):
        yield folder


def refusal(program, overrides):
    """Start a program with overrides that it refuses, and return what it prints."""
    arguments = overrides.split()
    name, schemas = "config" if program == "train" else program, ConfigStore.instance().repo
    others = [key for key in schemas if key.endswith("_schema.yaml") and not key.startswith(program)]
    kept = {key: node for key, node in schemas.items() if key not in others}
    with (
        mock.patch.dict(schemas, kept, clear=True),  # as in a process of this program
        mock.patch.dict(os.environ),
        mock.patch("sys.argv", [program, *arguments]),
        mock.patch("runtime.machine.PartialState", side_effect=AssertionError("a device is touched")),
        redirect_stderr(io.StringIO()) as output,
        pytest.raises(SystemExit) as end,
    ):
        main = PROGRAMS[program].main
        run_main(wraps(main)(lambda: main(composed(*arguments, config_name=name))))
    assert end.value.code == 1
    return output.getvalue()


def line_of(program, overrides):
    output = refusal(program, overrides)
    assert output.startswith("error: ")
    assert output.index("\n") == len(output) - 1
    return output.removeprefix("error: ").rstrip("\n")


@cache
def keys_of(program):
    """Map every key of a program to the options that have it, with the overrides they need."""
    choices, name = [program], program
    if program == "train":
        files = [file for group in GROUPS for file in sorted((CONFIGS / group).glob("*.yaml"))]
        choices += [f"{file.parent.relative_to(CONFIGS)}={file.stem}" for file in files]
        choices, name = [*choices, "sampler=heun sampler/times=rho"], "config"
    keys = {}
    for choice in choices:
        config = OmegaConf.to_container(composed(*choice.split()[choice == program :], config_name=name))
        if program == "train":
            config["model"]["routes"] = {str(i): route for i, route in enumerate(config["model"]["routes"])}
        for key, value in flatten(config).items():
            if value != {}:
                keys.setdefault(key, COMPLETE.get(choice, choice))
    return keys


def key_of(overrides):
    """The key of the last override."""
    return overrides.split()[-1].partition("=")[0]


def completed(program, override):
    """A request with this override; one of KEYS is complete."""
    if " " in override:
        return override
    is_of_run = program == "fid" and key_of(override) in keys_of("sample")
    return f"{RUN if is_of_run else keys_of(program)[key_of(override)]} {override}"


VALUE_ROWS = KEYS + [
    (program, override, rule)
    for programs, rule, values in VALUES
    for program in programs.split()
    for override in values.split()
]
BY_HAND = {(program, key_of(overrides)) for program, overrides, _ in VALUE_ROWS}
BY_HAND |= {("train", "optimizer.betas"), ("train", "data.text")}  # a list, a dictionary
RULE_ROWS = RULES + [
    (program, f"{COMPLETE[program]} {override}", f"{key_of(override)} is not known: did you mean {meant}?")
    for program, meant, misspelt in SUGGESTIONS
    for override in misspelt.split()
]


@pytest.mark.parametrize(("program", "overrides", "rule"), VALUE_ROWS)
def test_a_wrong_value_is_reported_with_key_value_and_rule(program, overrides, rule):
    key, _, value = overrides.split()[-1].partition("=")
    told, _, rest = line_of(program, completed(program, overrides)).partition("=")
    assert told == key
    assert rest.startswith((value, repr(value)))
    assert any(words in rest for words in ((rule,) if isinstance(rule, str) else rule))


@pytest.mark.parametrize("program", PROGRAMS)
def test_other_keys_take_no_value_of_another_type_and_no_other_target(program):
    """A list is of another type for each. It is set after Hydra has composed, which takes long."""
    for key, choice in keys_of(program).items():
        if (program, key) in BY_HAND:
            continue
        config = composed(*choice.split(), config_name="config" if program == "train" else program)
        group, is_target = key.partition(".")[0], key.endswith("._target_")
        rule = OTHER_TARGET if is_target else "|".join(WRONG_TYPE)
        with pytest.raises((ValueError, OmegaConfBaseException), match=rule) as refused:
            OmegaConf.update(config, key, "os.system" if is_target else [1])
            group_config = OmegaConf.to_container(config[group], resolve=True)
            read_nodes(group_config, group, {"optimizer": SCHEDULE_KEYS})
        assert key in str(refused.value)


@pytest.mark.parametrize(("program", "overrides", "expected"), RULE_ROWS)
def test_a_broken_rule_is_reported_in_one_line(program, overrides, expected):
    assert line_of(program, overrides).startswith(expected)


def test_nothing_is_printed_but_the_line(caplog, capsys):
    """Hydra logs failed imports in separate lines."""
    output = refusal("train", "sampler._target_=diffusion.nothing")
    assert output.count("\n") == 1
    assert caplog.records == []
    assert capsys.readouterr() == ("", "")


def test_right_values_are_not_refused():
    """A rule that refuses everything would pass the tests above."""
    of_sampler = ("sampler.S_max=inf", "sampler.S_churn=40")
    validated(*of_sampler, "optimizer.eps=0", "optimizer.weight_decay=0.1", "ema.decay=0")
    validated("data=synthetic", "data.num_held_out=0", "data.seed=3", "tracker=wandb", "tracker.mode=online")
    requests = ({"num_steps": 1}, {"guidance_scale": 0.0}, {"class_label": 9}, {"first_seed": 2**32 - 100})
    for request in requests:
        sampling.read_request(sampling.SampleConfig(run="r", **request))
