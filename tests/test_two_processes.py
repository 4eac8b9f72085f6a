"""Compare two processes with one; both are started once, as forks of the server in tests/programs.py."""

import hashlib
import json
import os
import signal
from contextlib import redirect_stdout
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from PIL import Image
from safetensors.torch import load_file

import sample
from data import open_images
from evaluation import Reference, make_reference
from evaluation.reference import evenly_spaced
from runtime.launch import Launch
from tests.inception import adm_suite
from tests.latents import growing_masks, write_latents
from tests.runs import TINY, before_each_step, composed, metrics, tiny_run, tiny_trainer
from tests.training.test_trainer import assert_same_run
from training.checkpoint import latest_checkpoint
from training.fit import run_training
from training.sharding import whole

NUM_PROCESSES = 2
SPOILT_STEP, SPOILT_INDEX, STOPPED_STEP = 1, 5, 2  # stopped where an evaluation is due and no checkpoint
# Two micro-batches for each process. The zeros of adaLN-Zero would hide most draws, and a small eps of Adam
# would amplify gradients that are rounding errors.
OPTIONS = ("train.micro_batch_size=2", "model.init=xavier", "optimizer.lr=1e-3", "optimizer.eps=1e-3")
OPTIONS += ("ema.decay=0.5", "model/size=tiny", "train.num_workers=0")
RUN = (*OPTIONS, "train.log_every=5", "train.eval_every=3", "train.sample_every=4", "sampler.num_steps=2")
DRAWS = {
    "edm": ("sampler=edm", "num_steps=3", "sampler.S_churn=9", "guidance=cfg"),
    "sde": ("sampler=sde", "num_steps=4", "guidance=sparse", "guidance_scale=1.5"),
    "dopri5": ("sampler=dopri5", "sampler.rtol=0.1", "guidance=sparse", "guidance.masks=fixed"),
}
# Six batches of four, three for each process, one of them short.
NUM_IMAGES, NUM_KEPT, SIDE = 23, 9, 4


class Pixels:
    """Pixels as features: the tests are about how features of all images are combined."""

    device, record = torch.device("cpu"), {"checked": "sha256", "tensors_sha256": "0"}
    num_features = dict.fromkeys(("pool", "spatial", "probs"), 3 * SIDE**2)
    num_seen = 0

    def __call__(self, images):
        self.num_seen += len(images)
        pixels = torch.from_numpy(images).flatten(1) / 255
        return {"pool": pixels, "spatial": pixels.square(), "probs": (20 * pixels).softmax(dim=1)}


def shrink(patch):
    """Score few and small images, in batches that the processes cannot share evenly."""
    patch.setattr("builders.evaluators.EVALUATION_BATCH", 4)
    patch.setattr("evaluation.reference.NUM_KEPT", NUM_KEPT)
    patch.setattr("evaluation.metrics.inception_score.SPLIT_SIZE", 10)


def write_inputs(folder):
    """Write latents whose masks touch 0 to 16 of 16 tokens, and images."""
    rng = np.random.default_rng(0)
    stored, labels = rng.standard_normal((34, 4, 8, 8)), np.arange(34) % 10
    write_latents(folder / "latents", stored, labels, growing_masks(34), dtype="float32", num_held_out=10)
    for name, count in (("reference", NUM_IMAGES), ("samples", NUM_IMAGES + 4)):
        np.savez(folder / f"{name}.npz", rng.integers(0, 256, (count, SIDE, SIDE, 3), np.uint8))


def run_options(folder, overflow="bypass"):
    masked = ("train.masked_loss=true", f"routing.force_keep_overflow={overflow}")
    return ("data=latents", f"data.path={folder / 'latents'}", *TINY[1:], *masked, *RUN)


