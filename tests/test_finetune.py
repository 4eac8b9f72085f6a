"""The fine-tuning example learns, resumes, and passes inputs and masks to the routes."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn as nn
from accelerate.state import AcceleratorState
from diffusers import AutoModel
from omegaconf import OmegaConf
from safetensors.torch import load_file

from benchmarks.families import POOLED_DIM, TEXT_DIM
from builders.config import resolve
from examples import finetune
from runtime.config import INTERRUPTED
from runtime.launch import ALONE, Launch
from runtime.lock import TRY_AGAIN
from tests.routing.families import FAMILIES
from tests.runs import ROOT, composed
from training.run_folder import RunFolder
from training.trainer import Trainer

peft = pytest.importorskip("peft", reason="`make finetune` installs it")

ROUTES = "routes=[{selection_ratio:0.5,start_layer_idx:1,end_layer_idx:-2}]"
SHORT = ("total_steps=4", "log_every=1", "save_every=2", "eval_every=2", "num_held_out=4")
TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
CHANNELS = {"flux": 16, "sd3": 16, "auraflow": 4, "wan": 16}


@pytest.fixture(autouse=True)
def one_process_on_the_cpu(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state()  # it would keep the precision of the previous test
    yield
    AcceleratorState._reset_state()


def write_inputs(folder, name, count=16):
    """Write a tiny model with random weights, and arrays that it can learn: all latents are equal."""
    FAMILIES[name].build().save_pretrained(folder / "transformer")
    rng, shape = np.random.default_rng(0), (CHANNELS[name], *((4, 4, 4) if name == "wan" else (8, 8)))
    arrays = {
        "latents": np.broadcast_to(rng.standard_normal(shape), (count, *shape)),
        "text": rng.standard_normal((count, 5, TEXT_DIM)),
    }
    if name in ("flux", "sd3"):
        arrays["pooled"] = rng.standard_normal((count, POOLED_DIM))
    for key, array in arrays.items():
        np.save(folder / f"{key}.npy", array.astype(np.float32))


def overrides(folder, *options, output="run"):
    folders = (f"transformer={folder}/transformer", f"inputs={folder}", f"output_dir={folder}/{output}")
    return [*folders, *SHORT, *options]


def requested(*options):
    return resolve(composed(*options, config_name="finetune"), finetune.FinetuneConfig)


def run(folder, *options, output="run"):
    AcceleratorState._reset_state()
    finetune.main(composed(*overrides(folder, *options, output=output), config_name="finetune"))


def metrics(folder, output="run"):
    """Return the lines of a run's metrics without times."""
    lines = map(json.loads, (folder / output / "metrics.jsonl").read_text().splitlines())
    keys = ("step", "loss", "grad_norm", "val_loss_dense", "skipped_steps")
    return [{key: line[key] for key in keys if key in line} for line in lines]


def dense_losses(folder, output="run"):
    return [line["val_loss_dense"] for line in metrics(folder, output) if "val_loss_dense" in line]


