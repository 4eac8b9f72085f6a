"""The schema of a training: keys, types and defaults. Other programs have their schemas in their own modules.

Groups of plain values have a dataclass here. The signature of a `_target_` is the schema of its group.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from runtime.errors import check_choice, check_not_negative, check_positive

POSITIVE = ("total_steps", "batch_size", "log_every", "save_every", "keep_last", "max_skipped_steps")
POSITIVE_OR_NULL = ("micro_batch_size", "grad_clip", "eval_every", "sample_every", "milestone_every")
POSITIVE_OR_NULL += ("max_time_sec",)
PRECISIONS = ("auto", "no", "bf16")
PARALLEL, REDUCE_DTYPES = ("ddp", "fsdp", "hsdp"), ("fp32", "bf16")
SWITCH = ("auto", "true", "false")
OBJECTIVES = {  # of networks of other code, as options of train.py
    "edm": ("diffusion=edm",),
    "flow": ("diffusion=flow",),
    "sit": ("diffusion=flow", "diffusion.precond.from_noise=true"),
    "ddpm": ("diffusion=ddpm",),
}
OBJECTIVES_OF_OTHERS = "edm or flow (TREAD), ddpm (DiT), sit (SiT, LightningDiT), flow (REPA, SPRINT)"


@dataclass
class TrainConfig:
    """Keys of the training loop; training/README.md explains them."""

    total_steps: int = MISSING
    batch_size: int = MISSING  # images per step, over all processes and micro-batches
    micro_batch_size: int | None = None  # None: batch_size / number of processes
    mixed_precision: str = "auto"
    compile: str = "auto"
    keep_freed_memory: str = "auto"  # on a CPU; results do not change
    grad_clip: float | None = None
    parallel: str = "ddp"  # fsdp, hsdp: processes share weights, gradients and optimizer states
    reduce_dtype: str = "fp32"  # of gradients while fsdp and hsdp sum them: fp32 or bf16
    log_every: int = 50
    save_every: int = MISSING
    eval_every: int | None = None
    sample_every: int | None = None
    keep_last: int = 2
    milestone_every: int | None = None
    max_time_sec: float | None = None
    max_skipped_steps: int = 10
    num_workers: int = 0
    check_resources: bool = True  # refuse runs that need more memory, disk or time than is free
    init_from: str | None = None
    init_from_objective: str | None = None  # edm, flow, sit or ddpm, for weights of other code
    init_from_label_table: bool = True  # false: do not load the table of labels
    masked_loss: bool = False
    kept_tokens_only: bool = False  # an ablation: the loss of the tokens that all routes kept
    reconstruction_weight: float = 0.0  # with kept_tokens_only: of the other tokens, as in masked training


def check_train(train: TrainConfig) -> None:
    """Check the keys of the training loop, and convert options to lower case."""
    for key in POSITIVE:
        check_positive(f"train.{key}", getattr(train, key))
    for key in POSITIVE_OR_NULL:
        check_positive(f"train.{key}", getattr(train, key), otherwise=", or null")
    for key, choices in (("mixed_precision", PRECISIONS), ("compile", SWITCH), ("keep_freed_memory", SWITCH)):
        setattr(train, key, getattr(train, key).lower())  # a YAML `true` arrives as "True"
        check_choice(f"train.{key}", getattr(train, key), choices)
    if train.milestone_every and train.milestone_every % train.save_every:
        rule = f"a multiple of train.save_every={train.save_every}"
        raise ValueError(f"train.milestone_every={train.milestone_every} must be {rule}")
    check_choice("train.parallel", train.parallel, PARALLEL)
    check_choice("train.reduce_dtype", train.reduce_dtype, REDUCE_DTYPES)
    if train.reduce_dtype != "fp32" and train.parallel == "ddp":
        raise ValueError(f"train.reduce_dtype={train.reduce_dtype} does not apply to train.parallel=ddp")
    if (objective := train.init_from_objective) is not None:
        check_choice("train.init_from_objective", objective, tuple(OBJECTIVES))
        if not train.init_from:
            raise ValueError(f"train.init_from_objective={objective} does not apply without train.init_from")
    if not train.init_from_label_table and not train.init_from:
        raise ValueError("train.init_from_label_table=false does not apply without train.init_from")
    check_not_negative("train.num_workers", train.num_workers)


@dataclass
class RoutingConfig:
    """Schedule of the routes; `routing.RoutePlan` explains and checks these keys."""

    schedule: str = "constant"
    start_factor: float | None = None
    end_factor: float | None = None
    num_levels: int = 4
    off_last_steps: int | None = None
    force_keep_overflow: str = "grow"


@dataclass
class Config:
    """Root of the configuration of a training."""

    method: str = MISSING  # set by the model group
    run_name: str = MISSING
    output_dir: str = MISSING
    wait: bool = False  # wait for another process that holds output_dir
    seed: int = 0
    sweep_metric: str | None = None  # a sweeper gets the newest value of this metric
    decoding: str = "rounded"  # of samples to bytes: rounded, or official as in the public TREAD code
    data: dict[str, Any] = field(default_factory=dict)  # before the model, which takes sizes from the data
    model: dict[str, Any] = field(default_factory=dict)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    diffusion: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    ema: dict[str, Any] = field(default_factory=dict)
    sampler: dict[str, Any] = field(default_factory=dict)
    guidance: dict[str, Any] = field(default_factory=dict)
    alignment: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    tracker: dict[str, Any] = field(default_factory=dict)
    train: TrainConfig = field(default_factory=TrainConfig)
