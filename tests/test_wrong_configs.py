"""Every key of every program given a wrong value, every rule across keys broken: one line each, and no device is touched."""

import ast
import hashlib
import inspect
import io
import json
import os
import textwrap
from contextlib import chdir, redirect_stderr
from functools import cache, wraps
from unittest import mock

import numpy as np
import pytest
import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

import fid
import sample
import train
from benchmarks import advise
from builders import config as configuration
from builders import rules, sampling, schemas, scoring
from builders.trainer import check_files, check_init_from
from data import convert, encode
from evaluation.detectors import inception
from examples import finetune
from models import DiT, layers
from routing import RoutePlan, routes
from runtime import command_line, errors
from runtime import config as mechanics
from runtime.config import run_main
from runtime.provenance import flatten
from tests.routing.families import FAMILIES
from tests.runs import ROOT, composed, validated
from training import checkpoint

PROGRAMS = {
    "train": train,
    "sample": sample,
    "fid": fid,
    "encode": encode,
    "convert": convert,
    "advise": advise,
    "finetune": finetune,
}

POSITIVE, NOT_NEGATIVE, FINITE = "must be greater than 0", "must not be negative", "must be a finite number"
NAMED = "as YAML files in configs/ say: name other code"
SYNTHETIC, IMAGENET = "data=synthetic", "data=imagenet256 data.path=x"
ADM = "evaluation=adm_5k evaluation.reference=x"
WANDB, TENSORBOARD = "tracker=wandb", "tracker=tensorboard"
RUN = "run=r reference=file weights=weights.pth"
FILES = "samples=file reference=file"
MAKE = "mode=reference images=file out=new.npz"
FINETUNE = "transformer=flux inputs=flux"
ONE_ROUTE = "routes=[{selection_ratio:0.5,start_layer_idx:1,end_layer_idx:-2}]"
ENCODE, CONVERT = "source=file out=new", "format=repa source=file out=new"

# Shapes of what a small FLUX is fine-tuned on, and what is wrong with them in each folder.
INPUTS = {"latents": (80, 1, 8, 8), "text": (80, 5, 12), "pooled": (80, 8), "masks": (80, 8, 8)}
WRONG_INPUTS = {
    "flux": {},
    "without": {},
    "unequal": {"text": (79, 5, 12)},
    "wide": {"text": (80, 5, 13)},
    "odd": {"masks": (80, 9, 8)},
    "flat": {"text": (80,)},
    "damaged": {},
    "four": {"latents": (80, 4, 8, 8)},
}

AS_PYTHON = {"null": "None", "1e3": "1000.0"}  # values that a line shows as Python writes them