def launch(folder, *options, launcher=(), on_cpu=True):
    """Run the program in separate processes."""
    environment = {key: value for key, value in os.environ.items() if on_cpu or key != "ACCELERATE_USE_CPU"}
    command = [sys.executable, *launcher, "-m", "examples.finetune", *overrides(folder, *options)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", CHANNELS)
def test_every_family_learns_with_routes_and_two_resume_bitwise(name, tmp_path):
    write_inputs(tmp_path, name)
    options = (ROUTES, "lr=3e-3", "train=full", "gradient_checkpointing=true")
    options += ("batch_size=8", "total_steps=12", "eval_every=6")
    run(tmp_path, *options)
    dense = dense_losses(tmp_path)
    assert len(dense) == 3
    assert dense[-1] < 0.9 * dense[0]
    if name not in ("flux", "wan"):  # one of images, one of videos
        return
    for steps in (6, 12):
        run(tmp_path, *options, f"total_steps={steps}", output="stopped")
    assert metrics(tmp_path) == metrics(tmp_path, "stopped")
    file = "model/diffusion_pytorch_model.safetensors"
    whole, stopped = (load_file(tmp_path / output / file) for output in ("run", "stopped"))
    for key in whole:
        assert torch.equal(whole[key], stopped[key])


@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_adapters_alone_are_trained_saved_and_loaded_again(kind, tmp_path):
    write_inputs(tmp_path, "sd3")
    run(tmp_path, ROUTES, "rank=4", "lr=1e-2", "mixed_precision=bf16", f"train={kind}")
    first, *_, last = dense_losses(tmp_path)
    assert last < first
    base = AutoModel.from_pretrained(str(tmp_path / "transformer"))
    before = {name: value.clone() for name, value in base.state_dict().items()}
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "model")
    assert sum(f"{kind}_" in name for name, _ in loaded.named_parameters()) > 20
    after = loaded.unload().state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_trains_adapters(tmp_path):
    """This process uses the CPU, so the program runs in another one."""
    write_inputs(tmp_path, "sd3")
    options = (ROUTES, "mixed_precision=bf16", "rank=4", "lr=1e-2")
    launch(tmp_path, *options, on_cpu=False)
    first, *_, last = dense_losses(tmp_path)
    assert last < first


@pytest.mark.slow
def test_two_processes_train_adapters(tmp_path):
    write_inputs(tmp_path, "sd3")
    options = (ROUTES, "mixed_precision=bf16", "rank=4")
    launch(tmp_path, *options, launcher=TWO)
    assert sum("loss" in line for line in metrics(tmp_path)) == 4
    first, *_, last = dense_losses(tmp_path)
    assert last < first
    run(tmp_path, *options, output="one")
    # Two processes together evaluate every held-out row once.
    assert first == pytest.approx(dense_losses(tmp_path, "one")[0], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "train", "precision"), [("flux", "lora", "bf16"), ("wan", "full", "no")])
def test_fsdp_trains_the_weights_of_ddp(tmp_path, name, train, precision):
    """Up to the order in which gradients of the conditioning, which all blocks share, are summed."""
    write_inputs(tmp_path, name)
    options = (ROUTES, f"train={train}", f"mixed_precision={precision}", "rank=4", "lr=1e-2")
    for parallel in ("ddp", "fsdp"):
        folder = f"output_dir={tmp_path}/{parallel}"
        for steps in (2, 4):  # stop and resume
            launch(tmp_path, *options, f"parallel={parallel}", folder, f"total_steps={steps}", launcher=TWO)
    for line, other in zip(metrics(tmp_path, "ddp"), metrics(tmp_path, "fsdp"), strict=True):
        assert line == {key: pytest.approx(value, rel=1e-6) for key, value in other.items()}
    shards = [len(list((tmp_path / name).glob("checkpoints/*/shard-*"))) for name in ("ddp", "fsdp")]
    assert shards == [0, 2]
    files = [next((tmp_path / output / "model").glob("*.safetensors")) for output in ("ddp", "fsdp")]
    whole, shared = map(load_file, files)
    assert whole.keys() == shared.keys()
    for key, tensor in whole.items():
        torch.testing.assert_close(tensor, shared[key], rtol=0, atol=1e-4)


