"""Fine-tune a flow-matching transformer of diffusers on precomputed latents and text embeddings, with tokens
routed or not.

    accelerate launch -m examples.finetune transformer=FOLDER inputs=FOLDER output_dir=runs/dense
    accelerate launch -m examples.finetune transformer=FOLDER inputs=FOLDER \\
        routes='[{selection_ratio:0.25,start_layer_idx:2,end_layer_idx:-2}]'

The flow (Esser et al. 2024, arXiv 2403.03206): x_t = (1 - t) x + t n with noise n and t in (0, 1), and the
network learns the velocity n - x. Every draw is a function of seed, step and process, so that the same
command goes on where it was stopped.

Shapes: N samples, latents x (N, C, H, W), or (N, C, F, H, W) of F frames, T tokens of an image.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
import torch.nn as nn
import yaml
from accelerate import Accelerator, PartialState
from omegaconf import DictConfig
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from builders import config as configuration
from data import StreamOrder
from models import token_mask
from routing import Route, attach, from_simpletuner, grow_ratio
from runtime.arrays import read_header
from runtime.config import run_main, user_mistakes
from runtime.errors import check_choice, check_not_negative, check_positive
from runtime.files import atomic_write, finite, write_json, write_text
from runtime.machine import start_process

RECIPES = Path(__file__).resolve().parents[1] / "configs" / "model" / "routes"
ARRAYS = ("latents", "text", "pooled", "references", "masks")
QUANTIZATIONS = ("int8", "int4", "nf4")
INT4_GROUP_SIZE = 32  # weights that share a scale
TARGETS = r".*attn\w*\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"  # what LoRA and LoKr are added to
PATCH_SIZE = 2  # of all these families; FLUX folds its patches before they reach the network
MAX_GRAD_NORM = 1.0
EVALUATED_AT_ONCE = 8
MAY_CHANGE = ("total_steps", "save_every", "eval_every", "log_every", "output_dir")  # when a run goes on
Batch = dict[str, torch.Tensor]
RoutingKeywords = dict[str, Any]  # those that `routing.attach` adds to a model's forward

configuration.register()


def flux(
    model: nn.Module, x: torch.Tensor, t: torch.Tensor, batch: Batch, routing: RoutingKeywords
) -> torch.Tensor:
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


def _pack(x: torch.Tensor) -> torch.Tensor:
    N, C, H, W = x.shape
    return x.view(N, C, H // 2, 2, W // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(N, H * W // 4, 4 * C)


def _positions(height: int, width: int, image: int) -> torch.Tensor:
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.full_like(rows, image), rows, columns], dim=-1).view(-1, 3)  # (T, 3)


def sd3(
    model: nn.Module, x: torch.Tensor, t: torch.Tensor, batch: Batch, routing: RoutingKeywords
) -> torch.Tensor:
    return model(x, batch["text"], batch["pooled"], 1000 * t, return_dict=False, **routing)[0]


def auraflow(
    model: nn.Module, x: torch.Tensor, t: torch.Tensor, batch: Batch, routing: RoutingKeywords
) -> torch.Tensor:
    return model(x, batch["text"], t, return_dict=False, **routing)[0]


def wan(
    model: nn.Module, x: torch.Tensor, t: torch.Tensor, batch: Batch, routing: RoutingKeywords
) -> torch.Tensor:
    return model(x, 1000 * t, batch["text"], return_dict=False, **routing)[0]


@dataclass(frozen=True)
class Family:
    """How a class of diffusers is called.

    Args:
        velocity: returns what the network says of latents at times t (N,), in the shape of the latents.
        needs: the arrays that must be there.
        takes: the arrays that may be there.
    """

    velocity: Callable[[nn.Module, torch.Tensor, torch.Tensor, Batch, RoutingKeywords], torch.Tensor]
    needs: tuple[str, ...] = ("latents", "text")
    takes: tuple[str, ...] = ("masks",)


FAMILIES = {
    "FluxTransformer2DModel": Family(flux, ("latents", "text", "pooled"), ("references", "masks")),
    "SD3Transformer2DModel": Family(sd3, ("latents", "text", "pooled")),
    "AuraFlowTransformer2DModel": Family(auraflow),
    "WanTransformer3DModel": Family(wan, takes=()),
}


@hydra.main(version_base="1.3", config_path="../configs", config_name="finetune")
def main(cfg: DictConfig) -> None:
    """Check, load, train from where the newest checkpoint is, and save the adapters or the weights."""
    with user_mistakes():
        request = configuration.resolve(cfg)
        check_request(request)
        request |= {"routes": read_routes(request), "tread_config": None}
        num_processes = int(os.environ.get("WORLD_SIZE", "1"))
        if request["batch_size"] % num_processes:
            raise ValueError(
                f"batch_size={request['batch_size']} must be a multiple of the number of "
                f"processes={num_processes}"
            )
        settings = check_output(request, num_processes)
        family, arrays = open_inputs(request)
        start_process()
        network, routes = load_model(request)
        accelerator = Accelerator(mixed_precision=request["mixed_precision"])
        run = Finetuning(request, family, arrays, network, routes, accelerator)
        run.resume(settings)
        try:
            run.fit()
        except KeyboardInterrupt:
            raise SystemExit("stopped: the same command goes on from the newest checkpoint") from None
    run.save_model()


def check_request(request: dict[str, Any]) -> None:
    """Raise ValueError with key, value and rule for what is wrong in itself."""
    if not request["output_dir"].strip():
        raise ValueError(f"output_dir='{request['output_dir']}' must not be empty")
    check_not_negative("seed", request["seed"])
    for key in (
        "total_steps",
        "batch_size",
        "rank",
        "lr",
        "shift",
        "save_every",
        "eval_every",
        "log_every",
        "num_held_out",
    ):
        check_positive(key, request[key])
    check_choice("train", request["train"], ("lora", "lokr", "full"))
    check_choice("mixed_precision", request["mixed_precision"], ("no", "bf16"))
    if not 0 <= request["mask_area"] < 1:
        raise ValueError(f"mask_area={request['mask_area']} must be in [0, 1)")
    if request["tread_config"] and request["routes"]:
        raise ValueError(
            f"tread_config={request['tread_config']} and routes={request['routes']}: only one may be given"
        )
    check_choice("router", request["router"], tuple(ROUTERS))
    if request["router"] != "random" and not (request["routes"] or request["tread_config"]):
        raise ValueError(f"router={request['router']} has no meaning without routes")
    if quantize := request["quantize"]:
        check_choice("quantize", quantize, QUANTIZATIONS)
        if quantize == "nf4" and request["train"] != "lora":
            raise ValueError(
                "quantize=nf4 needs train=lora: peft has no other adapters for weights of bitsandbytes here"
            )
        if request["train"] == "full":
            raise ValueError(
                f"quantize={quantize} needs train=lora or train=lokr: weights in few bits are not trained"
            )
        if request["mixed_precision"] == "no":
            raise ValueError(
                f"quantize={quantize} needs mixed_precision=bf16, in which such weights are multiplied"
            )


def read_routes(request: dict[str, Any]) -> Any:
    """Return the routes as they are given, those of a name, or those of a configuration of SimpleTuner."""
    routes, file = request["routes"], request["tread_config"]
    if isinstance(routes, str):
        check_choice("routes", routes, [found.stem for found in sorted(RECIPES.glob("*.yaml"))])
        return yaml.safe_load((RECIPES / f"{routes}.yaml").read_text())["routes"]
    if file is None:
        return routes
    try:
        return [vars(route) for route in from_simpletuner(json.loads(Path(file).read_text()))]
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"tread_config={file} cannot be read as a configuration of SimpleTuner: {error}"
        ) from error


def check_output(request: dict[str, Any], num_processes: int) -> dict[str, Any]:
    """Return what a run that goes on must have in common with its beginning; raise ValueError if the folder
    is not its own.
    """
    folder = Path(request["output_dir"])
    settings = {key: value for key, value in request.items() if key not in MAY_CHANGE} | {
        "num_processes": num_processes
    }
    settings |= {key: str(Path(request[key])) for key in ("transformer", "inputs")}
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir={folder} must be a folder")
    file = folder / "finetune.json"
    if not file.exists():
        if folder.exists() and any(".partial" not in found.name for found in folder.iterdir()):
            raise ValueError(f"output_dir={folder} holds something else: choose another")
        return settings
    before = json.loads(file.read_text())
    changed = [
        f"{key}: {before.get(key)} -> {value}" for key, value in settings.items() if before.get(key) != value
    ]
    if changed:
        raise ValueError(f"output_dir={folder} holds a run with other settings: {', '.join(changed)}")
    return settings


def open_inputs(request: dict[str, Any]) -> tuple[Family, dict[str, np.ndarray]]:
    """Return what class the transformer is of, and the arrays of the inputs, opened; raise ValueError if they
    do not fit.
    """
    import diffusers

    file, folder = Path(request["transformer"]) / "config.json", Path(request["inputs"])
    if not file.is_file():
        raise ValueError(
            f"transformer={request['transformer']} must be a folder that holds a transformer: {file} not "
            "found"
        )
    config = json.loads(file.read_text())
    kind = config.get("_class_name")
    if kind not in FAMILIES:
        raise ValueError(
            f"transformer={request['transformer']} is a {kind}, must be one of {', '.join(FAMILIES)}"
        )
    if not folder.is_dir():
        raise ValueError(f"inputs={folder} must be a folder of arrays: latents.npy, text.npy")
    files = {name: folder / f"{name}.npy" for name in ARRAYS}
    family, arrays = FAMILIES[kind], {name: _open(file) for name, file in files.items() if file.exists()}
    for name in family.needs:
        if name not in arrays:
            raise ValueError(f"inputs={folder} has no {name}.npy, which {kind} needs")
    for name in arrays:
        if name not in (*family.needs, *family.takes):
            raise ValueError(f"inputs={folder} has {name}.npy, which this program does not give to {kind}")
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"inputs={folder} has arrays of different lengths: {lengths}")
    if request["num_held_out"] >= lengths["latents"]:
        raise ValueError(
            f"num_held_out={request['num_held_out']} must be less than the {lengths['latents']} rows of "
            f"{folder}"
        )
    if "masks" in arrays and arrays["masks"].shape[1:] != arrays["latents"].shape[2:]:
        raise ValueError(
            f"inputs={folder}: masks.npy has shape {arrays['masks'].shape}, latents.npy "
            f"{arrays['latents'].shape}"
        )
    with torch.device("meta"):  # rules of the transformer and of its routes, and a pass, without its memory
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
        raise ValueError(
            f"{file} cannot be read as an array of numbers: it is damaged, or of something else"
        ) from error
    if array.ndim < 2 or array.dtype.kind not in "fiub":
        raise ValueError(
            f"{file} has shape {array.shape} and type {array.dtype}: it must hold a row of numbers for each "
            "image"
        )
    return array


def _try(network: nn.Module, family: Family, arrays: dict[str, np.ndarray], folder: Path) -> None:
    """Raise ValueError if a row does not go through the network."""
    batch = {name: torch.empty(1, *array.shape[1:]) for name, array in arrays.items()}
    shapes = ", ".join(f"{name} {tuple(batch[name].shape)}" for name in batch)
    try:
        v = velocity(network.eval(), family, batch["latents"], torch.empty(1), batch, {})
    except (RuntimeError, ValueError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"inputs={folder}: a {type(network).__name__} does not take {shapes}: {reason}"
        ) from error
    if v.shape != batch["latents"].shape:
        raise ValueError(
            f"inputs={folder}: from {shapes} a {type(network).__name__} makes {tuple(v.shape)}, not latents"
        )


def velocity(
    network: nn.Module,
    family: Family,
    x: torch.Tensor,
    t: torch.Tensor,
    batch: Batch,
    routing: RoutingKeywords,
) -> torch.Tensor:
    """Return what a network, or what wraps it, says of latents x at times t (N,), in the shape of x."""
    inner = network.module if isinstance(network, DistributedDataParallel) else network
    if getattr(inner.config, "guidance_embeds", False):  # FLUX Dev: at 1 it predicts the data as they are
        batch = {**batch, "guidance": torch.ones_like(t)}
    return family.velocity(network, x, t, batch, routing)


def load_model(request: dict[str, Any]) -> tuple[nn.Module, tuple[Route, ...]]:
    """Return the transformer, all of its weights to train or new adapters in it, and the routes that it has
    now.
    """
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
    adapters = {"lora": LoraConfig, "lokr": LoKrConfig}[request["train"]](
        r=request["rank"], target_modules=TARGETS
    )
    return get_peft_model(transformer, adapters).train(), routes


def _attach(transformer: nn.Module, request: dict[str, Any]) -> tuple[Route, ...]:
    routes = [Route(**fields) for fields in configuration.check_routes("routes", request["routes"])]
    return attach(transformer, routes, router=ROUTERS[request["router"]]) if routes else ()


def _base_weights(request: dict[str, Any]) -> dict[str, Any]:
    """Return how they are loaded: in fp32 if they are trained, else as coarse as was asked for."""
    if request["train"] == "full" or request["mixed_precision"] == "no":
        return {"torch_dtype": torch.float32}
    name = request["quantize"]
    if name in (None, "nf4"):
        return {"torch_dtype": torch.bfloat16}
    from diffusers import TorchAoConfig
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    if name == "int8":
        config = TorchAoConfig(Int8WeightOnlyConfig())
    else:
        few_bits = IntxWeightOnlyConfig(torch.int4, PerGroup(INT4_GROUP_SIZE))
        config = TorchAoConfig(few_bits, modules_to_not_convert=_not_in_groups(request["transformer"]))
    return {"quantization_config": config, "torch_dtype": torch.bfloat16}


def _not_in_groups(folder: str) -> list[str]:
    """Return the linear layers whose inputs do not divide into groups: that of AuraFlow's patches is one."""
    import diffusers

    with torch.device("meta"):
        layers = diffusers.AutoModel.from_config(folder).named_modules()
    return [
        path for path, layer in layers if isinstance(layer, nn.Linear) and layer.in_features % INT4_GROUP_SIZE
    ]


