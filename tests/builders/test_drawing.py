"""Drawing images: resolved options, resumed jobs, and cached parts."""

import json
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

import fid
import sample
from builders import drawing
from builders.drawing import COMPILE_SEC, LEFT_OPEN, Drawing, DrawOptions, ImageModel, start_drawing
from builders.evaluators import grid_of
from builders.scoring import ScoreConfig
from diffusion import CFG, EDMPrecond, SparseGuidance, edm_sampler
from evaluation import ArrayImages, Reference, Suite
from evaluation.metrics.kernel import KernelDistance
from evaluation.pictures import interleave_classes
from models import DiT
from runtime.errors import UserError
from runtime.files import sha256
from runtime.launch import ALONE
from runtime.machine import can_compile, has_fast_bf16
from runtime.parts import PartCache
from tests.inception import Projections
from tests.networks import PAPER, small_dit
from tests.runs import composed, tiny_run

LATENTS = Drawing.latents


def decode(latents):
    return (latents.permute(0, 2, 3, 1) * 50).clamp(0, 255).to(torch.uint8).numpy()


def model_of(net=None, guidance=None, num_steps=2):
    net = small_dit([PAPER]) if net is None else net
    sampler = partial(edm_sampler, num_steps=num_steps)
    classes = np.arange(net.num_classes)
    return ImageModel(EDMPrecond(net), sampler, guidance or CFG(), decode, ALONE.device, classes)


def test_the_request_wins_over_the_options_of_the_resumed_job():
    began = {"mixed_precision": "bf16", "batch_size": 7, "compile": False}
    request = {"mixed_precision": "no", "batch_size": 3, "compile": "true"}
    model, others = model_of(), {"num_samples": 10, "first_seed": 5, "labels": None, "class_label": 3}
    for given, saved, expected in (
        (LEFT_OPEN, began, began),
        (request, began, {**request, "compile": True}),
        (request, {}, {**request, "compile": True}),
        ({**LEFT_OPEN, "batch_size": 5}, began, {**began, "batch_size": 5}),
    ):
        assert DrawOptions.resolve({**others, **given}, model, saved, ALONE) == DrawOptions(
            **others, **expected
        )
    left = DrawOptions.resolve({**others, **LEFT_OPEN}, model, {}, ALONE)
    fast = "bf16" if has_fast_bf16(ALONE.device) else "no"
    assert (left.mixed_precision, left.batch_size, left.compile) == (fast, 256, False)


def test_a_batch_on_a_cpu_has_about_as_many_tokens_whatever_the_network():
    for patch_size, num_images in ((1, 64), (2, 256), (4, 1024)):
        net = DiT(8, patch_size, 3, 16, 1, 2, num_classes=10)
        assert model_of(net).default_batch_size(bf16=False) == num_images == 4096 // net.num_tokens


def test_blocks_are_compiled_if_this_saves_time(monkeypatch):
    model = model_of(num_steps=10)
    if not can_compile(ALONE.device):
        pytest.skip("no compiler, or no headers of Python")
    first, _ = COMPILE_SEC["cpu"]
    flops = 19 * model.precond.net.flops([model.precond.net.num_tokens]).forward
    rate = drawing.FLOPS_PER_SEC["cpu"] * drawing.cpu_count()
    just = int(first / drawing.SAVED_SHARE["cpu"] * rate / flops)
    assert [model.is_worth_compiling(n) for n in (just, just + 2)] == [False, True]
    # A second length takes longer to compile, and costs less.
    assert model_of(guidance=SparseGuidance(2.0), num_steps=10).num_lengths == 2
    monkeypatch.setattr(drawing, "can_compile", lambda device: False)
    assert not model.is_worth_compiling(10**9)


def test_evaluations_are_counted_without_running_the_network():
    model = model_of(guidance=CFG(2.0), num_steps=3)
    net = model.precond.net
    with mock.patch.object(net, "forward", side_effect=AssertionError("ran")):
        assert model.evaluations == Counter({(net, (net.num_tokens,)): 10})