def test_references_and_masks_of_flux_reach_the_routes(tmp_path, monkeypatch):
    write_inputs(tmp_path, "flux")
    rng = np.random.default_rng(1)
    np.save(tmp_path / "references.npy", rng.standard_normal((16, 16, 8, 8)).astype(np.float32))
    masks = np.zeros((16, 8, 8), dtype=np.uint8)
    masks[:, :, 2:] = 1  # 12 of 16 tokens must stay, more than the ratio 0.5 keeps
    np.save(tmp_path / "masks.npy", masks)
    router, kept = finetune.ROUTERS["random"], []

    def recording_router(x, num_kept, *, force_keep=None, noise=None, generator=None):
        assert x.shape[1] == 16  # the tokens of references never bypass
        kept.append(router(x, num_kept, force_keep=force_keep, noise=noise, generator=generator))
        return kept[-1]

    monkeypatch.setitem(finetune.ROUTERS, "random", recording_router)
    tread_config = {"routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}]}
    (tmp_path / "tread.json").write_text(json.dumps(tread_config))
    run(tmp_path, f"tread_config={tmp_path}/tread.json", "rank=4")
    assert len(kept) == 4  # one window per step, none in evaluations
    touched = torch.arange(16).view(4, 4)[:, 1:].flatten()
    assert all(torch.isin(touched, row).all() for ids in kept for row in ids)


def test_every_recipe_of_routes_is_known_by_its_name():
    for file in (ROOT / "configs/model/routes").glob("*.yaml"):
        routes = finetune.read_routes(requested("transformer=x", "inputs=x", f"routes={file.stem}"))
        config = composed(f"model={'dit' if file.stem == 'off' else 'tread'}", f"model/routes={file.stem}")
        assert routes == OmegaConf.to_container(config.model.routes)


def rows_of(arrays, launch=ALONE, **changes):
    request = finetune.FinetuneConfig("", "", **{"num_held_out": 0, **changes})
    return finetune.Rows(request, arrays, launch)


def test_masks_force_tokens_by_the_requested_area():
    """The mask covers all, half, a quarter and none of the patches in the four rows."""
    masks = np.zeros((2, 8, 8), dtype=np.uint8)
    masks[:, :2] = masks[:, 2] = masks[:, 4, ::2] = 1
    for area, num_forced in ((0.0, 12), (0.25, 8), (0.5, 4), (0.75, 4)):
        rows = rows_of({"latents": masks[:, None], "masks": masks}, mask_area=area, batch_size=2)
        ((batch,),) = (list(next(rows.batches().from_step(0))),)
        assert torch.equal(batch.force_keep, (torch.arange(16) < num_forced).expand(2, -1))
        assert batch.num_forced == num_forced


def test_all_ranks_take_the_ratio_at_which_the_masks_of_all_fit():
    masks = np.zeros((4, 8, 8), np.uint8)
    masks[0], masks[3, 0, 2] = 1, 1
    num_forced = []
    for rank in range(2):
        rows = rows_of({"latents": masks[:, None], "masks": masks}, Launch(rank, 2))
        batches = rows.batches()
        (batch,) = next(batches.from_step(0))
        assert batch.num_forced == 16
        num_forced += batch.force_keep.sum(dim=1).tolist()  # of the rank's rows
    assert [num_forced[batches.entries(0).index(row)] for row in range(4)] == [16, 0, 0, 1]


def loss_of(net, x, mask=None, shift=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return finetune.flow_loss(net, x, finetune.Inputs(), mask=mask, generator=generator, shift=shift)


def zero(x_t, t, inputs, *, routing, generator):
    return torch.zeros_like(x_t)


def test_positions_outside_of_masks_do_not_count():
    masks = np.zeros((2, 8, 8), np.uint8)
    masks[:, 2, 5] = 200
    x, _, mask = rows_of({"latents": np.zeros((2, 4, 8, 8)), "masks": masks}).read(np.arange(2))
    n = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))  # the velocity, as latents are 0
    torch.testing.assert_close(loss_of(zero, x, mask), n[:, :, 2, 5].square().sum(dim=1) / n[0].numel())


@pytest.mark.parametrize(("shift", "median"), [(1, 0.5), (3, 3 * 0.5 / (1 + 2 * 0.5))])
def test_the_velocity_leads_from_the_latents_to_the_noise(shift, median):
    """x_t = x + t v: a network that predicts v = (x_t - x) / t has no loss."""
    x, times = torch.randn(2000, 1, 2, 2), []

    def right(x_t, t, inputs, *, routing, generator):
        times.extend(t.tolist())
        return (x_t - x) / t.view(-1, 1, 1, 1)

    assert loss_of(right, x, shift=shift).mean() < 1e-6
    assert np.median(times) == pytest.approx(median, abs=0.02)  # of sigmoid(N(0, 1)), shifted


