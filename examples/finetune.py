"""Fine-tune a flow-matching transformer of diffusers on stored latents and texts, with or without routes.

    python -m examples.finetune transformer=FOLDER inputs=FOLDER output_dir=runs/dense
    python -m examples.finetune transformer=FOLDER inputs=FOLDER \\
        routes='[{selection_ratio:0.25,start_layer_idx:2,end_layer_idx:-2}]'

The flow [SD3]: x_t = (1 - t) x + t n with noise n and t in (0, 1). The network learns the velocity n - x. The
training loop is the one of `train.py`: run the same command again to resume.

Shapes: N samples, latents x (N, C, H, W) or (N, C, F, H, W) with F frames, T tokens per image.
"""

import runtime.openmp  # noqa: F401 before torch

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import yaml
from accelerate import Accelerator
from omegaconf import MISSING, DictConfig
from torch import Tensor

from builders.config import register, resolve
from builders.experiment import check_routes
from data import StreamOrder
from diffusion import FlowLoss
from models import token_mask
from routing import Route, RoutePlan, Routing, attach, from_simpletuner, norm_router, random_router
from routing.adapters.families import adapter_of
from runtime.arrays import map_array
from runtime.config import INTERRUPTED, run_main, user_mistakes
from runtime.errors import as_value_error, check_choice, check_not_negative, check_positive
from runtime.launch import ALONE, Launch
from runtime.launcher import check_launcher, check_precision
from runtime.lock import TRY_AGAIN
from runtime.machine import start_process
from runtime.provenance import PROJECT, environment
from training.batches import Batches, Stored
from training.checkpoint import CheckpointFolder
from training.fit import run_training
from training.optimizer import Optimizer
from training.recorder import Recorder
from training.run_folder import RunFolder
from training.sharding import check_parallel, gathered, shard, whole
from training.stopping import INTERRUPT, StopRequest
from training.trainer import Settings, Trainer

RECIPES = PROJECT / "configs" / "model" / "routes"
INTERVALS = ("log_every", "eval_every", "save_every")
POSITIVE = ("total_steps", "batch_size", "rank", "lr", "shift", "num_held_out", *INTERVALS)
MAY_CHANGE = ("total_steps", "output_dir", *INTERVALS)  # when a run resumes
TARGETS = r".*attn\w*\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"  # layers that LoRA and LoKr adapt
PATCH_SIZE = 2  # of all families; FLUX takes patches that are already folded
MAX_GRAD_NORM, MAX_SKIPPED_STEPS = 1.0, 10
EVAL_BATCH_SIZE = 8
ROUTERS = {"random": random_router, "norm": norm_router}


@dataclass
class FinetuneConfig:
    """The keys of `examples.finetune`."""

    transformer: str = MISSING  # a folder in the format of diffusers
    inputs: str = MISSING  # a folder of arrays
    output_dir: str = "runs/finetune"
    routes: Any = field(default_factory=list)  # a list of routes, or a name in configs/model/routes
    tread_config: str | None = None  # a JSON file of SimpleTuner, instead of routes
    mask_area: float = 0.0  # a mask keeps a token if it covers more than this fraction of its patch
    router: str = "random"  # or norm
    off_last_steps: int = 0  # steps without routes at the end
    train: str = "lora"  # or lokr, full
    rank: int = 16
    gradient_checkpointing: bool = False
    parallel: str = "ddp"  # or fsdp: processes share weights, gradients and optimizer states
    mixed_precision: str = "no"  # or bf16
    lr: float = 1e-4
    shift: float = 1.0  # of the times; above 1: towards noise
    batch_size: int = 4  # over all processes
    total_steps: int = 1000
    num_held_out: int = 64
    log_every: int = 10
    eval_every: int = 100
    save_every: int = 100
    seed: int = 0


register("finetune", FinetuneConfig)


class Family(NamedTuple):
    """The arrays that a class of diffusers takes, and its conventions."""

    required: tuple[str, ...] = ("latents", "text")
    optional: tuple[str, ...] = ("masks",)
    time_scale: int = 1  # its timestep is time_scale * t
    packed: bool = False  # True: takes patches and their positions instead of images