def test_a_sample_that_is_not_finite_is_named():
    class Broken(CFG):
        def __call__(self, strong):
            is_bad = strong.class_labels.view(-1, 1, 1, 1) == 2
            return lambda x, t, with_variance: torch.where(is_bad, torch.nan, x)

    images = Drawing(model_of(guidance=Broken()), DrawOptions(8, 2, first_seed=100))
    with pytest.raises(ValueError, match=r"the sample of seed 102 is not finite \(the network ran in fp32\)"):
        list(images.batches(2, range(4)))
    assert [len(part.images) for part in images.batches(2, [0])] == [2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawing") / "run"
    tiny_run(folder, "data.in_channels=3", "sampler.num_steps=2", "model.init=xavier", "data.num_classes=3")
    return folder


def ask(run, output, *overrides):
    options = ("num_samples=10", "batch_size=3", "mixed_precision=no", f"out={output}", *overrides)
    sample.main(composed(f"run={run}", *options, config_name="sample"))


class Stopped(Exception):
    """Like a kill: nothing handles it."""


def stop_after(num_parts):
    """Draw `num_parts` parts and stop at the next one; collect the parts."""
    calls = []

    def latents(self, part):
        calls.append(part)
        if len(calls) > num_parts:
            raise Stopped
        return LATENTS(self, part)

    return mock.patch("builders.drawing.Drawing.latents", latents), calls


def stopped(run, output, num_parts, *overrides):
    patch, _ = stop_after(num_parts)
    with patch, pytest.raises(Stopped):
        ask(run, output, *overrides)


ADAPTIVE = ("sampler=dopri5", "guidance=none")  # steps take the evaluations that the images of a part need


@pytest.mark.parametrize(
    ("num_parts", "options"), [(1, ()), (3, ()), pytest.param(2, ADAPTIVE, marks=pytest.mark.slow)]
)
def test_a_stopped_job_resumes_and_gives_the_same_file(run, tmp_path, num_parts, options):
    ask(run, tmp_path / "whole.npz", *options)
    stopped(run, tmp_path / "s.npz", num_parts, *options)
    assert {path.name for path in tmp_path.glob("s.*")} == {"s.npz.partial"}
    assert len(list(tmp_path.glob("s.npz.partial/0*.npz"))) == num_parts
    patch, calls = stop_after(4)
    with patch, mock.patch("sys.argv", ["sample.py", "the", "same", "in", "other", "words"]):
        ask(run, tmp_path / "s.npz", *options, "grid_columns=10", "overwrite=true")
    assert calls == list(range(num_parts, 4))
    for suffix in (".npz", ".png"):
        files = (tmp_path / f"{name}{suffix}" for name in ("whole", "s"))
        assert len({file.read_bytes() for file in files}) == 1
    records = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "s")]
    assert records[0]["cost_per_image"] == records[1]["cost_per_image"]
    assert records[0]["samples_sha256"] == records[1]["samples_sha256"]
    assert (records[0]["cost_per_image"]["network_evaluations"] > 10) == (options == ADAPTIVE)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.slow
def test_parts_of_another_job_are_not_mixed_in(run, tmp_path):
    stopped(run, tmp_path / "s.npz", 1)
    with pytest.raises(UserError, match=r"other settings \(first_seed: 0 -> 5\): .*overwrite=true starts"):
        ask(run, tmp_path / "s.npz", "first_seed=5")
    with (
        mock.patch("builders.drawing.source_sha256", lambda: "edited"),
        pytest.raises(UserError, match=r"other settings \(code: .* -> edited\)"),
    ):
        ask(run, tmp_path / "s.npz")
    ask(run, tmp_path / "s.npz", "first_seed=5", "overwrite=true")
    ask(run, tmp_path / "other.npz", "first_seed=5")
    assert (tmp_path / "s.npz").read_bytes() == (tmp_path / "other.npz").read_bytes()


@pytest.mark.parametrize(("overwrite", "hint"), [(None, "remove the folder"), (False, "overwrite=true")])
def test_the_error_for_parts_of_another_job_names_a_remedy_that_the_program_has(tmp_path, overwrite, hint):
    other = PartCache(tmp_path / "parts", {"weights": "others"}, 10, 5)
    other.start()
    other.write(0, {"images": np.zeros(1)})
    record = {"num_samples": 10, "first_seed": 0, "labels": "random", "class_label": None, **LEFT_OPEN}
    job = (tmp_path / "parts", {"weights": "these"}, ALONE)
    with pytest.raises(ValueError, match=f"started with other settings .*: use those, or {hint}"):
        start_drawing(model_of(), record, *job, overwrite)[1].start()


@pytest.mark.slow
def test_parts_of_another_job_do_not_set_options(run, tmp_path):
    stopped(run, tmp_path / "s.npz", 1, "batch_size=9", "mixed_precision=bf16")
    (tmp_path / "s.npz.partial/about.json").write_text("{")
    with pytest.raises(UserError, match=r"about.json is damaged"):
        ask(run, tmp_path / "s.npz", "first_seed=2")
    with (
        mock.patch("builders.drawing.ImageModel.default_batch_size", lambda *_: 7),
        mock.patch("builders.drawing.has_fast_bf16", lambda device: False),
    ):
        left_open = ("batch_size=null", "mixed_precision=auto", "num_samples=300")
        ask(run, tmp_path / "s.npz", *left_open, "overwrite=true", "first_seed=2")
    record = json.loads((tmp_path / "s.json").read_text())
    assert (record["batch_size"], record["mixed_precision"]) == (7, "no")


