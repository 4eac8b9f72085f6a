"""The schema of a training: its keys, their types and defaults. Those of other programs are beside them.

Groups of plain numbers have a dataclass here. A group with a `_target_` is checked against the signature of
what it names: the signature is the schema.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from runtime.errors import check_choice, check_not_negative, check_positive

POSITIVE = ("total_steps", "batch_size", "log_every", "save_every", "keep_last", "max_skipped_steps")
POSITIVE_OR_NULL = ("micro_batch_size", "grad_clip", "eval_every", "sample_every", "milestone_every")
POSITIVE_OR_NULL += ("max_time_sec",)
PRECISIONS = ("auto", "no", "bf16")
SWITCH = ("auto", "true", "false")
# What a network of other code was trained for, as options of train.py.
OBJECTIVES = {
    "edm": ("diffusion=edm",),
    "flow": ("diffusion=flow",),
    "sit": ("diffusion=flow", "diffusion.precond.from_noise=true"),
    "ddpm": ("diffusion=ddpm",),
}
OBJECTIVES_OF_OTHERS = "edm or flow (TREAD), ddpm (DiT), sit (SiT, LightningDiT), flow (REPA, SPRINT)"


@dataclass
class TrainConfig:
    """Scalars of the loop; training/README.md has the table."""

    total_steps: int = MISSING
    batch_size: int = MISSING  # global, over all processes and micro-batches
    micro_batch_size: int | None = None  # None: batch_size / number of processes
    mixed_precision: str = "auto"
    compile: str = "auto"
    keep_freed_memory: str = "auto"  # on a CPU; does not change results
    grad_clip: float | None = None
    log_every: int = 50
    save_every: int = MISSING
    eval_every: int | None = None
    sample_every: int | None = None
    keep_last: int = 2
    milestone_every: int | None = None
    max_time_sec: float | None = None
    max_skipped_steps: int = 10
    num_workers: int = 0
    check_resources: bool = True  # refuse to start without the memory, the disk or the time
    check_speed: bool = True  # compare the routes with their FLOPs, once, after the first checkpoint
    init_from: str | None = None
    init_from_objective: str | None = None  # edm, flow, sit or ddpm: what weights of other code predict
    init_from_label_table: bool = True  # false: of other classes, drawn anew
    masked_loss: bool = False
    kept_tokens_only: bool = False  # an ablation: the loss of the tokens that every route kept
    reconstruction_weight: float = 0.0  # with it: of the other tokens, as masked training has it


def check_train(train: TrainConfig) -> None:
    """Check the scalars of the loop, and normalise the case of words."""
    for key in POSITIVE:
        check_positive(f"train.{key}", getattr(train, key))
    for key in POSITIVE_OR_NULL:
        if getattr(train, key) is not None:
            check_positive(f"train.{key}", getattr(train, key), otherwise=", or null")
    for key, choices in (("mixed_precision", PRECISIONS), ("compile", SWITCH), ("keep_freed_memory", SWITCH)):
        setattr(train, key, getattr(train, key).lower())  # a YAML `true` arrives as "True"
        check_choice(f"train.{key}", getattr(train, key), choices)
    if (objective := train.init_from_objective) is not None:
        check_choice("train.init_from_objective", objective, tuple(OBJECTIVES))
        if not train.init_from:
            raise ValueError(f"train.init_from_objective={objective} has no meaning without train.init_from")
    if not train.init_from_label_table and not train.init_from:
        raise ValueError("train.init_from_label_table=false has no meaning without train.init_from")
    check_not_negative("train.num_workers", train.num_workers)


@dataclass
class RoutingConfig:
    """What the routes do over a training; routing.RoutePlan explains and checks these keys."""

    schedule: str = "constant"
    start_factor: float | None = None
    end_factor: float | None = None
    num_levels: int = 4
    off_last_steps: int | None = None
    force_keep_overflow: str = "grow"


@dataclass
class Config:
    """Root of the training configuration."""

    method: str = MISSING  # set by the model group
    run_name: str = MISSING
    output_dir: str = MISSING
    wait: bool = False  # for another process that holds output_dir
    seed: int = 0
    sweep_metric: str | None = None  # what a sweeper is told of a finished run: its newest value
    decoding: str = "rounded"  # of samples, from latents to bytes; or official, as the public TREAD code
    data: dict[str, Any] = field(default_factory=dict)  # before the model, which takes its sizes from here
    model: dict[str, Any] = field(default_factory=dict)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    diffusion: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    ema: dict[str, Any] = field(default_factory=dict)
    sampler: dict[str, Any] = field(default_factory=dict)
    guidance: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    tracker: dict[str, Any] = field(default_factory=dict)
    train: TrainConfig = field(default_factory=TrainConfig)