def spoil(trainer):
    """Make the loss of one sample of one step nan, by its index in the global batch."""
    generator, loss, drawn = trainer.batches.generator, trainer.loss, []
    trainer.batches.generator = lambda *of: (drawn.append(of), generator(*of))[1]

    def spoilt(*args, **kwargs):
        losses = loss(*args, **kwargs)
        here = drawn[-1] == (SPOILT_STEP, SPOILT_INDEX // 2)
        return losses + torch.tensor([0.0, torch.nan]) if here else losses

    trainer.loss = spoilt


def trained(folder, *overrides, ask_to_stop=False):
    """Train with a spoilt step; return why the run stopped and a hash of this process's weights."""
    trainer, run = tiny_trainer(folder, *overrides)
    spoil(trainer)
    if ask_to_stop:
        before_each_step(trainer, lambda step: step == STOPPED_STEP and os.kill(os.getpid(), signal.SIGTERM))
    reason = run_training(trainer, run)
    tensors = [*trainer.net.parameters(), *trainer.ema.net.parameters()]
    digest = hashlib.sha256(b"".join(whole(tensor.detach()).numpy().tobytes() for tensor in tensors))
    return reason, digest.hexdigest()


def scored(folder, launch):
    """Make a reference and score samples; return the scores and the number of images evaluated here."""
    detector = Pixels()
    images, samples = (open_images(folder / f"{name}.npz") for name in ("reference", "samples"))
    make_reference(detector, images, folder / f"made_by_{launch.world_size}.npz", 4, launch)
    options = {"batch_size": 4, "precision_recall": True, "exact_distances": True, "kid": True}
    suite = adm_suite(detector, Reference(images=images), launch=launch, **options)
    return suite.score(samples).values, detector.num_seen


def draw(folder, num_processes):
    for name, chosen in DRAWS.items():
        output = f"out={folder}/{name}_by_{num_processes}.npz"
        options = (f"run={folder}/whole", "num_samples=11", "batch_size=4", output)
        sample.main(composed(*options, *chosen, config_name="sample"))


def refusal(ask):
    try:
        ask()
    except Exception as error:
        return repr(error)


def fail():
    raise MemoryError("none left")


def process(rank, folder):
    """Run everything that the tests check in one of the processes, and save the results."""
    torch.set_num_threads(1)
    os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")} | {"ACCELERATE_USE_CPU": "true"}
    os.environ |= {name: str(NUM_PROCESSES) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    # A process must not wait for ever if its peer does something else.
    group = {"rank": rank, "world_size": NUM_PROCESSES, "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", **group)
    launch = Launch.of(PartialState(cpu=True))
    outcomes = {}
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        outcomes["whole"] = trained(folder / "whole", *run_options(folder))
        outcomes["stopped"] = trained(folder / "stopped", *run_options(folder), ask_to_stop=rank == 1)
        outcomes["resumed"] = trained(folder / "stopped", *run_options(folder))
        outcomes["handed"] = trained(folder / "handed", *run_options(folder), "train.total_steps=4")
        sharded = (folder / "sharded", *run_options(folder), "train.parallel=fsdp")
        outcomes["sharded_stopped"] = trained(*sharded, ask_to_stop=rank == 1)
        outcomes["sharded"] = trained(*sharded)
        tiny_run(folder / "grown", *run_options(folder, "grow"), "train.total_steps=2", "train.log_every=1")
        tiny_run(folder / "smaller", "train.total_steps=3")
        outcomes["scores"] = scored(folder, launch)
    draw(folder, NUM_PROCESSES)
    outcomes["undecided"] = refusal(lambda: launch.broadcast_from_main(fail))
    torch.save(outcomes, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of one process and of two; N.pt is what rank N of the two returned."""
    folder = tmp_path_factory.mktemp("processes")
    write_inputs(folder)
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        trained(folder / "handed", *run_options(folder), "train.total_steps=2")
        tiny_run(folder / "smaller", "train.total_steps=2")
        torch.multiprocessing.start_processes(process, (folder,), NUM_PROCESSES, start_method="forkserver")
        with redirect_stdout((folder / "said.txt").open("w")) as log, log:
            trained(folder / "handed", *run_options(folder))
        trained(folder / "one", *run_options(folder))
        grown = (*run_options(folder, "grow"), "train.total_steps=2", "train.log_every=1")
        tiny_run(folder / "grown_by_one", *grown)
        torch.save(scored(folder, Launch.of(PartialState(cpu=True))), folder / "scores_of_one.pt")
    return folder


@pytest.fixture(scope="module")
def outcomes(folder):
    """The results of the two ranks."""
    return [SimpleNamespace(**torch.load(folder / f"{rank}.pt")) for rank in range(NUM_PROCESSES)]


def assert_same_numbers(run, other):
    """Sums over processes are rounded differently, the rest is the same."""
    for line, of_other in zip(metrics(run), metrics(other), strict=True):
        assert line.keys() == of_other.keys()
        for key, value in line.items():
            expected = pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
            assert of_other[key] == expected, key


@pytest.mark.parametrize("run", ["whole", "handed"])
def test_two_processes_log_what_one_logs(folder, run):
    """`handed` was started by one process, resumed by two, and finished by one."""
    assert_same_numbers(folder / "one", folder / run)


@pytest.mark.parametrize("run", ["whole", "handed"])
@pytest.mark.parametrize("file", ["net", "ema"])
def test_two_processes_train_the_weights_of_one(folder, run, file):
    one, two = (load_file(latest_checkpoint(folder / name) / f"{file}.safetensors") for name in ("one", run))
    for name, tensor in one.items():
        close = {"rtol": 0, "atol": 1e-5, "msg": lambda text, name=name: f"{name}: {text}"}
        torch.testing.assert_close(two[name], tensor, **close)


def test_the_skipped_step_names_the_sample_at_fault(folder):
    trainer, run = tiny_trainer(folder / "asked", *run_options(folder))
    run.unlock()
    (skipped,) = metrics(folder / "whole")[1]["skipped_steps"]
    assert skipped["step"] == SPOILT_STEP + 1
    assert skipped["entries"][0] == trainer.batches.entries(SPOILT_STEP)[SPOILT_INDEX]


def test_all_processes_have_the_same_weights(outcomes):
    for name in ("whole", "stopped", "resumed", "handed"):
        assert len({getattr(of_one, name)[1] for of_one in outcomes}) == 1


def test_a_signal_to_one_process_stops_all_and_the_run_resumes_bitwise(folder, outcomes):
    assert [of_one.stopped[0] for of_one in outcomes] == ["SIGTERM"] * NUM_PROCESSES
    starts = json.loads((folder / "stopped/manifest.json").read_text())["starts"]
    assert [start["step"] for start in starts] == [0, STOPPED_STEP + 1]
    assert_same_run(folder / "whole", folder / "stopped")


def test_sharded_training_equals_ddp_bitwise(folder, outcomes):
    """With routes, masks, accumulation, a skipped step, a stop, uneven evaluations and pictures."""
    assert [of_one.sharded_stopped[0] for of_one in outcomes] == ["SIGTERM"] * NUM_PROCESSES
    assert {of_one.sharded for of_one in outcomes} == {of_one.whole for of_one in outcomes}
    assert metrics(folder / "sharded") == metrics(folder / "whole")
    files = [latest_checkpoint(folder / run) / "ema.safetensors" for run in ("sharded", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_resume_reports_another_number_of_processes(folder):
    starts = json.loads((folder / "handed/manifest.json").read_text())["starts"]
    assert [(start["step"], start["num_processes"]) for start in starts] == [(0, 1), (2, 2), (4, 1)]
    (change,) = starts[2]["changes"]
    assert change == "num_processes 2 -> 1: sums are rounded differently"
    assert f"changed    {change}\n" in (folder / "said.txt").read_text()


def test_micro_batches_that_new_processes_cannot_share_become_smaller(folder):
    start = json.loads((folder / "smaller/manifest.json").read_text())["starts"][1]
    change = "micro_batch_size 8 -> 4: noise, dropped labels and tokens differ from this step on"
    assert change in start["changes"]
    assert metrics(folder / "smaller")[-1]["step"] == 3


def test_windows_grow_equally_in_all_processes(folder):
    assert_same_numbers(folder / "grown_by_one", folder / "grown")


def test_two_processes_show_the_pictures_of_one(folder):
    files = [folder / run / "samples/step_00000006.png" for run in ("one", "whole")]
    ours, theirs = (np.asarray(Image.open(file)) for file in files)
    assert ours.std() > 10
    assert np.abs(ours.astype(int) - theirs).max() <= 1


@pytest.fixture(scope="module")
def drawn_by_one(folder):
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the two processes
    draw(folder, 1)
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.usefixtures("drawn_by_one")
def test_two_processes_draw_the_images_of_one_bit_for_bit(folder, name):
    one, two = (np.load(folder / f"{name}_by_{n}.npz") for n in (1, NUM_PROCESSES))
    assert one["arr_0"].std() > 10
    for array in ("arr_0", "arr_1"):
        assert np.array_equal(one[array], two[array])


def test_two_processes_score_as_one_and_rank_0_has_the_scores(folder, outcomes):
    one, num_seen = torch.load(folder / "scores_of_one.pt")
    names = ("fid", "sfid", "is", "precision", "recall", "kid", "kid_std")
    assert one.keys() == {f"{name}{NUM_IMAGES + 4}" for name in names}
    assert one[f"is{NUM_IMAGES + 4}"] > 1.5
    (scores, num_seen_by_first), (none, num_seen_by_second) = outcomes[0].scores, outcomes[1].scores
    assert scores == pytest.approx(one, rel=1e-6)
    assert none == {}
    assert num_seen_by_first + num_seen_by_second == num_seen == 2 * NUM_IMAGES + NUM_IMAGES + 4


def test_a_reference_keeps_the_order_of_its_images(folder):
    with np.load(folder / "reference.npz") as images, np.load(folder / "made_by_1.npz") as one:
        assert np.array_equal(one["arr_0"], images["arr_0"][evenly_spaced(NUM_IMAGES, NUM_KEPT)])
        with np.load(folder / "made_by_2.npz") as two:
            for name in one.files:
                close = np.array_equal if name in ("arr_0", "weights") else np.allclose
                assert close(one[name], two[name]), name


def test_a_failed_decision_ends_all_processes(outcomes):
    errors = ["MemoryError('none left')", "RuntimeError('process 0: MemoryError: none left')"]
    assert [of_one.undecided for of_one in outcomes] == errors