# What makes a request complete, of a program or of an option of a group.
COMPLETE = {
    "train": "", "sample": "run=r", "fid": FILES, "encode": ENCODE, "convert": CONVERT, "advise": "run=r",
    "finetune": FINETUNE, "data=imagenet256": IMAGENET, "evaluation=adm": ADM,
    "guidance=auto": "guidance=auto guidance.weak_run=r",
}  # fmt: skip
# Program -> (overrides, of which the last is wrong; the rule that its line must tell). The keys without a row
# have no rule but their type.
KEYS = {
    "train": [
        ("method=sit", "must be one of dit, tread, sprint"),
        ("decoding=jpeg", "must be one of rounded, official"),
        ("run_name=''", "must not be empty"),
        ("run_name=../elsewhere", "must be a name below runs/: output_dir sets any other place"),
        ("run_name=/elsewhere", "must be a name below runs/"),
        ("output_dir=''", "must not be empty"),
        ("seed=-1", NOT_NEGATIVE),
        ("data._target_=data.nothing", "must be data.digits or data.glyphs or data.mixture or data.open_latents or "),
        (f"{SYNTHETIC} data.num_entries=0", POSITIVE),
        (f"{SYNTHETIC} data.num_held_out=1024", "must be in [0, 1023]"),
        (f"{SYNTHETIC} data.seed=-1", NOT_NEGATIVE),
        ("data=mixture data.num_components=0", POSITIVE),
        ("data=glyphs data.num_images=0", POSITIVE),
        ("model._target_=models", f"must be models.DiT, {NAMED}"),
        ("model.input_size=0", POSITIVE),
        ("model.in_channels=0", POSITIVE),
        ("model.num_classes=7", "must be data.num_classes=10"),
        ("model.patch_size=3", "must divide model.input_size=8"),
        ("model.depth=0", POSITIVE),
        ("model.num_heads=7", "must divide model.hidden_size=128"),
        ("model.mlp_ratio=0", POSITIVE),
        ("model.class_dropout_prob=1", "must be in [0, 1)"),
        ("model.init=zero", "must be one of adaln_zero, xavier"),
        ("model.block._target_=models.Old", "must be models.blocks.DiTBlock or models.blocks.LightningBlock or "),
        ("model.attention=flash", "must be one of auto, sdpa, explicit"),
        ("model.num_prefix_tokens=-1", NOT_NEGATIVE),
        ("model.router._target_=routing.nothing", "must be routing.grid_router or routing.norm_router or routing.ran"),
        ("model/router=grid model.router.side=3", "must divide the side of the grid of tokens, 8"),
        ("model.rejoin._target_=models.Fuse", f"must be models.rejoin.Bypass or models.rejoin.Fuse or models.rejoin.Mask, {NAMED}"),
        ("model/rejoin=fuse model.rejoin.path_drop_prob=1", "must be in [0, 1)"),
        ("model/router=norm model.router.weight=1.5", "must be in (0, 1]"),
        ("model.routes.0.selection_ratio=1", "must be in [0, 1)"),
        ("model.routes.0.start_layer_idx=5", "(layer 5) must not come after end_layer_idx=-4 (layer 4) at depth=8"),
        ("model.routes.0.end_layer_idx=8", "must be in [-8, 7] for depth=8"),
        ("routing.schedule=sine", "must be one of constant, linear, cosine"),
        ("routing.start_factor=0.5", "needs routing.schedule=linear or cosine"),
        ("routing.schedule=linear routing.end_factor=2", "times selection_ratio=0.5 of the route of blocks 2 to 4 must be in"),
        ("routing.schedule=linear routing.end_factor=0 routing.num_levels=1", "must be at least 2"),
        ("routing.off_last_steps=1001", "must be in [1, 1000]"),
        ("routing.force_keep_overflow=drop", "must be one of grow, bypass, error"),
        ("diffusion.sigma_data=0", POSITIVE),
        ("diffusion.precond._target_=diffusion.nothing", "must be diffusion.DDPMPrecond or diffusion.EDMPrecond or "),
        ("diffusion.loss._target_=null", "must be diffusion.DDPMLoss or diffusion.EDMLoss or "),
        ("diffusion.loss.P_mean=inf", FINITE),
        ("diffusion.loss.P_std=0", POSITIVE),
        ("diffusion.loss.contrastive_weight=1", "must be in [0, 1)"),
        ("diffusion=flow diffusion.loss.distribution=normal", "must be one of logit_normal, uniform"),
        ("diffusion=flow diffusion.loss.shift=0", POSITIVE),
        ("diffusion=flow diffusion.loss.cosine_weight=-1", NOT_NEGATIVE),
        ("diffusion=x0 diffusion.loss.t_min=0", POSITIVE),
        ("optimizer._target_=torch.optim.Adamw", f"must be torch.optim.AdamW or torch.optim.SGD or training.muon.muon, {NAMED}"),
        ("ema._target_=training.ema.Ema", f"must be training.ema.EMA, {NAMED}"),
        ("optimizer.lr=nan", FINITE),
        ("optimizer.betas=[0.9]", "must be two numbers in [0, 1)"),
        ("optimizer.eps=-1", NOT_NEGATIVE),
        ("optimizer.weight_decay=-1", NOT_NEGATIVE),
        ("optimizer.warmup_steps=-1", NOT_NEGATIVE),
        ("ema.decay=1", "must be in [0, 1)"),
        ("sampler._target_=nothing", f"or diffusion.sde_sampler, {NAMED}"),
        ("sampler.num_steps=0", "must be in [1, 100000]"),
        ("sampler.sigma_min=0", POSITIVE),
        ("sampler.sigma_max=0.001", "must be greater than 0.002, the other end"),
        ("sampler.rho=0", POSITIVE),
        ("sampler.S_churn=-1", NOT_NEGATIVE),
        ("sampler.S_min=-1", NOT_NEGATIVE),
        ("sampler.S_min=2 sampler.S_max=1", "must be greater than 2.0, the other end"),
        ("sampler.S_noise=-1", NOT_NEGATIVE),
        ("sampler=heun sampler.solver=rk4", "must be one of euler, heun"),
        ("sampler=heun sampler.solve_on=ddpm", "must be one of edm, flow, vp, ve"),
        ("sampler=heun sampler.midpoint=0", "must be in (0, 1]"),
        ("sampler=heun sampler.times._target_=diffusion.nothing", "must be diffusion.iddpm_times or "),
        ("sampler=heun sampler.times.t_min=1", "must be in [0, 0.98"),
        ("sampler=heun diffusion=flow sampler.times.t_max=2", "must be in (0, 1.0], which ends the path"),
        ("sampler=heun sampler.times.shift=0", POSITIVE),
        ("sampler=heun sampler/times=rho sampler.times.rho=0", POSITIVE),
        ("sampler=ve sampler.times.sigma_min=0", POSITIVE),
        ("sampler=ve sampler.times.sigma_max=0.01", "must be greater than sigma_min=0.02"),
        ("sampler=vp sampler.times.epsilon_s=1", "must be in (0, 1)"),
        ("sampler=iddpm sampler.times.M=0", POSITIVE),
        ("sampler=iddpm sampler.times.j_0=1000", "must be in [0, 1000)"),
        ("sampler=iddpm sampler.times.C_1=0", POSITIVE),
        ("sampler=iddpm sampler.times.C_2=-1", NOT_NEGATIVE),
        ("sampler=dopri5 sampler.rtol=0", POSITIVE),
        ("sampler=dopri5 sampler.atol=0", POSITIVE),
        ("sampler=dopri5 sampler.t_min=0", POSITIVE),
        ("sampler=sde sampler.coefficient=square", "must be one of constant, sbdm, sigma, linear, decreasing, "),
        ("sampler=sde sampler.norm=-1", NOT_NEGATIVE),
        ("sampler=sde sampler.last_step=tweedie", "must be one of mean, denoised"),
        ("sampler=ddpm sampler.variance=medium", "must be one of learned, small, large"),
        ("guidance._target_=diffusion.nothing", "must be diffusion.AutoGuidance or diffusion.CFG or diffusion.Path"),
        ("guidance.guidance_scale=-1", NOT_NEGATIVE),
        ("guidance.guidance_interval=[1]", "must be two noise levels, low and high"),
        ("guidance.schedule=sine", "must be one of constant, linear, cosine"),
        ("guidance.num_channels=0", POSITIVE),
        ("guidance=auto guidance.weak_run=nowhere", "is not a run directory (no nowhere/config.yaml)"),
        ("guidance=sparse guidance.strong_ratio=1", "must be in [0, 1)"),
        ("guidance=sparse guidance.weak_ratio=1", "must be in [0, 1)"),
        ("guidance=sparse guidance.masks=new", "must be one of fresh, fixed"),
        ("guidance=sparse guidance.ratio_schedule=sine", "must be one of constant, cosine"),
        ("guidance=sparse guidance.num_levels=1", "must be at least 2"),
        ("evaluation=digits evaluation._target_=evaluation.Nothing", "must be evaluation.AdmSuite or evaluation.Suite, as"),
        ("evaluation=digits evaluation.detector._target_=os.system", "must be evaluation.DigitClassifier or "),
        ("evaluation=digits evaluation.metrics.distance._target_=os.system", f"must be evaluation.FrechetDistance, {NAMED}"),
        ("evaluation=digits evaluation.metrics.coverage._target_=os.system", f"must be evaluation.PrecisionRecall, {NAMED}"),
        ("evaluation=digits evaluation.metrics.accuracy._target_=os.system", f"must be evaluation.LabelAccuracy, {NAMED}"),
        ("evaluation=digits evaluation.num_samples=1", "must be at least 2"),
        ("evaluation=digits evaluation.labels=alphabetical", "must be one of random, balanced"),
        ("evaluation=adm_5k evaluation.reference=nowhere", "not found: `python -m evaluation.fetch` lists what can be"),
        ("evaluation=adm_5k evaluation.reference=file evaluation.weights=nowhere", "not found"),
        (f"{ADM} evaluation.batch_size=0", POSITIVE),
        (f"{WANDB} tracker._target_=training.trackers", "TensorBoardTracker or training.trackers.WandbTracker, as YAML"),
        (f"{WANDB} tracker.mode=on", "must be one of offline, online, disabled"),
        ("train.total_steps=0", POSITIVE),
        ("train.batch_size=0", POSITIVE),
        ("train.micro_batch_size=0", f"{POSITIVE}, or null"),
        ("train.mixed_precision=fp16", "must be one of auto, no, bf16"),
        ("train.compile=maybe", "must be one of auto, true, false"),
        ("train.keep_freed_memory=maybe", "must be one of auto, true, false"),
        ("train.grad_clip=0", f"{POSITIVE}, or null"),
        ("train.log_every=0", POSITIVE),
        ("train.save_every=0", POSITIVE),
        ("train.eval_every=0", f"{POSITIVE}, or null"),
        ("train.keep_last=0", POSITIVE),
        ("train.milestone_every=0", f"{POSITIVE}, or null"),
        ("train.max_time_sec=inf", FINITE),
        ("train.max_skipped_steps=0", POSITIVE),
        ("train.num_workers=-1", NOT_NEGATIVE),
        ("train.init_from=nowhere", "not found: give a weights file, a checkpoint folder or a run folder"),
        ("train.init_from=file train.init_from_objective=noise", "must be one of edm, flow, sit, ddpm"),
        ("train.kept_tokens_only=true train.reconstruction_weight=-1", NOT_NEGATIVE),
    ],
    "sample": [
        ("run=nowhere", "is not a run directory (no nowhere/config.yaml)"),
        ("run=r checkpoint=5", "not found: run=r has steps 4"),
        ("checkpoint=file objective=noise", "must be one of edm, flow, sit, ddpm"),
        ("run=r latents=x", "must not be given with run: the run has it"),
        ("run=r num_samples=0", POSITIVE),
        ("run=r batch_size=0", POSITIVE),
        ("run=r first_seed=-1", f"{NOT_NEGATIVE}, and the last seed less than 4294967296"),
        ("run=r labels=alphabetical", "must be one of random, balanced"),
        ("run=r class_label=10", "must be in [0, 9]"),
        ("run=r guidance_scale=-1", NOT_NEGATIVE),
        ("run=r num_steps=0", "must be in [1, 100000]"),
        ("run=r mixed_precision=fp16", "must be one of auto, no, bf16"),
        ("run=r compile=maybe", "must be one of auto, true, false"),
        ("run=r decoding=jpeg", "must be one of rounded, official"),
        ("run=r output=x.png", "must end in .npz"),
        ("run=r grid_columns=0", POSITIVE),
    ],
    "fid": [
        ("mode=scores", "must be one of score, reference"),
        ("suite=dam", "must be one of adm, digits, glyphs"),
        ("reference=file samples=nowhere.npz", "not found: sample.py writes one"),
        ("samples=file reference=nowhere.npz", "not found: `python -m evaluation.fetch` lists what can be downloaded"),
        ("mode=reference out=new.npz images=nowhere", "not found"),
        (f"{MAKE} resolution=0", POSITIVE),
        (f"{FILES} out=scores.txt", "must end in .json"),
        (f"{FILES} weights=nowhere.pth", "not found. Expected: "),
        (f"{FILES} detector_batch_size=0", POSITIVE),
        ("reference=file weights=weights.pth run=nowhere", "is not a run directory (no nowhere/config.yaml)"),
        (f"{RUN} checkpoint=5", "not found: run=r has steps 4"),
        (f"{RUN} objective=edm", "must not be given with run: the run has it"),
        (f"{RUN} latents=x", "must not be given with run: the run has it"),
        (f"{RUN} num_samples=0", POSITIVE),
        (f"{RUN} batch_size=0", POSITIVE),
        (f"{RUN} first_seed=-1", NOT_NEGATIVE),
        (f"{RUN} labels=alphabetical", "must be one of random, balanced"),
        (f"{RUN} class_label=10", "must be in [0, 9]"),
        (f"{RUN} guidance_scale=nan", FINITE),
        (f"{RUN} num_steps=0", "must be in [1, 100000]"),
        (f"{RUN} mixed_precision=fp16", "must be one of auto, no, bf16"),
        (f"{RUN} compile=maybe", "must be one of auto, true, false"),
        (f"{RUN} decoding=jpeg", "must be one of rounded, official"),
    ],
    "encode": [
        ("out=new source=nowhere", "not found"),
        ("source=file out=file", "exists: move it away"),
        (f"{ENCODE} resolution=0", POSITIVE),
        (f"{ENCODE} masks=nowhere", "not found"),
        (f"{ENCODE} conditioning_type=depth", "must be one of mask, segmentation"),
        (f"{ENCODE} num_held_out=-1", NOT_NEGATIVE),
        (f"{ENCODE} mixed_precision=fp16", "must be one of no, bf16"),
    ],
    "convert": [
        ("source=file out=new format=zip", "must be one of tread_wds, maskdit_lmdb, maskdit_wds, repa, lightningdit, edm2"),
        ("format=repa out=new source=nowhere", "not found"),
        ("format=repa source=file out=file", "exists: move it away"),
        (f"{CONVERT} num_classes=0", POSITIVE),
        (f"{CONVERT} num_held_out=-1", NOT_NEGATIVE),
        (f"{CONVERT} stored_as=jpeg", "must be one of samples, mean_logvar, mean_std"),
        (f"{CONVERT} encoder=other", "may have another scale than the assumed one: give scale=NUMBER shift=NUMBER as well"),
        (f"{CONVERT} scale=-1", POSITIVE),
        (f"{CONVERT} std=0", POSITIVE),
    ],
    "advise": [
        ("run=nowhere", "is not a run directory (no nowhere/config.yaml)"),
        ("run=r checkpoint=5", "not found: run=r has steps 4"),
        ("run=r num_samples=0", POSITIVE),
        ("run=r batch_size=0", POSITIVE),
        ("run=r repeats=0", POSITIVE),
        ("run=r mask_coverage=2", "must be in [0, 1]"),
    ],
    "finetune": [
        ("inputs=flux transformer=pixart", "is a PixArtTransformer2DModel, must be one of FluxTransformer2DModel, "),
        ("transformer=flux inputs=r", "has no latents.npy"),
        ("inputs=flux transformer=nowhere", "is not a transformer that diffusers has saved: "),
        (f"{FINETUNE} output_dir=r", "is not empty, and not a run to resume"),
        (f"{FINETUNE} routes=5", "must be a list"),
        (f"{FINETUNE} {ONE_ROUTE} router=nearest", "must be one of random, norm"),
        (f"{FINETUNE} tread_config=nowhere", "is not a SimpleTuner configuration: "),
        (f"{FINETUNE} mask_area=1", "must be in [0, 1)"),
        (f"{FINETUNE} train=loha", "must be one of lora, lokr, full"),
        (f"{FINETUNE} rank=0", POSITIVE),
        (f"{FINETUNE} {ONE_ROUTE} off_last_steps=1001", "must be in [0, total_steps=1000]"),
        (f"{FINETUNE} quantize=int2", "must be one of int8, int4, nf4"),
        (f"{FINETUNE} mixed_precision=fp16", "must be one of no, bf16"),
        (f"{FINETUNE} lr=0", POSITIVE),
        (f"{FINETUNE} shift=0", POSITIVE),
        (f"{FINETUNE} batch_size=0", POSITIVE),
        (f"{FINETUNE} total_steps=0", POSITIVE),
        (f"{FINETUNE} num_held_out=80", "must be less than the 80 rows of flux"),
        (f"{FINETUNE} log_every=0", POSITIVE),
        (f"{FINETUNE} eval_every=0", POSITIVE),
        (f"{FINETUNE} save_every=0", POSITIVE),
        (f"{FINETUNE} seed=-1", NOT_NEGATIVE),
    ],
}  # fmt: skip