FAMILIES = {
    "FluxTransformer2DModel": Family(("latents", "text", "pooled"), ("references", "masks"), packed=True),
    "SD3Transformer2DModel": Family(("latents", "text", "pooled"), time_scale=1000),
    "AuraFlowTransformer2DModel": Family(),
    "WanTransformer3DModel": Family(optional=(), time_scale=1000),
}
ARRAYS = ("latents", "text", "pooled", "references", "masks")
KEYWORDS = {"text": "encoder_hidden_states", "pooled": "pooled_projections"}


class Inputs(dict[str, Tensor]):
    """The inputs of a network besides latents, by array name. Moves to a device like a tensor."""

    def to(self, device: torch.device, non_blocking: bool = False) -> "Inputs":
        return Inputs({name: x.to(device, non_blocking=non_blocking) for name, x in self.items()})


class Net(nn.Module):
    """A transformer of diffusers as a network of the Trainer. Its state has only the trained weights."""

    def __init__(self, transformer: nn.Module, routes: tuple[Route, ...], family: Family):
        super().__init__()
        self.transformer, self.family, self.routes = transformer, family, routes

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        inputs: Inputs,
        *,
        routing: Routing | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the velocity, shaped like x, at latents x and times t (N,)."""
        arguments = {keyword: inputs[name] for name, keyword in KEYWORDS.items() if name in inputs}
        arguments |= {"timestep": self.family.time_scale * t, "return_dict": False}
        if self.routes:
            arguments |= {"routing": routing, "generator": generator}
        if not self.family.packed:
            return self.transformer(hidden_states=x, **arguments)[0]
        if getattr(self.transformer.config, "guidance_embeds", False):  # FLUX.1 dev is distilled; 1: unguided
            arguments["guidance"] = torch.ones_like(t)
        # A token is a patch of 2 x 2 at the position (image, row, column).
        (H, W), images = x.shape[2:], [x, *([inputs["references"]] if "references" in inputs else [])]
        tokens = [F.pixel_unshuffle(image, 2).flatten(2).mT for image in images]  # (N, T, 4 C) per image
        sides = [[torch.arange(size // 2) for size in image.shape[2:]] for image in images]
        positions = [torch.cartesian_prod(torch.tensor([i]), *axes) for i, axes in enumerate(sides)]
        txt_ids = x.new_zeros(inputs["text"].shape[1], 3)
        arguments |= {"img_ids": torch.cat(positions).to(x), "txt_ids": txt_ids}
        output = self.transformer(hidden_states=torch.cat(tokens, dim=1), **arguments)[0][:, : H * W // 4]
        return F.pixel_shuffle(output.mT.unflatten(2, (H // 2, W // 2)), 2)

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained weights by name."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def state_dict(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.trained_parameters().items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, parameter in self.trained_parameters().items():
            parameter.copy_(state[name])


class Rows:
    """The rows of mapped arrays: the first `num_held_out` for evaluations, the others for training."""

    def __init__(self, request: FinetuneConfig, arrays: dict[str, np.ndarray], launch: Launch):
        self.arrays, self.num_held_out, self.launch = arrays, request.num_held_out, launch
        self.seed, self.batch_size = request.seed, request.batch_size
        self.tokens = partial(token_mask, patch_size=PATCH_SIZE, area=request.mask_area)

    def read(self, rows: np.ndarray) -> tuple[Tensor, Inputs, Tensor | None]:
        """Read latents, the other inputs of the network, and mask weights (N, H, W), None without masks."""
        inputs = Inputs({name: torch.from_numpy(array[rows]).float() for name, array in self.arrays.items()})
        x, masks = inputs.pop("latents"), inputs.pop("masks", None)
        return x, inputs, None if masks is None else (masks > 0).float()

    def batches(self) -> Batches:
        """Return the stream of this rank's batches, one micro-batch per step."""
        share = {"rank": self.launch.rank, "world_size": self.launch.world_size}
        sizes = {"batch_size": self.batch_size, "micro_batch_size": self.batch_size // share["world_size"]}
        ids = np.arange(self.num_held_out, len(self.arrays["latents"]))
        order = partial(StreamOrder, ids, seed=self.seed, **sizes, **share)

        def read(step: int) -> Iterator[Stored]:
            for draw in order(start_step=step):
                num_forced = 0
                if "masks" in self.arrays:  # of all ranks, which must keep the same number of tokens
                    masks = torch.from_numpy(self.arrays["masks"][draw.step_ids])
                    num_forced = int(self.tokens(masks).sum(dim=1).max())
                yield (*self.read(draw.ids), num_forced)

        def entries(step: int) -> list[int]:
            return order(start_step=0).batch(step).tolist()

        as_stored, unchecked = (lambda x, generator: x), (lambda std: None)
        return Batches(self.launch, read, entries, as_stored, self.tokens, unchecked, self.seed, **sizes)

    @torch.no_grad()
    def dense_loss(self, net: nn.Module, loss: Callable[..., Tensor], step: int) -> dict[str, float]:
        """Compute the loss of the held-out rows without routes, with the same noise each time."""
        net.eval()
        total = torch.zeros((), device=self.launch.device)
        for start in range(0, self.num_held_out, EVAL_BATCH_SIZE)[self.launch.rank :: self.launch.world_size]:
            rows = self.read(np.arange(start, min(start + EVAL_BATCH_SIZE, self.num_held_out)))
            x, inputs, mask = (part if part is None else part.to(self.launch.device) for part in rows)
            total += loss(net, x, inputs, mask=mask, generator=torch.Generator().manual_seed(start)).sum()
        return {"val_loss_dense": self.launch.sum(total).item() / self.num_held_out}  # SYNC: logged


def flow_loss(
    net: nn.Module,
    x: Tensor,
    inputs: Inputs,
    *,
    routing: Routing | None = None,
    mask: Tensor | None = None,
    generator: torch.Generator,
    shift: float = 1.0,
) -> Tensor:
    """Return the loss (N,) of latents x. Positions where the mask (N, H, W) is 0 do not count."""
    device = generator.device
    n = torch.randn(x.shape, generator=generator, device=device).to(x)
    t = FlowLoss(shift=shift).draw_t(len(x), generator, device).to(x)
    # x_t = (1 - t) x + t n
    x_t = torch.lerp(x, n, t.view(-1, *[1] * (x.ndim - 1)))
    v = net(x_t, t, inputs, routing=routing, generator=generator)
    # || v - (n - x) ||^2
    error = (v.float() - (n - x)).square()
    return (error if mask is None else error * mask.unsqueeze(1)).flatten(1).mean(dim=1)


@hydra.main(version_base="1.3", config_path="../configs", config_name="finetune")
def main(cfg: DictConfig) -> None:
    """Check the request, train from the newest checkpoint, and save the adapters or the weights."""
    with user_mistakes():
        request = resolve(cfg, FinetuneConfig)
        num_processes = int(os.environ.get("WORLD_SIZE", "1"))
        check_request(request)
        if (size := request.batch_size) % num_processes:
            raise ValueError(f"batch_size={size} must be a multiple of num_processes={num_processes}")
        check_parallel("parallel", request.parallel, num_processes)
        check_launcher()
        check_precision(f"mixed_precision={request.mixed_precision}", request.mixed_precision)
        request = replace(request, routes=read_routes(request), tread_config=None)
        run, settings = RunFolder(request.output_dir), check_output(request, num_processes)
        family, arrays = open_inputs(request)
        launch = start_process()
        run.lock(launch)
        try:
            trainer = build_trainer(request, family, arrays, run, launch)
            details = {"num_processes": launch.world_size, **environment(launch.device), "changes": []}
            launch.broadcast_from_main(lambda: run.record_start(settings, details, trainer.step))
        except (ValueError, OSError):
            run.unlock()
            raise
        if launch.is_main:
            trainer.recorder.open(None, settings)
    if trainer.step == 0:
        with gathered(*trainer.networks):
            trainer.recorder.log(0, 0, trainer.evaluators[0][1](0))
    if reason := run_training(trainer, run):
        raise SystemExit(INTERRUPTED if reason == INTERRUPT else TRY_AGAIN)
    net, trained = trainer.net, {}
    if request.parallel == "fsdp":  # all ranks gather the weights; the first one keeps them
        for name, tensor in net.state_dict().items():
            tensor = whole(tensor)
            if launch.is_main:
                trained[name] = tensor.cpu()
    if launch.is_main:  # adapters in the format of peft, all weights in the format of diffusers
        if trained:
            net = Net(*load_model(request), family)
            net.load_state_dict(trained)
        net.transformer.save_pretrained(run.path / "model")
        print(f"saved {run.path / 'model'}; the losses are in {run.metrics_file}")


def check_request(request: FinetuneConfig) -> None:
    """Raise ValueError for values that are invalid for any inputs."""
    check_not_negative("seed", request.seed)
    for key in POSITIVE:
        check_positive(key, getattr(request, key))
    check_choice("train", request.train, ("lora", "lokr", "full"))
    check_choice("mixed_precision", request.mixed_precision, ("no", "bf16"))
    check_choice("router", request.router, tuple(ROUTERS))
    check_choice("parallel", request.parallel, ("ddp", "fsdp"))
    last, total, file = request.off_last_steps, request.total_steps, request.tread_config
    if last and not (request.routes or file):
        raise ValueError(f"off_last_steps={last} needs routes; without routes all steps are dense")
    if not 0 <= last <= total:
        raise ValueError(f"off_last_steps={last} must be in [0, total_steps={total}]")
    if not 0 <= request.mask_area < 1:
        raise ValueError(f"mask_area={request.mask_area} must be in [0, 1)")
    if file and request.routes:
        raise ValueError(f"tread_config={file} and routes={request.routes}: give only one")


def read_routes(request: FinetuneConfig) -> Any:
    """Read the routes: a list, a named recipe, or a SimpleTuner configuration."""
    routes, file = request.routes, request.tread_config
    if isinstance(routes, str):
        check_choice("routes", routes, [file.stem for file in sorted(RECIPES.glob("*.yaml"))])
        return yaml.safe_load((RECIPES / f"{routes}.yaml").read_text())["routes"]
    if file is None:
        return routes
    wrong = f"tread_config={file} is not a SimpleTuner configuration"
    with as_value_error(wrong, OSError, ValueError, AttributeError):
        return [asdict(route) for route in from_simpletuner(json.loads(Path(file).read_text()))]


def check_output(request: FinetuneConfig, num_processes: int) -> dict[str, Any]:
    """Return the settings of a run, after comparing them with the run in `output_dir`.

    Raises:
        ValueError: `output_dir` has a run with other settings, or is not a run.
    """
    paths = {key: str(Path(getattr(request, key))) for key in ("transformer", "inputs")}
    settings = {**asdict(request), **paths, "num_processes": num_processes}
    run = RunFolder(request.output_dir)
    before = run.config() if run.config_file.exists() else {}
    if settings.keys() == before.keys():
        may_change = set(MAY_CHANGE) - ({"total_steps"} if request.off_last_steps else set())
        keys = [key for key in settings if settings[key] != before[key] and key not in may_change]
        if keys:
            changed = ", ".join(f"{key}: {before[key]} -> {settings[key]}" for key in keys)
            raise ValueError(f"output_dir={run.path} has a run with other settings: {changed}")
    elif run.path.exists() and any(not path.name.startswith(".") for path in run.path.iterdir()):
        raise ValueError(f"output_dir={run.path} is not empty and not a run: choose another folder")
    return settings


def open_inputs(request: FinetuneConfig) -> tuple[Family, dict[str, np.ndarray]]:
    """Return the family of the transformer and the mapped arrays. Raise ValueError if they do not match."""
    import diffusers

    folder, key = Path(request.inputs), f"transformer={request.transformer}"
    with as_value_error(f"{key} is not a transformer in the format of diffusers", OSError, ValueError):
        config = json.loads((Path(request.transformer) / "config.json").read_text())
    if (kind := config.get("_class_name")) not in FAMILIES:
        raise ValueError(f"{key} is a {kind}, must be one of {', '.join(FAMILIES)}")
    family, files = FAMILIES[kind], {name: folder / f"{name}.npy" for name in ARRAYS}
    arrays = {name: map_array(file) for name, file in files.items() if file.exists()}
    if missing := [name for name in family.required if name not in arrays]:
        raise ValueError(f"inputs={folder} has no {missing[0]}.npy, which {kind} needs")
    if others := [name for name in arrays if name not in family.required + family.optional]:
        raise ValueError(f"inputs={folder} has {others[0]}.npy, which is not supported with {kind}")
    shapes = {name: array.shape for name, array in arrays.items()}
    lengths, num_held_out = {name: len(array) for name, array in arrays.items()}, request.num_held_out
    if len(set(lengths.values())) > 1:
        raise ValueError(f"inputs={folder} has arrays of different lengths: {lengths}")
    if num_held_out >= (num_rows := lengths["latents"]):
        raise ValueError(f"num_held_out={num_held_out} must be less than the {num_rows} rows of {folder}")
    if "masks" in arrays and shapes["masks"][1:] != shapes["latents"][2:]:
        different = f"masks.npy has shape {shapes['masks']}, latents.npy {shapes['latents']}"
        raise ValueError(f"inputs={folder}: {different}")
    with torch.device("meta"):  # check the transformer, its routes and a forward without using memory
        network = getattr(diffusers, kind).from_config(config)
        _attach(network, request)
        try:
            x, inputs, _ = Rows(request, arrays, ALONE).read(np.arange(1))
            v = Net(network.eval(), (), family)(x.to("meta"), torch.empty(1), inputs.to("meta"))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"inputs={folder}: a {kind} does not take rows of {shapes}: {reason}") from error
    if v.shape != x.shape:
        wrong = f"a {kind} returns {tuple(v.shape)} for rows of {shapes}, not the shape of the latents"
        raise ValueError(f"inputs={folder}: {wrong}")
    return family, arrays