def test_a_job_without_parts_is_replaced(run, tmp_path):
    """Such as after a full disk, or a first sample that is not finite."""
    stopped(run, tmp_path / "s.npz", 0)
    assert list(tmp_path.iterdir()) == []
    folder = PartCache(tmp_path / "p", {"a": 1}, 2, 1)
    folder.start()
    assert PartCache(tmp_path / "p", {"a": 2}, 2, 1).start() == [0, 1]
    PartCache(tmp_path / "p", {"a": 2}, 2, 1).write(0, {"x": np.zeros(1)})
    # Disk space is needed for missing parts; parts of another job count as missing.
    assert [PartCache(tmp_path / "p", {"a": a}, 2, 1).missing() for a in (2, 3)] == [[1], [0, 1]]
    (tmp_path / "link").symlink_to(tmp_path / "p")
    with pytest.raises(ValueError, match=r"link is a link, must be a folder: remove it"):
        PartCache(tmp_path / "link", {"a": 2}, 2, 1).start()


@pytest.mark.parametrize("moment", ["sample.write_json", "runtime.parts.PartCache.remove"])
def test_a_kill_while_parts_are_joined_is_mended_by_the_same_command(run, tmp_path, moment):
    ask(run, tmp_path / "whole.npz")
    with mock.patch(moment, side_effect=Stopped), pytest.raises(Stopped):
        ask(run, tmp_path / "s.npz")
    assert (tmp_path / "s.npz").exists() == moment.endswith("remove")
    with mock.patch("builders.drawing.generate", side_effect=AssertionError("drawn again")):
        ask(run, tmp_path / "s.npz")
    assert not (tmp_path / "s.npz.partial").exists()
    assert (tmp_path / "s.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
    assert json.loads((tmp_path / "s.json").read_text())["samples_sha256"] == sha256(tmp_path / "s.npz")
    with pytest.raises(UserError, match=r"s.npz already exists"):
        ask(run, tmp_path / "s.npz")


@pytest.mark.slow
def test_a_damaged_part_is_drawn_again(run, tmp_path):
    ask(run, tmp_path / "whole.npz")
    stopped(run, tmp_path / "s.npz", 2)
    part = tmp_path / "s.npz.partial/0000001.npz"
    content = bytearray(part.read_bytes())
    content[len(content) // 3] ^= 1
    part.write_bytes(content)
    with pytest.raises(UserError, match=r"0000001.npz was damaged .* and has been removed: run the same "):
        ask(run, tmp_path / "s.npz", "grid_columns=1")
    ask(run, tmp_path / "s.npz", "grid_columns=1")
    assert (tmp_path / "s.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()


def test_too_little_disk_space_is_an_error_before_any_image(run, tmp_path):
    room = mock.Mock(free=1000)
    with (
        mock.patch("shutil.disk_usage", lambda path: room),
        pytest.raises(UserError, match=r"out=.*s\.npz needs 0\.0 GiB while it is written, 0\.0 are free"),
    ):
        ask(run, tmp_path / "s.npz")


def test_a_picture_grows_while_images_are_drawn(run, tmp_path):
    shown = []
    write = PartCache.write

    def watched(self, i, arrays):
        write(self, i, arrays)
        picture = self.path / "grid.png"
        shown.append(np.asarray(Image.open(picture)) if picture.exists() else None)

    with mock.patch.object(PartCache, "write", watched):
        ask(run, tmp_path / "s.npz", "labels=balanced")
    last = np.asarray(Image.open(tmp_path / "s.png"))
    assert shown[0] is None
    num_dark = [int((picture == 0).all(axis=-1).sum()) for picture in (*shown[1:], last)]
    assert num_dark == sorted(num_dark, reverse=True)
    assert num_dark[0] > num_dark[-1]
    tiles = [picture[16:80, 2:66] for picture in (shown[1], last)]
    assert np.array_equal(*tiles), "an image stays in its place"
    with np.load(tmp_path / "s.npz") as arrays:
        images, order = arrays["arr_0"], interleave_classes(arrays["arr_1"])
    for place, i in enumerate(order):
        assert np.array_equal(last[16:80:8, 68 * place + 2 : 68 * place + 66 : 8], images[i])


@pytest.fixture
def scored(run, tmp_path, monkeypatch):
    """Return a function that scores a run as fid.py does, and the batch sizes that its detector gets."""
    seen = []

    class Watching(Projections):
        def __call__(self, images):
            seen.append(len(images))
            return super().__call__(images)

    monkeypatch.setattr("evaluation.adm.InceptionDetector", lambda *_: Watching())
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "reference.npz", rng.integers(0, 256, (17, 8, 8, 3), dtype=np.uint8))
    base = (f"reference={tmp_path / 'reference.npz'}", f"weights={tmp_path / 'weights.pth'}")
    options = (f"run={run}", "num_samples=10", "batch_size=3", "mixed_precision=no")
    options += (f"features={tmp_path / 'features'}",)

    def score(name, *overrides):
        out = f"out={tmp_path / name}.json"
        fid.main(composed(*base, *options, out, *overrides, config_name="fid"))
        return json.loads((tmp_path / f"{name}.json").read_text())

    return score, seen


def test_a_stopped_score_resumes(scored, tmp_path):
    score, seen = scored
    whole = score("whole")
    assert sum(seen) == 10 + 17
    (kept,) = (tmp_path / "features").glob("drawn-*")
    for part in (1, 2):
        (kept / f"000000{part}.npz").unlink()
    seen.clear()
    patch, calls = stop_after(1)
    with patch, pytest.raises(Stopped):
        score("again")
    assert (calls, seen) == ([1, 2], [3])
    assert not (tmp_path / "again.json").exists()
    seen.clear()
    again = score("again")
    assert seen == [3], "of the last part; the others are cached"
    for key in ("values", "images_sha256", "cost_per_image", "samples"):
        assert again[key] == whole[key]


@pytest.mark.slow
def test_metrics_and_checkpoints_share_cached_features(scored):
    score, seen = scored
    score("few", "precision_recall=false")
    seen.clear()
    with mock.patch("builders.drawing.Drawing.latents", autospec=True, side_effect=LATENTS) as latents:
        more = score("more", "kid=true")
    assert (seen, latents.call_count) == ([], 0)
    assert {"precision10", "kid10"} <= more["values"].keys()
    seen.clear()
    other = score("other", "checkpoint=4")
    assert sum(seen) == 10, "the features of the reference are cached"
    assert other["images_sha256"] != more["images_sha256"]


@pytest.mark.slow
def test_features_of_other_code_another_batch_or_another_network_are_not_used(run, scored, tmp_path):
    score, seen = scored
    score("a")
    seen.clear()
    with mock.patch("evaluation.suite.source_sha256", lambda: "edited"):
        score("b")
    assert sum(seen) == 10 + 17
    seen.clear()
    score("c", "detector_batch_size=2")
    assert (sum(seen), max(seen)) == (17, 2), "what was drawn is in parts of its own"
    config = shutil.copytree(run, tmp_path / "other") / "config.yaml"
    config.write_text(config.read_text().replace("sigma_data: 0.5", "sigma_data: 0.9"))
    seen.clear()
    record = score("d", f"run={config.parent}")
    assert sum(seen) == 10
    assert record["samples"]["drawn"]["networks"][0]["diffusion"]["precond"]["sigma_data"] == 0.9


def test_features_depend_on_the_arguments_of_a_detector():
    reference = Reference(images=ArrayImages(np.zeros((9, 4, 4, 3), np.uint8)))
    paths = set()
    for factor in (1, 2):
        request = {"num_samples": 5, "labels": "random", "launch": ALONE, "batch_size": 3}
        request |= {"metrics": {"k": KernelDistance()}, "features": Path("x")}
        suite = Suite(reference, detector=Projections(), **request)
        suite.detector_config = {"factor": factor}
        paths.add(suite.cache("samples", {}, reference.images).path)
    assert len(paths) == 2


def test_a_features_folder_inside_the_images_is_refused(tmp_path):
    request = ScoreConfig(images=str(tmp_path / "photos"))
    with pytest.raises(ValueError, match=r"features=.*photos/features must not be inside images=.*photos"):
        request.features_folder(tmp_path / "photos/reference.npz")
    assert request.features_folder(tmp_path / "reference.npz") == tmp_path / "features"
    (tmp_path / "features").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r"features is a link, must be a folder: give features=FOLDER"):
        request.features_folder(tmp_path / "reference.npz")


def test_a_picture_of_a_training_has_about_ten_samples_and_each_class():
    grids = {0: (10, 10), 1: (10, 10), 3: (9, 9), 6: (12, 6), 10: (10, 10), 37: (37, 10), 101: (10, 10)}
    assert {num_classes: grid_of(num_classes) for num_classes in grids} == grids