# (program, overrides, how the line begins): rules across keys, and what is not a value at all.
RULES = [
    ("train", "model.depth=2000", "model.depth=2000 must be at most 1000"),
    ("train", "experiment=ablation_masking diffusion=flow", "train.reconstruction_weight=0.1 needs diffusion=edm"),
    ("train", "train.reconstruction_weight=0.1", "train.reconstruction_weight=0.1 needs train.kept_tokens_only=true"),
    ("train", "model/router=norm train.kept_tokens_only=true", "train.kept_tokens_only=true needs model/router=random"),
    ("train", "model.in_channels=3", "the model takes latents of (3, 8, 8), those of the data are (1, 8, 8)"),
    ("train", "model.routes=[]", "model.routes=[]: TREAD training requires you to configure the routes"),
    ("train", "model=sprint model.routes=[]", "model.routes=[]: SPRINT training requires you to configure the routes, e.g. model/rou"),
    ("train", "model.rejoin=5", "model.rejoin=5 must name a _target_"),
    ("train", "model=dit guidance=path_drop", "guidance=path_drop needs a network with routes (model=sprint)"),
    ("train", "sampler.num_steps=1000000", "sampler.num_steps=1000000 must be in [1, 100000]"),
    ("train", f"{SYNTHETIC} data.num_entries=2000000", "data.num_entries=2000000 must give at most 268435456 numbers"),
    ("train", "model=dit model/routes=paper", "model.routes=[{'selection_ratio': 0.5, "),
    ("train", "model.routes=[{selection_rate:0.5}]", "model.routes.0.selection_rate=0.5 is not known: did you mean "),
    ("train", "model.routes.0.selection_ratio=???", "model.routes.0.selection_ratio must be given, as KEY=VALUE"),
    ("train", "model/routes=advanced", "model.routes.1.end_layer_idx=8 must be in [-8, 7] for depth=8"),
    ("train", "model.num_heads=0", "model.num_heads=0 must be greater than 0"),
    ("train", "optimizer.lr=-1e-4", "optimizer.lr=-0.0001 must be greater than 0"),
    ("train", "seed=4294967296", "seed=4294967296 must not be negative, and less than 4294967296"),
    ("train", "+tracker.mode=online", "tracker={'mode': 'online'} must name a _target_"),
    ("train", "+sampler.num_step=3", "sampler.num_step=3 is not known: did you mean num_steps?"),
    ("train", "data=stream", "data.path must be given, as KEY=VALUE (a latent folder"),
    ("train", "model.routes=half", "model.routes=half must be a list of routes, each {KEY: VALUE, ...}; [] for none"),
    ("train", "model.routes=[5]", "model.routes=[5] must be a list of routes"),
    ("train", "model/routes=advanced model.routes.1.end_layer_idx=5",
     "model.routes.1 (layers 4..5) and model.routes.2 (layers 4..7) overlap at depth 8: routes must not share a layer"),
    ("train", "model.routes.0.selection_ratio=0.001", "selection_ratio=0.001 of the route of blocks 2 to 4 lets none of"),
    ("train", "model.hidden_size=30 model.num_heads=15", "model.hidden_size=30 must be a multiple of 4 for the position table"),
    ("train", "model/block=modern model.hidden_size=12", "model.hidden_size / model.num_heads=3 must be a multiple of 4 for"),
    ("train", f"{SYNTHETIC} data.num_classes=-1", "model.num_classes=-1 must not be negative"),
    ("train", "data.input_size=0", "model.input_size=0 must be greater than 0"),
    ("train", "routing.schedule=linear", "routing.schedule=linear needs routing.end_factor"),
    ("train", f"{SYNTHETIC} data.num_classes=0 guidance=cfg", "guidance.guidance_scale=1.5 must be 1 for an unconditional"),
    ("train", "sampler=heun sampler.num_steps=0", "sampler.num_steps=0 must be in [1, 100000]"),
    *(("train", f"sampler={name} sampler/times=respaced", "sampler/times=respaced must be on the path of DDPM, which has whole")
      for name in ("heun", "euler", "heun sampler.solve_on=edm")),
    ("train", "sampler=sde sampler.num_steps=0", "sampler.num_steps=0 must be in [1, 100000]"),
    ("train", "sampler=ddpm sampler.variance=small sampler.num_steps=1001", "sampler.num_steps=1001 must be in [1, 1000]"),
    ("train", "sampler=ddpm", "sampler.variance=learned needs diffusion=ddpm; small and large need nothing"),
    ("train", "diffusion=ddpm model.learn_sigma=false", "sampler.variance=learned needs model.learn_sigma=true"),
    ("train", "diffusion=flow sampler=sde sampler.coefficient=sbdm", "sampler.coefficient=sbdm is infinite at t=1: "),
    ("train", "model=dit guidance=sparse", "guidance=sparse needs a network with routes (model=tread)"),
    ("train", "guidance.num_channels=2", "guidance.num_channels=2 must be at most 1"),
    ("train", "guidance=auto", "guidance.weak_run or, to sample a run, guidance.weak_checkpoint must be given"),
    ("train", "guidance.guidance_interval=[0,.inf]", "guidance.guidance_interval=[0, '.inf'] must be two noise levels"),
    ("train", "guidance.guidance_interval=0.5", "guidance.guidance_interval=0.5 must be two noise levels"),
    ("train", "guidance=auto guidance.weak_run=empty", "guidance.weak_run=empty: run=empty has no checkpoint yet"),
    ("train", "guidance=auto guidance.weak_run=r guidance.weak_checkpoint=5", "guidance.weak_run=r: checkpoint=5 not found"),
    ("train", "evaluation=digits train.save_every=300", "train.eval_every=500 must be a multiple of train.save_every=300"),
    ("train", "evaluation=digits train.num_workers=0 data._target_=data.open_shards",
     "evaluation.reference=null, the training images, must be a file for data=stream"),
    ("train", "data=glyphs data.seed=-1", "data.seed=-1 must not be negative"),
    ("train", "data._target_=data.open_shards train.num_workers=2",
     "train.num_workers=2 must be 0 for data=stream, which reads ahead by itself"),
    ("train", "train.micro_batch_size=5", "train.batch_size=32 must be a multiple of train.micro_batch_size=5"),
    ("train", "train.init_from=file", "train.init_from=file does not say what it predicts: give "),
    ("train", "train.init_from_objective=edm", "train.init_from_objective=edm has no meaning without train.init_from"),
    ("train", "train.init_from_label_table=false", "train.init_from_label_table=false has no meaning without train.init_from"),
    ("train", "model.class_dropout_prob=0 guidance=cfg",
     "guidance.guidance_scale=1.5 must be 1 for a network whose null class was not trained (class_dropout_prob=0)"),
    ("train", "train.init_from=own train.init_from_objective=flow",
     "train.init_from_objective=flow must not be given for a run of this project, own"),
    ("train", "data=imagenet256", "data.path must be given, as KEY=VALUE (a latent folder"),
    ("train", "data=latents data.path=nowhere", "data.path=nowhere must be a latent folder, but "),
    ("train", "~train", "train must not be removed"),
    ("train", "~train.batch_size", "~train.batch_size: must not be removed"),
    ("train", "~data.num_classes", "model.num_classes takes its value from data.num_classes, which is not there"),
    ("train", "~model.depth", "model.depth must be given: DiT needs it"),
    ("train", "~sampler", "sampler={} must name a _target_"),
    ("train", "~diffusion.loss._target_", "diffusion.loss={'P_mean': "),
    ("train", "++train.total_stepz=3", "train.total_stepz=3 is not known: did you mean total_steps?"),
    ("train", "++model.hiden_size=3", "model.hiden_size=3 is not known: did you mean hidden_size?"),
    ("train", "train.total_stepz=3", "train.total_stepz is not known: did you mean train.total_steps?"),
    ("train", "modle=dit", "modle is not known: did you mean model?"),
    ("train", "sampler.S_chrn=2", "sampler.S_chrn is not known: did you mean sampler.S_churn?"),
    ("train", "sampler.steps=2", "sampler.steps is not known: did you mean sampler.num_steps?"),
    ("train", "train.lr=2", "train.lr is not known: did you mean optimizer.lr?"),
    ("train", "optimiser.lr=2", "optimiser.lr is not known: did you mean optimizer.lr?"),
    ("train", "model/sise=s_2", "model/sise is not known: did you mean model/size?"),
    ("train", "model.route.0.selection_ratio=0.3", "model.route.0.selection_ratio is not known: did you mean model.routes.0.sel"),
    ("train", "qqqq=2", "qqqq is not known"),
    ("sample", "run=r sampler.num_steps=2", "sampler.num_steps is not known: did you mean num_steps?"),
    ("sample", "run=r steps=2", "steps is not known: did you mean num_steps?"),
    ("train", "optimizer=adam", "In 'config': Could not find 'optimizer/adam' Available options in 'optimizer': adamw"),
    ("train", "optimizer.betas=3", "optimizer.betas=3 must be two numbers in [0, 1)"),
    ("train", "train=5", "train=5: is a group of keys, which are set one by one"),
    ("train", "diffusion.loss=5", "diffusion.loss=5 must name a _target_"),
    ("train", "train.total_steps=null", "train.total_steps=null: must not be null"),
    ("train", "train.total_steps", "train.total_steps cannot be read: must be KEY=VALUE"),
    ("train", "model.routes[0].selection_ratio=0.3", "model.routes[0].selection_ratio=0.3 cannot be read: write model.routes.0.selection_ratio=0.3"),
    ("train", "routes.0.selection_ratio=0.3", "routes.0.selection_ratio is not known: did you mean model.routes.0.selection_ratio?"),
    ("train", "lr=1", "lr is not known: did you mean optimizer.lr?"),
    ("train", "rho=1", "rho is not known: did you mean sampler.rho or sampler.times.rho?"),
    ("train", "seed=0,1", "seed=0,1 has several values: a sweep needs -m, a list [ ]"),
    *(("train", cut, f"{cut} is cut by a space: write {cut.replace(' ', '')}, or put it in quotes") for cut in
      ("seed=0, 1", "seed=0 ,1", "seed= 1", "seed =1", "optimizer.betas=[0.9, 0.99]", "optimizer.betas=[ 0.9, 0.99 ]")),
    ("train", "seed 1", "seed cannot be read: must be KEY=VALUE"),
    ("train", "model=dit --seed=1", "--seed=1 is no option (--help lists them): keys are set without dashes, as seed=1"),
    ("train", "model.routes.1.selection_ratio=0.3", "model.routes.1.selection_ratio=0.3: the list has no such item"),
    ("train", "model.routes.x=0.3", "'x' is not an item of a list: those are 0, 1, ..."),
    ("train", "optimizer.lr=fast", "optimizer.lr='fast' must be of type float"),
    ("sample", "run=r num_sampels=3", "num_sampels is not known: did you mean num_samples?"),
    ("fid", "num_sampels=3", "num_sampels is not known: did you mean num_samples?"),
    ("sample", "num_samples=3", "run=FOLDER or checkpoint=FILE must be given"),
    ("sample", "checkpoint=nowhere.pt", "checkpoint=nowhere.pt is not a file: give one, or run=FOLDER"),
    ("sample", "run=r sampler=dopri5 num_steps=5", "num_steps=5 is no key of diffusion.adaptive_sampler: it has rtol, atol, t_min"),
    ("sample", "run=empty", "run=empty has no checkpoint yet"),
    ("sample", "run=r labels=balanced class_label=3", "class_label=3 is one class: labels=balanced must not be given"),
    ("sample", "run=unconditional class_label=0", "class_label=0 must be null for an unconditional network (num_classes=0)"),
    ("sample", "run=unconditional guidance_scale=2", "guidance_scale=2.0 must be 1 for an unconditional network"),
    ("sample", "run=r first_seed=4294967290", "first_seed=4294967290 must not be negative, and the last seed less than"),
    ("fid", "samples=file", "reference must be given for scoring samples in files (an .npz: `python -m evaluation.fetch`"),
    *(("fid", f"samples=file suite={suite}", f"reference must be given for scoring samples in files (a latent folder, as latents/{suite})")
      for suite in ("digits", "glyphs")),
    ("fid", "reference=file", "samples must be given for scoring samples in files (an .npz, a folder or a zip; or run=NAME"),
    ("fid", f"{RUN} samples=file", "samples=file has no meaning for scoring a network"),
    ("fid", f"{FILES} suite=digits kid=true", "kid=True has no meaning for suite=digits"),
    ("fid", f"{FILES} suite=glyphs kid=true", "kid=True has no meaning for suite=glyphs"),
    ("fid", f"{MAKE} num_samples=5", "num_samples=5 has no meaning for mode=reference"),
    ("fid", "reference=file samples=r", "samples=r is a folder, which may have older images in it"),
    ("fid", "mode=reference images=file", "out must be given for mode=reference"),
    ("fid", "mode=reference images=file out=there.npz", "out=there.npz: there.npz is there already: overwrite=true "),
    ("fid", f"{FILES} weights=file", "weights=file has 0 bytes: truncated, or another file"),
    ("encode", "source=file", "out must be given, as KEY=VALUE"),
    ("encode", "source=file out=new conditioning_type=segmentation", "conditioning_type=segmentation needs masks=FOLDER"),
    ("convert", f"{CONVERT} shift=0", "shift=0.0 needs scale as well"),
    ("convert", f"{CONVERT} scale=2", "scale=2.0 needs shift as well"),
    ("convert", "source=file", "format, out must be given, as KEY=VALUE"),
    ("advise", "run=shallow", "run=shallow: model.depth=7 must be at least 8"),
    ("advise", "run=empty", "run=empty has no checkpoint yet"),
    ("finetune", f"{FINETUNE} quantize=int4 train=full", "quantize=int4 needs train=lora or train=lokr"),
    *(("finetune", f"{FINETUNE} quantize=nf4 train={kind} mixed_precision=bf16", "quantize=nf4 needs train=lora")
      for kind in ("lokr", "full")),
    ("finetune", f"{FINETUNE} quantize=nf4", "quantize=nf4 needs mixed_precision=bf16"),
    ("finetune", f"{FINETUNE} tread_config=file {ONE_ROUTE}", "tread_config=file and routes=[{'selection_ratio': 0.5, "),
    ("finetune", f"{FINETUNE} off_last_steps=1", "off_last_steps=1 needs routes: without any, all steps are dense"),
    ("finetune", f"{FINETUNE} routes=fast", "routes=fast must be one of advanced, balanced, basic, high_res, lora, masked, "),
    ("finetune", f"{FINETUNE} routes=[{{selection_rate:0.5}}]",
     "routes.0.selection_rate=0.5 is not known: did you mean selection_ratio?"),
    ("finetune", f"{FINETUNE} routes=[{{selection_ratio:0.5,start_layer_idx:1,end_layer_idx:9}}]",
     "routes.0.end_layer_idx=9 must be in [-7, 6] for depth=7"),
    ("finetune", "transformer=flux inputs=without", "inputs=without has no pooled.npy, which FluxTransformer2DModel needs"),
    ("finetune", "transformer=wan inputs=flux", "inputs=flux has pooled.npy, which this program does not give to Wan"),
    ("finetune", "transformer=flux inputs=unequal", "inputs=unequal has arrays of different lengths: {'latents': 80, "),
    ("finetune", "transformer=flux inputs=wide", "inputs=wide: a FluxTransformer2DModel does not take rows of {'latents': (80, 1"),
    ("finetune", "transformer=flux inputs=damaged", "damaged/latents.npy cannot be read as an array of numbers"),
    ("finetune", "transformer=flux inputs=flat", "inputs=flat: a FluxTransformer2DModel does not take rows of {"),
    ("finetune", "transformer=sd3 inputs=four", "inputs=four: from rows of {'latents': (80, 4, 8, 8), "),
    ("finetune", f"{FINETUNE} output_dir=tuned rank=8", "output_dir=tuned has a run with other settings: rank: 4 -> 8"),
    ("finetune", "transformer=flux inputs=odd", "inputs=odd: masks.npy has shape (80, 9, 8), latents.npy (80, 1, 8, 8)"),
    ("sample", "run=unknown", "unknown/config.yaml: train.speed: Key 'speed' not in 'TrainConfig'"),
    ("sample", "run=older", "older/config.yaml: seed is missing: another version of this code wrote it"),
    ("sample", "run=interpolated", "interpolated/config.yaml: it has interpolations, which no run writes"),
    ("sample", "run=dotted", "dotted/config.yaml: sampler.'num_steps.of' must be a name without dots: keys are nested"),
    ("sample", "run=untold", "untold/manifest.json has no manifest of the data (data.manifest)"),
    ("advise", "run=r", "run=r: its manifest has micro_batch_size=None: set batch_size=N"),
    ("advise", "run=r batch_size=8", "run=r: data.path=latents/digits is not a folder here: set data_path=PATH"),
    *((program, f"{run}run=foreign", "foreign/config.yaml: sampler._target_=os.system must be diffusion.adaptive_sampler or diffu")
      for program, run in (("sample", ""), ("fid", "reference=file weights=weights.pth "), ("advise", ""))),
]  # fmt: skip

