"""Fine-tune a flow-matching transformer of diffusers on precomputed latents and text embeddings, with or
without token routing.

    python -m examples.finetune transformer=FOLDER inputs=FOLDER output_dir=runs/dense
    python -m examples.finetune transformer=FOLDER inputs=FOLDER \\
        routes='[{selection_ratio:0.25,start_layer_idx:2,end_layer_idx:-2}]'

The flow (Esser et al. 2024, arXiv 2403.03206): x_t = (1 - t) x + t n with noise n and t in (0, 1), and the
network learns the velocity n - x. Every draw is a function of seed, step and rank, so that running the same
command again resumes exactly.

Shapes: N samples, latents x (N, C, H, W), or (N, C, F, H, W) of F frames, T tokens of an image.
"""

import runtime.openmp  # noqa: F401 before torch

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import numpy as np
import torch
import torch.nn as nn
import yaml
from accelerate import Accelerator, PartialState
from omegaconf import MISSING, DictConfig
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from builders import config as configuration
from data import StreamOrder
from models import token_mask
from routing import Route, Routing, attach, from_simpletuner, grow_ratio, norm_router, random_router
from runtime.arrays import read_header
from runtime.config import INTERRUPTED, run_main, user_mistakes
from runtime.errors import check_choice, check_not_negative, check_positive
from runtime.files import finite, write_json, write_text
from runtime.launch import Launch
from runtime.launcher import check_launcher, check_precision
from runtime.lock import TRY_AGAIN
from runtime.machine import start_process
from runtime.provenance import PROJECT
from training.checkpoint import CheckpointFolder
from training.stopping import INTERRUPT, StopRequest

RECIPES = PROJECT / "configs" / "model" / "routes"
ARRAYS = ("latents", "text", "pooled", "references", "masks")
INTERVALS = ("log_every", "eval_every", "save_every")
POSITIVE = ("total_steps", "batch_size", "rank", "lr", "shift", "num_held_out", *INTERVALS)
MAY_CHANGE = ("total_steps", "output_dir", *INTERVALS)  # on resume
INT4_GROUP_SIZE = 32  # weights that share a scale
QUANTIZE = {"int8": ("lora", "lokr"), "int4": ("lora", "lokr"), "nf4": ("lora",)}  # adapters that peft has
TARGETS = r".*attn\w*\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"  # what LoRA and LoKr adapt
PATCH_SIZE = 2  # of all these families; FLUX folds its patches before they reach the network
MAX_GRAD_NORM = 1.0
EVAL_BATCH_SIZE = 8
Batch = dict[str, Tensor]
RoutingArgs = dict[str, Any]  # what `routing.attach` adds to a model's forward
ROUTERS = {"random": random_router, "norm": norm_router}


@dataclass
class FinetuneConfig:
    """What `examples.finetune` can be asked."""

    transformer: str = MISSING  # a folder that diffusers has saved one in
    inputs: str = MISSING  # a folder of arrays
    output_dir: str = "runs/finetune"
    routes: Any = field(default_factory=list)  # or the name of one of configs/model/routes
    tread_config: str | None = None  # a JSON file of SimpleTuner, in place of routes
    mask_area: float = 0.0  # a mask keeps a token if it covers more than this fraction of its patch
    router: str = "random"  # or norm
    off_last_steps: int = 0  # steps without routes at the end
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


configuration.register("finetune", FinetuneConfig)