def _to_nf4(transformer: nn.Module) -> None:
    """Keep the weights of linear layers in 4 bits of bitsandbytes; diffusers' own way to it refuses machines
    without a GPU.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    how = {"quant_type": "nf4", "compress_statistics": False}
    linear = [path for path, layer in transformer.named_modules() if isinstance(layer, nn.Linear)]
    for path in linear:
        layer = transformer.get_submodule(path)
        if layer.weight.dtype == torch.float32:  # diffusers keeps it so
            continue
        small = Linear4bit(
            layer.in_features, layer.out_features, compute_dtype=torch.bfloat16, device="meta", **how
        )
        small.weight, small.bias = (
            Params4bit(layer.weight.detach(), requires_grad=False, module=small, **how),
            layer.bias,
        )
        # In eval() mode it would pack the weights for some CPUs, and leave them so: no gradients flow through
        # packed ones.
        small.support_avx512bf16_for_cpu = False
        transformer.set_submodule(path, small.to(PartialState().device))  # this quantizes them


class Finetuning:
    """The loop: where it stands follows from `step` alone."""

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
        self.trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(self.trained.values(), lr=request["lr"], weight_decay=0.0)
        # Weights that are not trained are the same everywhere: nothing to send, and weights in few bits can
        # not be sent.
        network._ddp_params_and_buffers_to_ignore = [
            n for n, p in network.named_parameters() if not p.requires_grad
        ]
        self.model, self.optimizer = accelerator.prepare(network, optimizer)
        self.folder, self.step = Path(request["output_dir"]), 0
        num_held_out, num_rows = request["num_held_out"], len(arrays["latents"])
        self.order = StreamOrder(
            np.arange(num_held_out, num_rows),
            seed=request["seed"],
            batch_size=request["batch_size"],
            micro_batch_size=request["batch_size"] // accelerator.num_processes,
            start_step=0,
            process_index=accelerator.process_index,
            num_processes=accelerator.num_processes,
        )

    def fit(self) -> None:
        """Train up to `total_steps`."""
        request, process = self.request, self.accelerator.process_index
        if self.step == 0:
            self.log({"val_loss_dense": self.evaluate()})
        hidden = not self.accelerator.is_main_process
        with tqdm(total=request["total_steps"], initial=self.step, unit="step", disable=hidden) as bar:
            while self.step < request["total_steps"]:
                rows = self.order.batch(self.step)
                state = np.random.SeedSequence([request["seed"], self.step, process]).generate_state(
                    1, np.uint64
                )
                generator = torch.Generator().manual_seed(int(state[0]))
                own_rows = rows.reshape(self.accelerator.num_processes, -1)[process]
                loss = self.loss(
                    self.model, own_rows, generator, self.routing_keywords(rows, own_rows, generator)
                )
                self.accelerator.backward(loss)
                norm = self.accelerator.clip_grad_norm_(list(self.trained.values()), MAX_GRAD_NORM)
                if not norm.isfinite():  # SYNC: such weights must not be saved
                    raise ValueError(
                        f"inputs={request['inputs']}: loss or gradient of step {self.step + 1} is not "
                        "finite, of rows "
                        f"{rows.tolist()}: mend them, or lower lr={request['lr']}; what is saved is of before"
                    )
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.step += 1
                bar.update()
                last = self.step == request["total_steps"]
                if self.step % request["log_every"] == 0 or last:
                    mean = self.accelerator.reduce(
                        loss.detach(), reduction="mean"
                    ).item()  # SYNC: to be shown
                    bar.set_postfix(loss=f"{mean:.4f}")
                    self.log({"loss": mean})
                if self.step % request["eval_every"] == 0 or last:
                    self.log({"val_loss_dense": self.evaluate()})
                if self.step % request["save_every"] == 0 or last:
                    self.save()

    def routing_keywords(
        self, rows: np.ndarray, own_rows: np.ndarray, generator: torch.Generator
    ) -> RoutingKeywords:
        """Return how a step routes: `rows` are those of all processes, which agree on the ratio at which all
        masks fit.
        """
        if not self.routes:
            return {}
        if "masks" not in self.arrays:
            return {"generator": generator}
        masks = self.arrays["masks"]
        tokens, own_tokens = (
            token_mask(torch.from_numpy(masks[r]), PATCH_SIZE, self.request["mask_area"])
            for r in (rows, own_rows)
        )
        num_forced = int(tokens.sum(dim=1).max())
        return {
            "generator": generator,
            "selection_ratio": [
                grow_ratio(route.selection_ratio, tokens.shape[1], num_forced) for route in self.routes
            ],
            "force_keep": own_tokens.to(self.accelerator.device),
        }

    def loss(
        self, model: nn.Module, rows: np.ndarray, generator: torch.Generator, routing: RoutingKeywords
    ) -> torch.Tensor:
        """Return the mean loss of some rows, a 0-d tensor; positions at which a mask is 0 do not count."""
        device = self.accelerator.device
        batch = {
            name: torch.from_numpy(array[rows]).float().to(device) for name, array in self.arrays.items()
        }
        x = batch["latents"]
        n = torch.randn(x.shape, generator=generator).to(device)
        # t = s u / (1 + (s - 1) u),  u = sigmoid(z),  z ~ N(0, 1)
        u, s = torch.sigmoid(torch.randn(len(rows), generator=generator)).to(device), self.request["shift"]
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
        """Return the dense loss of the rows held out, with the same noise each time."""
        self.network.eval()
        starts = range(0, self.request["num_held_out"], EVALUATED_AT_ONCE)
        total = torch.zeros((), device=self.accelerator.device)
        for start in starts[self.accelerator.process_index :: self.accelerator.num_processes]:
            rows = np.arange(start, min(start + EVALUATED_AT_ONCE, self.request["num_held_out"]))
            total += len(rows) * self.loss(self.network, rows, torch.Generator().manual_seed(start), {})
        self.network.train()
        return (
            self.accelerator.reduce(total, reduction="sum").item() / self.request["num_held_out"]
        )  # SYNC: to be shown

    def log(self, values: dict[str, float]) -> None:
        """Append a line to `metrics.jsonl`."""
        if self.accelerator.is_main_process:
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(finite({"step": self.step, **values})) + "\n")

    def save(self) -> None:
        """Save what is trained and the optimizer, whole or not at all."""
        if self.accelerator.is_main_process:
            weights = {name: parameter.detach() for name, parameter in self.trained.items()}
            state = {"step": self.step, "weights": weights, "optimizer": self.optimizer.state_dict()}
            with atomic_write(self.folder / "checkpoint.pt") as partial:
                torch.save(state, partial)

    def resume(self, settings: dict[str, Any]) -> None:
        """Go on where the checkpoint in `output_dir` is, if there is one."""
        checkpoint, metrics = self.folder / "checkpoint.pt", self.folder / "metrics.jsonl"
        if checkpoint.exists():
            state = torch.load(checkpoint, map_location="cpu", weights_only=True)
            if state["step"] > self.request["total_steps"]:
                raise ValueError(
                    f"total_steps={self.request['total_steps']} must be at least {state['step']}, where "
                    f"{self.folder} stands"
                )
            with torch.no_grad():
                for name, parameter in self.trained.items():
                    parameter.copy_(state["weights"][name])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
        self.accelerator.wait_for_everyone()  # all have read before anything is written
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / "finetune.json", settings)
            lines = metrics.read_text().splitlines(keepends=True) if self.step else []
            whole = [
                line for line in lines if line.endswith("}\n")
            ]  # a line that a kill has cut is of a later step
            kept = [line for line in whole if json.loads(line)["step"] <= self.step]
            write_text(metrics, "".join(kept))

    def save_model(self) -> None:
        """Save the adapters in the format of peft, or all weights in that of diffusers, as if there had been
        no routes.
        """
        if self.accelerator.is_main_process:
            self.network.save_pretrained(self.folder / "model")
            self.accelerator.print(
                f"saved {self.folder / 'model'}; the losses are in {self.folder / 'metrics.jsonl'}"
            )


if __name__ == "__main__":
    run_main(main)