def load_model(request: FinetuneConfig) -> tuple[nn.Module, tuple[Route, ...]]:
    """Load the transformer and its routes, with new adapters unless `train=full`."""
    import diffusers

    # Frozen weights do not need more precision than their products.
    frozen_bf16 = request.train != "full" and request.mixed_precision == "bf16"
    dtype = torch.bfloat16 if frozen_bf16 else torch.float32
    # AutoModel loads the class that the folder names.
    transformer = diffusers.AutoModel.from_pretrained(request.transformer, torch_dtype=dtype)
    if request.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    routes = _attach(transformer, request)
    if request.train == "full":
        return transformer.train(), routes
    from peft import LoKrConfig, LoraConfig, get_peft_model

    torch.manual_seed(request.seed)
    kind = {"lora": LoraConfig, "lokr": LoKrConfig}[request.train]
    return get_peft_model(transformer, kind(r=request.rank, target_modules=TARGETS)).train(), routes


def _attach(transformer: nn.Module, request: FinetuneConfig) -> tuple[Route, ...]:
    routes = [Route(**fields) for fields in check_routes("routes", request.routes)]
    return attach(transformer, routes, router=ROUTERS[request.router]) if routes else ()


def build_trainer(
    request: FinetuneConfig, family: Family, arrays: dict[str, np.ndarray], run: RunFolder, launch: Launch
) -> Trainer:
    """Build the trainer and load the run's newest checkpoint, if it has one."""
    net = Net(*load_model(request), family)
    prepared = _prepare(net, request, launch)
    adamw = torch.optim.AdamW(net.trained_parameters().values(), lr=request.lr, weight_decay=0.0, fused=True)
    bf16 = torch.autocast(launch.device.type, torch.bfloat16, enabled=request.mixed_precision == "bf16")
    loss = bf16(partial(flow_loss, shift=request.shift))
    num_tokens = math.prod(arrays["latents"].shape[2:]) // PATCH_SIZE**2
    off_last_steps = request.off_last_steps or None
    plan = RoutePlan(net.routes, num_tokens, request.total_steps, off_last_steps=off_last_steps)
    rows = Rows(request, arrays, launch)
    intervals = (request.total_steps, request.log_every, request.save_every)
    trainer = Trainer(
        launch,
        net,
        prepared,
        loss,
        Optimizer(adamw),
        ema=None,
        route_plan=plan,
        batches=rows.batches(),
        evaluators=[(request.eval_every, partial(rows.dense_loss, net, loss))],
        recorder=Recorder(launch, run),
        checkpoints=CheckpointFolder(run.path / "checkpoints", 1, None, launch),
        stop=StopRequest(None),
        settings=Settings(*intervals, MAX_GRAD_NORM, MAX_SKIPPED_STEPS),
        work=None,
    )
    trainer.resume_newest()
    launch.barrier()  # all ranks read before any rank writes
    return trainer


def _prepare(net: Net, request: FinetuneConfig, launch: Launch) -> nn.Module:
    if request.parallel == "fsdp":
        base = net.transformer if request.train == "full" else net.transformer.get_base_model()
        blocks = [block for spec in adapter_of(base).block_lists for block in spec.blocks(base)]
        shard(net, blocks, launch, launch.world_size, torch.float32)
        return net
    # Frozen weights are equal on all ranks and need no broadcast.
    frozen = [name for name, parameter in net.named_parameters() if not parameter.requires_grad]
    net._ddp_params_and_buffers_to_ignore = frozen
    return Accelerator(mixed_precision="no").prepare_model(net)


if __name__ == "__main__":
    run_main(main)