def test_held_out_rows_count_alike_and_are_never_trained_on():
    rows = rows_of(
        {"latents": np.random.default_rng(0).standard_normal((20, 4, 8, 8))}, num_held_out=12, seed=1
    )
    orders = [rows.batches().entries(step) for step in (0, 1)]
    assert sorted(np.concatenate(orders)) == list(range(12, 20))
    assert orders[0] != rows_of(rows.arrays, num_held_out=12).batches().entries(0)
    parts = [loss_of(zero, rows.read(np.arange(*part))[0], seed=part[0]) for part in ((0, 8), (8, 12))]

    def loss(net, x, inputs, *, mask, generator):
        assert not net.training
        return finetune.flow_loss(zero, x, inputs, mask=mask, generator=generator)

    dense_loss = rows.dense_loss(nn.Identity(), loss, 0)["val_loss_dense"]
    assert dense_loss == pytest.approx(torch.cat(parts).mean().item())


def test_gradients_are_clipped_and_weights_do_not_decay(tmp_path):
    write_inputs(tmp_path, "sd3")
    request, folder = requested(*overrides(tmp_path, "rank=4", "lr=1")), RunFolder(tmp_path / "run")
    trainer = finetune.build_trainer(request, *finetune.open_inputs(request), folder, ALONE)
    assert trainer.settings.grad_clip == 1.0
    before = {name: weight.clone() for name, weight in trainer.net.state_dict().items()}
    trainer.train_step(next(trainer.batches.from_step(0)))
    changed = {name for name, weight in trainer.net.state_dict().items() if not weight.equal(before[name])}
    assert changed and all("lora_B" in name for name in changed)  # while B is 0, A has no gradient


@pytest.mark.parametrize(("name", "scale"), [("flux", 1), ("sd3", 1000), ("auraflow", 1), ("wan", 1000)])
def test_times_agree_with_the_pipelines(name, scale):
    """FLUX and AuraFlow take t in (0, 1), Stable Diffusion 3 and Wan a step of a thousand."""
    network, given = FAMILIES[name].build(), []
    network.register_forward_pre_hook(lambda module, args, kwargs: given.append(kwargs), with_kwargs=True)
    shape = (2, CHANNELS[name], *((4, 4, 4) if name == "wan" else (8, 8)))
    inputs = finetune.Inputs(text=torch.zeros(2, 5, TEXT_DIM))
    if name in ("flux", "sd3"):
        inputs["pooled"] = torch.zeros(2, POOLED_DIM)
    net = finetune.Net(network, (), finetune.FAMILIES[type(network).__name__])
    assert net(torch.zeros(shape), torch.tensor([0.25, 0.5]), inputs).shape == shape
    assert torch.equal(given[0]["timestep"], scale * torch.tensor([0.25, 0.5]))
    assert name != "flux" or given[0]["guidance"].tolist() == [1, 1]  # a larger scale would be learnt as data


def test_flux_gets_the_inputs_of_its_pipeline():
    """A token is a patch of 2 x 2 positions at (row, column); the output has the shape of the latents."""
    x = torch.arange(2 * 3 * 4 * 6, dtype=torch.float32).view(2, 3, 4, 6)
    given = {}

    class Flux(nn.Module):
        config = None

        def forward(self, **arguments):
            given.update(arguments)
            return (arguments["hidden_states"],)

    inputs = finetune.Inputs(text=torch.zeros(2, 5, 12), references=torch.zeros(2, 3, 2, 2))
    net = finetune.Net(Flux(), (), finetune.FAMILIES["FluxTransformer2DModel"])
    assert torch.equal(net(x, torch.ones(2), inputs), x)
    token = 1 * 3 + 2  # row 1, column 2
    assert torch.equal(given["hidden_states"][1, token], x[1, :, 2:4, 4:6].reshape(-1))
    assert given["img_ids"][token].tolist() == [0, 1, 2]
    assert given["img_ids"][-1].tolist() == [1, 0, 0]  # the reference image


