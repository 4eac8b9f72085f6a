"""What each program can be asked: the keys of its configuration, their types and defaults.

Groups of plain numbers have a dataclass here. A group with a `_target_` is checked against the signature of
what it names: the signature is the schema.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


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
    init_from: str | None = None
    init_from_objective: str | None = (
        None  # edm, ddpm or flow: what a file predicts that this project did not write
    )
    masked_loss: bool = False
    kept_tokens_only: bool = False  # an ablation: the loss of the tokens that every route kept


@dataclass
class RoutingConfig:
    """What the routes do over a training; routing.RoutePlan explains and checks the keys."""

    schedule: str = "constant"
    start_factor: float | None = None
    end_factor: float | None = None
    num_levels: int = 4
    off_last_steps: int | None = None
    force_keep_overflow: str = "grow"


@dataclass
class OptimizerConfig:
    """AdamW, or another optimizer of the same arguments."""

    _target_: str = "torch.optim.AdamW"
    lr: float = MISSING
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass
class EMAConfig:
    """Average of the weights that samples are drawn from."""

    decay: float = 0.9999
    warmup: bool = False


@dataclass
class Config:
    """Root of the training configuration."""

    method: str = MISSING  # set by the model group: tread or dit
    run_name: str = MISSING
    output_dir: str = MISSING
    wait: bool = False  # for another process that holds output_dir
    seed: int = 0
    decoding: str = "rounded"  # of samples, from latents to bytes; or official, as the public TREAD code
    data: dict[str, Any] = field(
        default_factory=dict
    )  # before the model, which takes its sizes: a mistake is told here
    model: dict[str, Any] = field(default_factory=dict)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    diffusion: dict[str, Any] = field(default_factory=dict)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    sampler: dict[str, Any] = field(default_factory=dict)
    guidance: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    tracker: dict[str, Any] = field(default_factory=dict)
    train: TrainConfig = field(default_factory=TrainConfig)


@dataclass
class SamplingConfig:
    """What is drawn from a run; None means: as in the run."""

    checkpoint: str | None = None  # a step, a name or a path; None: the newest
    num_samples: int | None = None
    batch_size: int = 100
    first_seed: int = 0
    labels: str = "random"  # drawn from the seeds; or balanced, the classes in turn
    class_label: int | None = None  # this class alone, in place of labels
    guidance_scale: float | None = None
    num_steps: int | None = None
    sampler: dict[str, Any] = field(default_factory=dict)  # chosen as sampler=OPTION
    guidance: dict[str, Any] = field(default_factory=dict)
    mixed_precision: str = "no"  # of the network and of the encoder that decodes
    decoding: str | None = None  # rounded or official
    encoder: str | None = None  # where the encoder of the latents is found; None: where their manifest says
    allow_other_encoder: bool = False


@dataclass
class SampleConfig(SamplingConfig):
    """What `sample.py` is asked."""

    run: str = MISSING
    num_samples: int = 100
    output: str | None = None  # None: inside the run
    grid_columns: int = 10
    overwrite: bool = False


@dataclass
class ScoreConfig(SamplingConfig):
    """What `fid.py` is asked."""

    mode: str = "score"  # or reference: make one from images
    suite: str = "adm"  # or digits, glyphs: a file of configs/evaluation/
    samples: str | None = None  # an .npz, a folder or a zip
    run: str | None = None  # draw samples and score them without files
    reference: str | None = None
    images: str | None = None
    resolution: int | None = None
    out: str | None = None  # None: beside the samples, or inside the run
    weights: str | None = None  # these: None: as the suite's file says
    allow_unpublished_weights: bool | None = None
    precision_recall: bool | None = None
    exact_distances: bool | None = None
    kid: bool | None = None
    detector_batch_size: int | None = None
    overwrite: bool = False


@dataclass
class EncodeConfig:
    """What `data.encode` is asked."""

    source: str = MISSING  # a folder of class folders, a zip of one, or a list
    out: str = MISSING
    encoder: str = "sd-vae-ft-ema"  # or sd-vae-ft-mse, sdxl, identity, a folder, OWNER/NAME on the hub
    resolution: int = 256
    hflip: bool = True
    masks: str | None = None
    conditioning_type: str = "mask"  # or segmentation; of the masks
    num_held_out: int | None = None  # None: one image in a hundred, at most 5,000
    mixed_precision: str = "no"
    skip_corrupt: bool = False


@dataclass
class ConvertConfig:
    """What `data.convert` is asked; None means: as the format is assumed to be."""

    format: str = MISSING
    source: str = MISSING
    out: str = MISSING
    num_classes: int | None = None  # None: the largest label + 1
    num_held_out: int = 0
    stored_as: str | None = None  # samples, mean_logvar or mean_std
    scaled: bool | None = None
    hflip: bool | None = None
    encoder: str | None = None
    scale: float | None = None


@dataclass
class AdviceConfig:
    """What `benchmarks.advise` is asked; None means: as in the run."""

    run: str = MISSING
    checkpoint: str | None = None  # a step, a name or a path; None: the newest
    num_samples: int = 256
    batch_size: int | None = None
    repeats: int = 11
    mask_coverage: float | None = None  # None: from the masks of the data, where the run uses them
    data_path: str | None = None  # where the data of the run are found; None: in the folder that it names
    output: str | None = None  # None: inside the run
    overwrite: bool = False


@dataclass
class FinetuneConfig:
    """What `examples.finetune` is asked."""

    transformer: str = MISSING  # a folder that diffusers has saved one in
    inputs: str = MISSING  # a folder of arrays
    output_dir: str = "runs/finetune"
    routes: Any = field(default_factory=list)  # or the name of one of configs/model/routes
    tread_config: str | None = None  # a JSON file of SimpleTuner, in place of routes
    mask_area: float = (
        0.0  # a mask that covers more than this fraction of a token's patch holds it; 0: any that touches it
    )
    router: str = "random"  # or norm
    train: str = "lora"  # or lokr, full
    rank: int = 16
    quantize: str | None = None  # int8, int4 or nf4: of the base weights
    gradient_checkpointing: bool = False
    mixed_precision: str = "no"  # or bf16
    lr: float = 1e-4
    shift: float = 1.0  # of the times, towards noise
    batch_size: int = 4  # of all processes together
    total_steps: int = 1000
    num_held_out: int = 64
    log_every: int = 10
    eval_every: int = 100
    save_every: int = 100
    seed: int = 0


SCHEMAS = {
    "train": Config,
    "sample": SampleConfig,
    "fid": ScoreConfig,
    "encode": EncodeConfig,
    "convert": ConvertConfig,
    "advise": AdviceConfig,
    "finetune": FinetuneConfig,
}