def flux(model: nn.Module, x: Tensor, t: Tensor, batch: Batch, routing: RoutingArgs) -> Tensor:
    N, C, H, W = x.shape
    images = [x, *([batch["references"]] if "references" in batch else [])]
    positions = [_positions(image.shape[-2] // 2, image.shape[-1] // 2, i) for i, image in enumerate(images)]
    output = model(
        hidden_states=torch.cat([_pack(image) for image in images], dim=1),
        encoder_hidden_states=batch["text"],
        pooled_projections=batch["pooled"],
        timestep=t,
        guidance=batch.get("guidance"),
        img_ids=torch.cat(positions).to(x),
        txt_ids=torch.zeros(batch["text"].shape[1], 3).to(x),
        return_dict=False,
        **routing,
    )[0][:, : H * W // 4]  # (N, T, 4 C)
    return output.view(N, H // 2, W // 2, C, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(N, C, H, W)


def _pack(x: Tensor) -> Tensor:
    N, C, H, W = x.shape
    return x.view(N, C, H // 2, 2, W // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(N, H * W // 4, 4 * C)


def _positions(height: int, width: int, image: int) -> Tensor:
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.full_like(rows, image), rows, columns], dim=-1).view(-1, 3)  # (T, 3)


def sd3(model: nn.Module, x: Tensor, t: Tensor, batch: Batch, routing: RoutingArgs) -> Tensor:
    return model(x, batch["text"], batch["pooled"], 1000 * t, return_dict=False, **routing)[0]


def auraflow(model: nn.Module, x: Tensor, t: Tensor, batch: Batch, routing: RoutingArgs) -> Tensor:
    return model(x, batch["text"], t, return_dict=False, **routing)[0]


def wan(model: nn.Module, x: Tensor, t: Tensor, batch: Batch, routing: RoutingArgs) -> Tensor:
    return model(x, 1000 * t, batch["text"], return_dict=False, **routing)[0]


class Family(NamedTuple):
    """How a class of diffusers is called: velocity(model, x, t (N,), batch, routing) has the shape of x."""

    velocity: Callable[[nn.Module, Tensor, Tensor, Batch, RoutingArgs], Tensor]
    required: tuple[str, ...] = ("latents", "text")  # arrays
    optional: tuple[str, ...] = ("masks",)


FAMILIES = {
    "FluxTransformer2DModel": Family(flux, ("latents", "text", "pooled"), ("references", "masks")),
    "SD3Transformer2DModel": Family(sd3, ("latents", "text", "pooled")),
    "AuraFlowTransformer2DModel": Family(auraflow),
    "WanTransformer3DModel": Family(wan, optional=()),
}


@hydra.main(version_base="1.3", config_path="../configs", config_name="finetune")
def main(cfg: DictConfig) -> None:
    """Check, load, train from the newest checkpoint, and save the adapters or the weights."""
    with user_mistakes():
        request = configuration.resolve(cfg)
        check_request(request)
        check_launcher()
        check_precision(f"mixed_precision={request['mixed_precision']}", request["mixed_precision"])
        request |= {"routes": read_routes(request), "tread_config": None}
        num_processes = int(os.environ.get("WORLD_SIZE", "1"))
        if request["batch_size"] % num_processes:
            given = f"batch_size={request['batch_size']}"
            raise ValueError(f"{given} must be a multiple of the {num_processes} processes")
        settings = check_output(request, num_processes)
        family, arrays = open_inputs(request)
        start_process()
        network, routes = load_model(request)
        accelerator = Accelerator(mixed_precision=request["mixed_precision"])
        run = Finetuning(request, family, arrays, network, routes, accelerator)
        run.resume(settings)
        try:
            reason = run.fit()
        except KeyboardInterrupt:
            run.launch.print("interrupted: the same command resumes from the newest checkpoint")
            raise
        if reason:
            run.launch.print(
                f"stopped at step {run.step}, which is saved ({reason}): the same command resumes"
            )
            raise SystemExit(INTERRUPTED if reason == INTERRUPT else TRY_AGAIN)
    if accelerator.is_main_process:  # adapters in the format of peft, all weights in that of diffusers
        network.save_pretrained(run.folder / "model")
        print(f"saved {run.folder / 'model'}; the losses are in {run.folder / 'metrics.jsonl'}")


def check_request(request: dict[str, Any]) -> None:
    """Raise ValueError for a value that is wrong whatever the files are."""
    routes, file, quantize = request["routes"], request["tread_config"], request["quantize"]
    for key in ("seed", "off_last_steps"):
        check_not_negative(key, request[key])
    for key in POSITIVE:
        check_positive(key, request[key])
    check_choice("train", request["train"], ("lora", "lokr", "full"))
    check_choice("mixed_precision", request["mixed_precision"], ("no", "bf16"))
    last, total = request["off_last_steps"], request["total_steps"]
    if last and not (routes or file):
        raise ValueError(f"off_last_steps={last} needs routes: without any, all steps are dense")
    if last > total:
        raise ValueError(f"off_last_steps={last} must be at most total_steps={total}")
    if not 0 <= request["mask_area"] < 1:
        raise ValueError(f"mask_area={request['mask_area']} must be in [0, 1)")
    if file and routes:
        raise ValueError(f"tread_config={file} and routes={routes}: only one may be given")
    check_choice("router", request["router"], tuple(ROUTERS))
    if quantize is not None:
        check_choice("quantize", quantize, tuple(QUANTIZE))
        if request["train"] not in QUANTIZE[quantize]:
            raise ValueError(f"quantize={quantize} needs train={' or train='.join(QUANTIZE[quantize])}")
        if request["mixed_precision"] == "no":
            raise ValueError(f"quantize={quantize} needs mixed_precision=bf16, the type of its products")


def read_routes(request: dict[str, Any]) -> Any:
    """Return the routes: as given, of a named recipe, or from a SimpleTuner configuration."""
    routes, file = request["routes"], request["tread_config"]
    if isinstance(routes, str):
        check_choice("routes", routes, [found.stem for found in sorted(RECIPES.glob("*.yaml"))])
        return yaml.safe_load((RECIPES / f"{routes}.yaml").read_text())["routes"]
    if file is None:
        return routes
    try:
        return [vars(route) for route in from_simpletuner(json.loads(Path(file).read_text()))]
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"tread_config={file} is not a SimpleTuner configuration: {error}") from error


def check_output(request: dict[str, Any], num_processes: int) -> dict[str, Any]:
    """Return the settings that a resumed run must share with its start.

    Raises:
        ValueError: `output_dir` is of a run with other settings, or of something else.
    """
    settings = {key: value for key, value in request.items() if key not in MAY_CHANGE}
    if request["off_last_steps"]:  # which the end of the run decides
        settings["total_steps"] = request["total_steps"]
    settings |= {key: str(Path(request[key])) for key in ("transformer", "inputs")}
    settings["num_processes"] = num_processes
    folder = Path(request["output_dir"])
    file = folder / "finetune.json"
    if file.exists():
        before = json.loads(file.read_text())
        keys = [key for key, value in settings.items() if before.get(key) != value]
        if keys:
            changed = ", ".join(f"{key}: {before.get(key)} -> {settings[key]}" for key in keys)
            raise ValueError(f"output_dir={folder} has a run with other settings: {changed}")
    elif folder.exists() and any(".partial" not in found.name for found in folder.iterdir()):
        raise ValueError(f"output_dir={folder} is not empty, and not a run to resume (no {file.name})")
    return settings


def open_inputs(request: dict[str, Any]) -> tuple[Family, dict[str, np.ndarray]]:
    """Return the family of the transformer and the mapped arrays; raise ValueError if they do not fit."""
    import diffusers

    folder = Path(request["inputs"])
    try:
        config = json.loads((Path(request["transformer"]) / "config.json").read_text())
    except (OSError, ValueError) as error:
        given = f"transformer={request['transformer']}"
        raise ValueError(f"{given} is not a transformer that diffusers has saved: {error}") from error
    kind = config.get("_class_name")
    if kind not in FAMILIES:
        given = f"transformer={request['transformer']} is a {kind}"
        raise ValueError(f"{given}, must be one of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    files = {name: folder / f"{name}.npy" for name in ARRAYS}
    arrays = {name: _open(file) for name, file in files.items() if file.exists()}
    for name in family.required:
        if name not in arrays:
            raise ValueError(f"inputs={folder} has no {name}.npy, which {kind} needs")
    for name in arrays:
        if name not in (*family.required, *family.optional):
            raise ValueError(f"inputs={folder} has {name}.npy, which this program does not give to {kind}")
    lengths = {name: len(array) for name, array in arrays.items()}
    num_rows, num_held_out = lengths["latents"], request["num_held_out"]
    if len(set(lengths.values())) > 1:
        raise ValueError(f"inputs={folder} has arrays of different lengths: {lengths}")
    if num_held_out >= num_rows:
        raise ValueError(f"num_held_out={num_held_out} must be less than the {num_rows} rows of {folder}")
    shapes = {name: array.shape for name, array in arrays.items()}
    if "masks" in arrays and shapes["masks"][1:] != shapes["latents"][2:]:
        raise ValueError(
            f"inputs={folder}: masks.npy has shape {shapes['masks']}, latents.npy {shapes['latents']}"
        )
    with torch.device("meta"):  # the rules of the transformer and its routes, and a forward, without memory
        network = getattr(diffusers, kind).from_config(config)
        _attach(network, request)
        _try(network, family, arrays, folder)
    return family, arrays


def _open(file: Path) -> np.ndarray:
    try:
        with file.open("rb") as opened:
            read_header(opened)  # numpy would read one of any length
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{file} cannot be read as an array of numbers: {error}") from error
    if array.ndim < 2 or array.dtype.kind not in "fiub":
        found = f"shape {array.shape} and type {array.dtype}"
        raise ValueError(f"{file} has {found}: it must have a row of numbers for each image")
    return array


def _try(network: nn.Module, family: Family, arrays: dict[str, np.ndarray], folder: Path) -> None:
    """Raise ValueError if the network does not take a row."""
    batch = {name: torch.empty(1, *array.shape[1:]) for name, array in arrays.items()}
    shapes = ", ".join(f"{name} {tuple(batch[name].shape)}" for name in batch)
    kind = type(network).__name__
    try:
        v = velocity(network.eval(), family, batch["latents"], torch.empty(1), batch, {})
    except (RuntimeError, ValueError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"inputs={folder}: a {kind} does not take {shapes}: {reason}") from error
    if v.shape != batch["latents"].shape:
        raise ValueError(f"inputs={folder}: from {shapes} a {kind} makes {tuple(v.shape)}, not latents")


def velocity(
    network: nn.Module, family: Family, x: Tensor, t: Tensor, batch: Batch, routing: RoutingArgs
) -> Tensor:
    """Return the velocity that a network, under DDP or not, predicts for latents x at times t (N,)."""
    inner = network.module if isinstance(network, DistributedDataParallel) else network
    if getattr(inner.config, "guidance_embeds", False):  # FLUX.1 dev is distilled; 1 means no guidance
        batch = {**batch, "guidance": torch.ones_like(t)}
    return family.velocity(network, x, t, batch, routing)


def load_model(request: dict[str, Any]) -> tuple[nn.Module, tuple[Route, ...]]:
    """Return the transformer, with new adapters unless all of it is trained, and its routes."""
    import diffusers

    # AutoModel looks up the class that the folder names.
    transformer = diffusers.AutoModel.from_pretrained(request["transformer"], **_base_weights(request))
    if request["quantize"] == "nf4":
        _to_nf4(transformer)
    if request["gradient_checkpointing"]:
        transformer.enable_gradient_checkpointing()
    routes = _attach(transformer, request)
    if request["train"] == "full":
        return transformer.train(), routes
    from peft import LoKrConfig, LoraConfig, get_peft_model

    torch.manual_seed(request["seed"])
    kind = {"lora": LoraConfig, "lokr": LoKrConfig}[request["train"]]
    return get_peft_model(transformer, kind(r=request["rank"], target_modules=TARGETS)).train(), routes


def _attach(transformer: nn.Module, request: dict[str, Any]) -> tuple[Route, ...]:
    routes = [Route(**fields) for fields in configuration.check_routes("routes", request["routes"])]
    return attach(transformer, routes, router=ROUTERS[request["router"]]) if routes else ()


def _base_weights(request: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `from_pretrained`: fp32 for weights that are trained."""
    if request["train"] == "full" or request["mixed_precision"] == "no":
        return {"torch_dtype": torch.float32}
    if request["quantize"] in (None, "nf4"):
        return {"torch_dtype": torch.bfloat16}
    from diffusers import AutoModel, TorchAoConfig
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    config = TorchAoConfig(Int8WeightOnlyConfig())
    if request["quantize"] == "int4":
        with torch.device("meta"):
            layers = AutoModel.from_config(request["transformer"]).named_modules()
        linear = {path: layer for path, layer in layers if isinstance(layer, nn.Linear)}
        # Inputs that do not divide into groups, such as those of AuraFlow's patches.
        skipped = [path for path, layer in linear.items() if layer.in_features % INT4_GROUP_SIZE]
        int4 = IntxWeightOnlyConfig(torch.int4, PerGroup(INT4_GROUP_SIZE))
        config = TorchAoConfig(int4, modules_to_not_convert=skipped)
    return {"quantization_config": config, "torch_dtype": torch.bfloat16}


def _to_nf4(transformer: nn.Module) -> None:
    """Quantize linear layers to the NF4 of bitsandbytes; diffusers itself refuses to without a GPU."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    nf4 = {"quant_type": "nf4", "compress_statistics": False}
    linear = {path: layer for path, layer in transformer.named_modules() if isinstance(layer, nn.Linear)}
    for path, layer in linear.items():
        if layer.weight.dtype == torch.float32:  # diffusers keeps these in fp32
            continue
        sizes = (layer.in_features, layer.out_features)
        quantized = Linear4bit(*sizes, compute_dtype=torch.bfloat16, device="meta", **nf4)
        quantized.weight = Params4bit(layer.weight.detach(), requires_grad=False, module=quantized, **nf4)
        quantized.bias = layer.bias
        # In eval() mode some CPUs would repack the weights for good, and packed ones have no gradients.
        quantized.support_avx512bf16_for_cpu = False
        transformer.set_submodule(path, quantized.to(PartialState().device))  # quantizes


class Trained:
    """The trained parameters, as a part of a checkpoint."""

    def __init__(self, parameters: dict[str, nn.Parameter]):
        self.parameters = parameters

    def state_dict(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(state[name])


class Finetuning:
    """The training loop; its position follows from `step` alone."""

    def __init__(
        self,
        request: dict[str, Any],
        family: Family,
        arrays: dict[str, np.ndarray],
        network: nn.Module,
        routes: tuple[Route, ...],
        accelerator: Accelerator,
    ):
        self.request, self.family, self.arrays, self.network = request, family, arrays, network
        self.routes, self.accelerator = routes, accelerator
        self.launch = launch = Launch.of(PartialState())
        self.trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(self.trained.values(), lr=request["lr"], weight_decay=0.0)
        # Frozen weights are the same on all ranks, and quantized ones cannot be broadcast.
        frozen = [name for name, p in network.named_parameters() if not p.requires_grad]
        network._ddp_params_and_buffers_to_ignore = frozen
        self.model, self.optimizer = accelerator.prepare(network, optimizer)
        self.folder, self.step = Path(request["output_dir"]), 0
        self.checkpoints = CheckpointFolder(self.folder / "checkpoints", 1, None, self.launch)
        self.parts = {"trained": Trained(self.trained), "optimizer": self.optimizer}
        num_held_out, num_rows = request["num_held_out"], len(arrays["latents"])
        self.order = StreamOrder(
            np.arange(num_held_out, num_rows),
            seed=request["seed"],
            batch_size=request["batch_size"],
            micro_batch_size=request["batch_size"] // launch.world_size,
            start_step=0,
            rank=launch.rank,
            world_size=launch.world_size,
        )

    def fit(self) -> str:
        """Train up to `total_steps`, or until asked to stop; return why it stopped, and save before."""
        with (stop := StopRequest(None)).listening():
            return self._fit(stop)

    def _fit(self, stop: StopRequest) -> str:
        if self.step == 0:
            self.log({"val_loss_dense": self.evaluate()})
        steps = range(self.step, self.request["total_steps"])
        for _ in (bar := tqdm(steps, unit="step", disable=not self.launch.is_main)):
            loss = self.train_step()
            stop.has_trained = True
            if self.is_due("log_every"):
                mean = self.accelerator.reduce(loss, reduction="mean").item()  # SYNC: shown
                bar.set_postfix(loss=f"{mean:.4f}")
                self.log({"loss": mean})
            if self.is_due("eval_every"):
                self.log({"val_loss_dense": self.evaluate()})
            reason = "" if self.step == self.request["total_steps"] else stop.agreed(0.0)
            if self.is_due("save_every") or reason:
                self.checkpoints.save(self.step, self.parts)
            if reason:
                return reason
        return ""

    def is_due(self, key: str) -> bool:
        """Return whether an interval ends at this step; all end at the last."""
        return self.step % self.request[key] == 0 or self.step == self.request["total_steps"]

    def train_step(self) -> Tensor:
        """Take a step, and return the loss of this rank's rows."""
        request, rank, rows = self.request, self.launch.rank, self.order.batch(self.step)
        own_rows = rows.reshape(self.launch.world_size, -1)[rank]
        state = np.random.SeedSequence([request["seed"], self.step, rank]).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(state[0]))
        routing = self.routing_keywords(rows, own_rows, generator)
        loss = self.loss(self.model, own_rows, generator, routing)
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(list(self.trained.values()), MAX_GRAD_NORM)
        if not norm.isfinite():  # SYNC: such weights must not be saved
            raise ValueError(
                f"inputs={request['inputs']}: loss or gradient of step {self.step + 1} is not finite, rows "
                f"{rows.tolist()}: repair them, or lower lr={request['lr']}; checkpoints are of earlier steps"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.detach()

    def routing_keywords(
        self, rows: np.ndarray, own_rows: np.ndarray, generator: torch.Generator
    ) -> RoutingArgs:
        """Return how a step routes, at the ratio at which the masks of all ranks' `rows` fit."""
        if not self.routes:
            return {}
        if self.step >= self.request["total_steps"] - self.request["off_last_steps"]:
            return {"routing": Routing(0)}
        if "masks" not in self.arrays:
            return {"generator": generator}
        tokens, own_tokens = (
            token_mask(torch.from_numpy(self.arrays["masks"][r]), PATCH_SIZE, self.request["mask_area"])
            for r in (rows, own_rows)
        )
        T, num_forced = tokens.shape[1], int(tokens.sum(dim=1).max())
        ratios = [grow_ratio(route.selection_ratio, T, num_forced) for route in self.routes]
        return {"generator": generator, "routing": Routing(ratios, own_tokens.to(self.accelerator.device))}

    def loss(
        self, model: nn.Module, rows: np.ndarray, generator: torch.Generator, routing: RoutingArgs
    ) -> Tensor:
        """Return the mean loss of rows, 0-d; positions at which a mask is 0 do not count."""
        device, s = self.accelerator.device, self.request["shift"]
        batch = {key: torch.from_numpy(array[rows]).float().to(device) for key, array in self.arrays.items()}
        x = batch["latents"]
        n = torch.randn(x.shape, generator=generator).to(device)
        # t = s u / (1 + (s - 1) u),  u = sigmoid(z),  z ~ N(0, 1)
        u = torch.sigmoid(torch.randn(len(rows), generator=generator)).to(device)
        t = s * u / (1 + (s - 1) * u)
        # x_t = (1 - t) x + t n
        x_t = torch.lerp(x, n, t.view(-1, *[1] * (x.ndim - 1)))
        with self.accelerator.autocast():
            v = velocity(model, self.family, x_t, t, batch, routing)
        # || v - (n - x) ||^2
        error = (v.float() - (n - x)).square()
        if "masks" in batch:
            error = error * (batch["masks"] > 0).unsqueeze(1)
        return error.mean()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the dense loss of the held-out rows, with the same noise each time."""
        self.network.eval()
        num_held_out = self.request["num_held_out"]
        total = torch.zeros((), device=self.accelerator.device)
        for start in range(0, num_held_out, EVAL_BATCH_SIZE)[self.launch.rank :: self.launch.world_size]:
            rows = np.arange(start, min(start + EVAL_BATCH_SIZE, num_held_out))
            total += len(rows) * self.loss(self.network, rows, torch.Generator().manual_seed(start), {})
        self.network.train()
        return self.accelerator.reduce(total, reduction="sum").item() / num_held_out  # SYNC: logged

    def log(self, values: dict[str, float]) -> None:
        """Append a line to `metrics.jsonl`."""
        if self.launch.is_main:
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(finite({"step": self.step, **values})) + "\n")

    def resume(self, settings: dict[str, Any]) -> None:
        """Load the newest checkpoint in `output_dir`, if there is one, and cut the metrics to its step."""
        metrics, total_steps = self.folder / "metrics.jsonl", self.request["total_steps"]
        if newest := self.launch.broadcast_from_main(lambda: self.checkpoints.newest_intact(print)):
            self.step = self.checkpoints.load(newest, self.parts)
            if self.step > total_steps:
                raise ValueError(
                    f"total_steps={total_steps} must be at least {self.step}, the step of {newest}"
                )
        self.launch.barrier()  # all ranks have read before anything is written
        if self.launch.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / "finetune.json", settings)
            lines = metrics.read_text().splitlines(keepends=True) if self.step else []
            # A line that a kill has cut short is of a later step.
            kept = [line for line in lines if line.endswith("}\n") and json.loads(line)["step"] <= self.step]
            write_text(metrics, "".join(kept))


if __name__ == "__main__":
    run_main(main)