def test_a_batch_that_processes_cannot_share_is_refused(tmp_path, monkeypatch):
    write_inputs(tmp_path, "sd3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="batch_size=3 must be a multiple of num_processes=2"):
        run(tmp_path, "batch_size=3")
    assert not (tmp_path / "run").exists()


def test_a_row_that_is_not_finite_is_skipped_and_named(tmp_path):
    write_inputs(tmp_path, "sd3")
    latents = np.load(tmp_path / "latents.npy")
    latents[9] = np.nan
    np.save(tmp_path / "latents.npy", latents)
    run(tmp_path, "train=full")
    skipped = [step for line in metrics(tmp_path) for step in line.get("skipped_steps", [])]
    assert skipped and all(step["entries"][0] == 9 for step in skipped)
    weights = load_file(tmp_path / "run/model/diffusion_pytorch_model.safetensors")
    assert all(weight.isfinite().all() for weight in weights.values())
    diverging = ("train=full", "lr=1e30", "total_steps=20", "num_held_out=10")
    with pytest.raises(SystemExit, match=r"no finite loss or gradient in 10 or more consecutive steps, f"):
        run(tmp_path, *diverging, output="diverged")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TRY_AGAIN)])
def test_a_signal_saves_after_the_step_and_the_run_resumes(tmp_path, monkeypatch, number, status):
    write_inputs(tmp_path, "sd3")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lock").touch()  # of a killed process
    train_step = Trainer.train_step

    def signalled(trainer, batches):
        if trainer.step == 2:
            signal.raise_signal(number)
        train_step(trainer, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", signalled)
        with pytest.raises(SystemExit) as end:
            run(tmp_path, "rank=4", "save_every=100")
    assert end.value.code == status
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000003"]
    names = {file.name for file in (tmp_path / "run/checkpoints/step_00000003").iterdir()}
    assert names == {"net.safetensors", "optimizer.safetensors", "state.json", "SHA256SUMS"}
    run(tmp_path, "rank=4", "save_every=100")
    run(tmp_path, "rank=4", output="whole")
    assert metrics(tmp_path) == metrics(tmp_path, "whole")


def test_a_run_is_not_resumed_with_fewer_steps_or_other_settings(tmp_path):
    write_inputs(tmp_path, "sd3")
    run(tmp_path, "rank=4")
    before = metrics(tmp_path)
    with pytest.raises(SystemExit, match=r"^total_steps=2 must be at least the 4 steps of .*step_00000004"):
        run(tmp_path, "rank=4", "total_steps=2")
    with pytest.raises(SystemExit, match="has a run with other settings: rank: 4 -> 8"):
        run(tmp_path, "rank=8", "total_steps=8")
    assert metrics(tmp_path) == before


def test_the_last_steps_may_go_without_routes(tmp_path):
    write_inputs(tmp_path, "sd3")
    off = (ROUTES, "train=full", "off_last_steps=2")
    runs = {"run": off, "routed": off[:2], "dense": off[1:2], "only_dense": (*off, "total_steps=2")}
    losses = {}
    for output, options in runs.items():
        run(tmp_path, *options, output=output)
        losses[output] = [line["loss"] for line in metrics(tmp_path, output) if "loss" in line]
    assert losses["run"][:2] == losses["routed"][:2] and losses["run"][2] != losses["routed"][2]
    assert losses["run"][0] != losses["dense"][0]
    assert losses["only_dense"] == losses["dense"][:2]
    with pytest.raises(SystemExit, match="has a run with other settings: total_steps: 4 -> 8"):
        run(tmp_path, *off, "total_steps=8")