# Where rules are told: modules, classes and functions.
TOLD_BY = [
    rules, schemas, configuration, mechanics, command_line, errors,
    routes.resolve_routes, routes._resolve, RoutePlan.__post_init__, DiT.__init__,
    layers.sincos_position_table, layers.rotary_table, inception.check_weights_file, check_files, check_init_from,
    checkpoint.find_checkpoint, checkpoint._checkpoints_of, sampling._settings, sampling.read_run, sample.main,
    fid.main, scoring.suite_config, scoring.check_request, scoring.check_files,
    encode.check_request, encode.check_out, encode.check_sources, convert.check_request,
    advise.main, advise._resolved, advise._find_data,
    finetune.check_request, finetune.read_routes, finetune.check_output, finetune.open_inputs, finetune._open,
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Go where there are some files, and runs with nothing in them but what tells what they are."""
    folder = tmp_path_factory.mktemp("wrong")
    runs = {
        "r": [],
        "empty": [],
        "shallow": ["model=dit", "model.depth=7"],
        "unconditional": [SYNTHETIC, "data.num_classes=0"],
    }
    for name, overrides in runs.items():
        (folder / name / "checkpoints").mkdir(parents=True)
        (folder / name / "config.yaml").write_text(yaml.safe_dump(validated(*overrides)))
        (folder / name / "manifest.json").write_text('{"data": {"manifest": {}}}')
        if name != "empty":
            (checkpoint := folder / name / "checkpoints/step_00000004").mkdir()
        if name != "empty":
            (checkpoint / "ema.safetensors").touch()
            (checkpoint / "SHA256SUMS").write_text(f"{hashlib.sha256().hexdigest()}  ema.safetensors\n")
    config = validated()
    spoilt = {
        "foreign": config | {"sampler": {"_target_": "os.system", "command": "touch EXECUTED"}},
        "unknown": config | {"train": config["train"] | {"speed": 9}},
        "older": {key: value for key, value in config.items() if key != "seed"},
        "interpolated": config | {"output_dir": "${oc.env:HOME}"},
        "dotted": config | {"sampler": config["sampler"] | {"num_steps.of": 9}},
        "untold": config,
    }
    for name, written in spoilt.items():
        (folder / name).mkdir()
        (folder / name / "config.yaml").write_text(yaml.safe_dump(written))
        (folder / name / "manifest.json").write_text("{}")
    for name in ("flux", "pixart", "sd3", "wan"):
        FAMILIES[name].build().save_config(folder / name)
    for name, changed in WRONG_INPUTS.items():
        (folder / name).mkdir(exist_ok=True)
        for array, shape in (INPUTS | changed).items():
            np.save(folder / name / f"{array}.npy", np.zeros(shape, dtype=np.float32))
    (folder / "without/pooled.npy").unlink()
    (folder / "damaged/latents.npy").write_bytes(b"not an array")
    config = folder / "sd3/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "out_channels": 8}))
    (folder / "tuned").mkdir()
    asked = composed("transformer=flux", "inputs=flux", "rank=4", config_name="finetune")
    request = finetune.FinetuneConfig(**configuration.resolve(asked))
    settings = finetune.check_output(request, num_processes=1)
    (folder / "tuned/config.yaml").write_text(yaml.safe_dump(settings))
    (own := folder / "own/checkpoints/step_00000004").mkdir(parents=True)
    for file in (folder / "file", folder / "there.npz", own / "ema.safetensors", own / "SHA256SUMS"):
        file.touch()
    with (folder / "weights.pth").open("wb") as weights:
        weights.truncate(inception.MIN_FILE_BYTES + 1)  # takes no room
    with chdir(folder):
        yield folder


@cache
def refusal(program, overrides):
    """Return how a program ends that is started with overrides, and what it says."""
    arguments = overrides.split()
    name, schemas = "config" if program == "train" else program, ConfigStore.instance().repo
    own = {
        key: node
        for key, node in schemas.items()
        if not key.endswith("_schema.yaml") or key.startswith(program)
    }
    with (
        mock.patch.dict(schemas, own, clear=True),  # as in a process of this program
        mock.patch.dict(os.environ),
        mock.patch("sys.argv", [program, *arguments]),
        mock.patch("runtime.machine.PartialState", side_effect=AssertionError("a device is touched")),
        redirect_stderr(io.StringIO()) as said,
        pytest.raises(SystemExit) as end,
    ):
        main = PROGRAMS[program].main
        run_main(wraps(main)(lambda: main(composed(*arguments, config_name=name))))
    assert end.value.code == 1
    return end.value, said.getvalue()


def line_of(program, overrides):
    _, said = refusal(program, overrides)
    assert said.startswith("error: ")
    assert said.index("\n") == len(said) - 1
    return said.removeprefix("error: ").rstrip("\n")


def keys_of(program):
    """Every key of a program, by the option that brings it."""
    if program != "train":
        config = OmegaConf.to_container(composed(config_name=program))
        return dict.fromkeys((key for key, value in flatten(config).items() if value != {}), program)
    groups = (
        "data",
        "evaluation",
        "tracker",
        "model/router",
        "model/rejoin",
        "diffusion",
        "sampler",
        "guidance",
    )
    files = [file for group in groups for file in sorted((ROOT / "configs" / group).glob("*.yaml"))]
    options = [str(file.relative_to(ROOT / "configs").with_suffix("")).rpartition("/") for file in files]
    choices = [f"{group}={name}" for group, _, name in options]
    keys = {}
    for choice in ["train", *choices, "sampler=heun sampler/times=rho"]:
        config = OmegaConf.to_container(composed(*([] if choice == "train" else choice.split())))
        config["model"]["routes"] = {str(i): route for i, route in enumerate(config["model"]["routes"])}
        for key, value in flatten(config).items():
            if value != {}:
                keys.setdefault(key, choice)
    return keys


def wrong_types():
    """A row for each key without a row: it is given a list, which it cannot be."""
    for program, rows in KEYS.items():
        by_hand = {overrides.split()[-1].partition("=")[0] for overrides, _ in rows}
        for key, choice in keys_of(program).items():
            if key not in by_hand:
                yield program, f"{COMPLETE.get(choice, choice)} {key}=[1]", "must be of type"


VALUES = [(program, *row) for program, rows in KEYS.items() for row in rows] + list(wrong_types())


@pytest.mark.parametrize(
    ("program", "overrides", "rule"), VALUES, ids=[f"{program} {row}" for program, row, _ in VALUES]
)
def test_a_wrong_value_is_reported_with_key_value_and_rule(program, overrides, rule):
    key, _, value = overrides.split()[-1].partition("=")
    told, _, rest = line_of(program, overrides).partition("=")
    assert told == key
    assert rest.startswith((value, repr(value), AS_PYTHON.get(value, value)))
    assert rule in rest


@pytest.mark.parametrize(
    ("program", "overrides", "expected"), RULES, ids=[f"{program} {row}" for program, row, _ in RULES]
)
def test_a_broken_rule_is_reported_in_one_line(program, overrides, expected):
    assert line_of(program, overrides).startswith(expected)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_row_by_hand_is_of_a_key_that_there_is(program):
    assert {overrides.split()[-1].partition("=")[0] for overrides, _ in KEYS[program]} <= keys_of(
        program
    ).keys()


def raises_of(source):
    """Yield (file, first and last line) of every `raise` of an error of the user's in a module, class or function."""
    source = inspect.unwrap(source)  # from what Hydra puts around it
    lines, start = inspect.getsourcelines(source)
    for node in ast.walk(ast.parse(textwrap.dedent("".join(lines)))):
        error = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(error, ast.Call) and error.func.id in (
            "ValueError",
            "FileNotFoundError",
            "FileExistsError",
        ):
            offset = max(start, 1) - 1
            yield inspect.getsourcefile(source), node.lineno + offset, node.end_lineno + offset


def lines_that_raised(error):
    """Yield (file, line) of every step of the way of an error, and of the errors that it came from."""
    while error:
        trace = error.__traceback__
        while trace:
            yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
            trace = trace.tb_next
        error = error.__cause__ or error.__context__


def test_every_rule_is_broken_by_a_row():
    rows = [row[:2] for row in (*VALUES, *RULES)]
    raised = {step for row in rows for step in lines_that_raised(refusal(*row)[0])}
    known = [place for source in TOLD_BY for place in raises_of(source)]
    assert len(known) > 60
    unbroken = [
        f"{file}:{first}"
        for file, first, last in known
        if not raised & {(file, line) for line in range(first, last + 1)}
    ]
    assert unbroken == []


def test_nothing_is_printed_but_the_line(caplog, capsys):
    """Hydra logs what it cannot import, in lines of its own."""
    _, said = refusal.__wrapped__("train", "sampler._target_=diffusion.nothing")
    assert said.count("\n") == 1
    assert caplog.records == []
    assert capsys.readouterr() == ("", "")


def test_right_values_are_not_refused():
    """A rule that refuses everything would pass all of the above."""
    validated(
        "sampler.S_max=inf",
        "sampler.S_churn=40",
        "optimizer.eps=0",
        "optimizer.weight_decay=0.1",
        "ema.decay=0",
    )
    validated("data=synthetic", "data.num_held_out=0", "data.seed=3", "tracker=wandb", "tracker.mode=online")
    for request in (
        {"num_steps": 1},
        {"guidance_scale": 0.0},
        {"class_label": 9},
        {"first_seed": 2**32 - 100},
    ):
        sampling.check_sampling({**composed("run=r", config_name="sample"), **request})
