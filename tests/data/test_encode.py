import os
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import ExifTags, Image

from data import KLEncoder, LatentWriter, centre_crop, encode, open_latents
from data.writer import lock_of
from runtime.errors import UserError
from runtime.lock import Busy
from runtime.machine import start_process
from runtime.parts import PartCache
from tests import programs
from tests.faults.killing import ENVIRONMENT, TWO
from tests.photos import photographs, write_autoencoder, write_photographs
from tests.runs import ROOT, composed

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    return write_autoencoder(tmp_path_factory.mktemp("vae") / "vae")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos") / "photos"
    write_photographs(folder)
    return folder


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(encode, "PART_IMAGES", 4)


@pytest.fixture
def written(monkeypatch):
    """The numbers of the parts in the order in which they are written."""
    numbers, write = [], PartCache.write

    def record_number(folder, number, part):
        write(folder, number, part)
        numbers.append(number)

    monkeypatch.setattr(PartCache, "write", record_number)
    return numbers


def options(source, out, vae, *overrides):
    return (f"source={source}", f"out={out}", f"encoder={vae}", "resolution=32", *map(str, overrides))


def run(source, out, vae, *overrides):
    encode.main(composed(*options(source, out, vae, *overrides), config_name="encode"))
    return open_latents(out)


def start(source, out, vae, **how):
    return programs.start("-m data.encode", *options(source, out, vae), check=False, **how)


def refused(out, source, vae, *overrides):
    """Encode with one corrupt image and return corrupt.txt."""
    with pytest.raises(UserError, match=r"1 of .* images are corrupt"):
        run(source, out, vae, *overrides)
    return Path(f"{out}.partial/corrupt.txt").read_text()


def files(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "manifest.json"}


def by_hand(vae, folder, name):
    """Compute the moments of a photograph and its flip without data.encode."""
    image = torch.from_numpy(np.asarray(centre_crop(Image.open(folder / name).convert("RGB"), 32)))
    pixels = image.permute(2, 0, 1)[None].float() / 127.5 - 1
    net = KLEncoder(vae, CPU).net
    both = [net.encode(x).latent_dist for x in (pixels, pixels.flip(-1))]
    return torch.stack([torch.cat([d.mean, d.logvar], dim=1)[0] for d in both])


def test_photographs_become_moments_of_both_flips(tmp_path, photos, vae, small_parts):
    dataset = run(photos, tmp_path / "out", vae, "num_held_out=2")
    manifest, names = dataset.manifest, sorted(str(f.relative_to(photos)) for f in photos.rglob("*.*"))
    assert (manifest.count, manifest.shape, manifest.num_held_out) == (10, (8, 16, 16), 2)
    assert (manifest.kind, manifest.dtype, manifest.hflip) == ("moments", "float16", True)
    assert (manifest.scale, manifest.shift, manifest.std, manifest.resolution) == (1.1, 0.0, 1.0, 32)
    assert (manifest.encoder, manifest.encoder_hash) == (vae, KLEncoder(vae, CPU).weights_hash)
    assert manifest.class_names == ("china", "flower")
    assert dataset.labels.tolist() == [0] * 5 + [1] * 5
    expected = torch.stack([by_hand(vae, photos, name) for name in names])  # (10, 2, 8, 16, 16)
    stored = torch.from_numpy(np.array(dataset.stored)).float()
    torch.testing.assert_close(stored, expected, rtol=2e-3, atol=2e-3)
    assert not torch.allclose(expected[:, 0].flip(-1), expected[:, 1], atol=0.05), "flips are encoded"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out"]
    assert manifest.origin["left_out"] == []
    assert manifest.origin["environment"]["versions"]["torch"] == torch.__version__.split("+")[0]


def test_latents_are_made_without_tf32(tmp_path, photos, vae, monkeypatch):
    """Also in a process that has trained before."""
    settings, encode_images = [], KLEncoder.encode

    def record_settings(self, images):
        settings.append((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))
        return encode_images(self, images)

    start_process()
    monkeypatch.setattr(KLEncoder, "encode", record_settings)
    run(photos, tmp_path / "out", vae, "hflip=false")
    assert set(settings) == {(False, False)}


def test_without_flips_there_are_none_and_one_in_a_hundred_is_held_out(tmp_path, photos, vae):
    dataset = run(photos, tmp_path / "out", vae, "hflip=false")
    assert dataset.stored.shape == (10, 8, 16, 16)
    assert dataset.manifest.num_held_out == 1
    fast = run(photos, tmp_path / "fast", vae, "hflip=false", "mixed_precision=bf16")
    assert not np.array_equal(fast.stored, dataset.stored)
    both = run(photos, tmp_path / "both", vae)
    np.testing.assert_allclose(dataset.stored, both.stored[:, 0], rtol=2e-3, atol=1e-3)


def test_a_stopped_job_resumes_and_ends_the_same(tmp_path, photos, vae, small_parts, written, monkeypatch):
    run(photos, tmp_path / "whole", vae)
    written.clear()
    encode_part = encode.encode_part

    def stop(*arguments):
        if len(written) == 1:
            raise KeyboardInterrupt
        return encode_part(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(encode, "encode_part", stop)
        run(photos, tmp_path / "out", vae)
    assert not (tmp_path / "out").exists()
    assert written == [0]
    run(photos, tmp_path / "out", vae)
    assert sorted(written) == [0, 1, 2], "finished parts are not encoded again"
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def stopped(folder, photos, vae, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(encode, "finish", lambda job, launch: None)
        encode.main(composed(*options(photos, folder / "out", vae), config_name="encode"))


def test_a_job_is_not_resumed_with_other_settings(tmp_path, vae, small_parts, monkeypatch):
    photos, new = tmp_path / "photos", tmp_path / "photos/china/new.png"
    write_photographs(photos)
    stopped(tmp_path, photos, vae, monkeypatch)
    for override, message in (
        ("hflip=false", "hflip: True -> False"),
        ("resolution=64", "resolution: 32 -> 64"),
        ("encoder=identity", "encoder: .* -> identity; encoder_hash: "),
        ("hflip=true", r"list_of_images: 10 images, .* -> 11 images"),
    ):
        if "list_of_images" in message:
            Image.fromarray(photographs()["china"]).save(new)
        rule = rf"out.partial was started with other settings \(.*{message}.*\): use those, or remove"
        with pytest.raises(UserError, match=rule):
            run(photos, tmp_path / "out", vae, override)
    new.unlink()
    assert run(photos, tmp_path / "out", vae).manifest.count == 10


def test_corrupt_images_are_listed_and_can_be_left_out_or_fixed(tmp_path, vae, small_parts, written, capsys):
    folder = tmp_path / "photos"
    write_photographs(folder)
    perfect = run(folder, tmp_path / "perfect", vae)
    whole = (folder / "china/001.jpg").read_bytes()
    (folder / "china/001.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "flower/002.png").write_text("not an image")
    for out in ("out", "fixed"):
        with pytest.raises(UserError, match=r"2 of 10 images are corrupt: .*skip_corrupt=true"):
            run(folder, tmp_path / out, vae)
    printed = capsys.readouterr().out
    assert "2 of 10 images are corrupt" in printed
    assert "china/001.jpg: " in printed and "flower/002.png: " in printed
    assert len((tmp_path / "out.partial" / "corrupt.txt").read_text().splitlines()) == 2
    assert not (tmp_path / "out").exists()
    left = run(folder, tmp_path / "out", vae, "skip_corrupt=true")
    good = [i for i in range(10) if i not in (1, 7)]
    assert left.labels.tolist() == perfect.labels[good].tolist() == [0] * 4 + [1] * 4
    np.testing.assert_allclose(left.stored, perfect.stored[good], rtol=2e-3, atol=1e-3)
    left_out = left.manifest.origin["left_out"]
    assert [line.partition(": ")[0] for line in left_out] == ["china/001.jpg", "flower/002.png"]
    assert "cannot identify image" in left_out[1]
    (folder / "china" / "001.jpg").write_bytes(whole)
    Image.fromarray(photographs()["flower"][:40, :40]).save(folder / "flower" / "002.png")
    written.clear()
    assert run(folder, tmp_path / "fixed", vae).manifest.count == 10
    assert written == [0, 1], "the part without corrupt images is kept"


def test_parts_and_sources_of_corrupt_images_only(tmp_path, vae, small_parts):
    folder = tmp_path / "photos"
    names = write_photographs(folder)
    # All images of the first part, and the first of the second: later labels stay with their images.
    for name in names[:5]:
        (folder / name).write_bytes(b"")
    assert run(folder, tmp_path / "out", vae, "skip_corrupt=true").labels.tolist() == [1] * 5
    for name in names:
        (folder / name).write_bytes(b"")
    with pytest.raises(UserError, match="10 of 10 images are corrupt"):
        run(folder, tmp_path / "none", vae, "skip_corrupt=true")
    assert not (tmp_path / "none").exists()


def test_modes_of_images_are_converted_and_16_bits_refused(tmp_path, vae):
    folder = tmp_path / "modes"
    folder.mkdir()
    image = Image.fromarray(photographs()["china"][:40, :40])
    for mode in ("L", "RGBA", "P", "CMYK", "1"):
        image.convert(mode).save(folder / f"{mode}.{'tif' if mode == 'CMYK' else 'png'}")
    assert run(folder, tmp_path / "out", vae).manifest.count == 5
    Image.fromarray(np.full((40, 40), 40_000, np.uint16)).save(folder / "sixteen.png")
    assert "must be RGB with 8 bits" in refused(tmp_path / "more", folder, vae)


def write_masks(folder, photos):
    """Write a random grey mask for each photograph."""
    rng = np.random.default_rng(0)
    for file in sorted(photos.rglob("*.*")):
        width, height = Image.open(file).size
        mask = rng.integers(0, 256, (height, width), dtype=np.uint8) * (rng.random((height, width)) < 0.1)
        target = folder / file.relative_to(photos).with_suffix(".png")
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask.astype(np.uint8)).save(target)
    return folder


@pytest.mark.parametrize("kind", ["mask", "segmentation"])
def test_masks_are_cropped_and_pooled_like_their_images(tmp_path, photos, vae, small_parts, kind):
    masks = write_masks(tmp_path / "masks", photos)
    dataset = run(photos, tmp_path / "out", vae, f"masks={masks}", f"conditioning_type={kind}")
    assert dataset.manifest.conditioning_type == kind
    assert dataset.masks.shape == (10, 16, 16)
    for i, file in enumerate(sorted(masks.rglob("*.png"))):
        mask = np.asarray(Image.open(file))
        if kind == "segmentation":
            mask = (mask > 0).astype(np.uint8) * 255
        cut = np.asarray(centre_crop(Image.fromarray(mask), 32)).reshape(16, 2, 16, 2).astype(float)
        if kind == "mask":
            assert np.abs(dataset.masks[i] - cut.mean(axis=(1, 3))).max() <= 0.5
        else:
            assert np.array_equal(dataset.masks[i] > 0, cut.max(axis=(1, 3)) > 0)
    assert 0 < dataset.masks.astype(bool).mean() < 1


@pytest.mark.parametrize("suffix", ["jpg", "tiff"])
def test_images_and_masks_are_encoded_as_viewers_show_them(tmp_path, suffix):
    """A mask painted on the displayed picture matches the image, in all combinations of formats."""
    shown = np.zeros((48, 32, 3), np.uint8)
    shown[12:18, 6:12] = 255  # near the top left, inside the crop
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # held upright: the picture is stored lying on its left side
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    Image.fromarray(np.rot90(shown).copy()).save(tmp_path / f"images/0.{suffix}", exif=exif)
    mask = Image.fromarray(shown[:, :, 0])
    for turned in (False, True):
        stored = Image.fromarray(np.rot90(shown[:, :, 0]).copy()) if turned else mask
        stored.save(tmp_path / "masks/0.png", exif=exif if turned else None)
        out = tmp_path / f"out{turned}"
        dataset = run(tmp_path / "images", out, "identity", f"masks={tmp_path / 'masks'}", "hflip=false")
        expected = np.asarray(centre_crop(mask, 32))
        assert np.abs(dataset.masks[0].astype(int) - expected).max() <= 1
        assert np.abs((dataset.stored[0, 1] + 1) * 127.5 - expected).mean() < 3
    stored.save(tmp_path / "masks/0.png")  # painted on the stored picture
    corrupt = refused(tmp_path / "more", tmp_path / "images", "identity", f"masks={tmp_path / 'masks'}")
    message = f"0.{suffix}: mask: size (48, 32) must be the image's (32, 48)"
    assert message in corrupt


def test_a_resolution_that_the_encoder_cannot_take_is_refused_and_nothing_is_written(tmp_path, photos, vae):
    with pytest.raises(UserError, match="resolution=33 must be a multiple of 2"):
        run(photos, tmp_path / "out", vae, "resolution=33")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_processes_and_a_resumed_job_write_the_same_files(tmp_path, vae):
    """Kill two processes after the first part, and resume with one."""
    photos = tmp_path / "photos"
    write_photographs(photos, per_class=320)
    assert start(photos, tmp_path / "one", vae).returncode == 0
    two = start(photos, tmp_path / "two", vae, num_processes=2)
    assert two.returncode == 0, two.stderr
    assert files(tmp_path / "two") == files(tmp_path / "one")
    partial = tmp_path / "out.partial"
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    command = [*TWO, "-m", "data.encode", *options(photos, tmp_path / "out", vae)]
    process = psutil.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    while not list(partial.glob("*.npz")):
        assert process.poll() is None, "it finished before it could be killed"
        time.sleep(0.01)
    # The launcher's processes outlive it for a moment.
    processes = [process, *process.children(recursive=True)]
    for child in processes:
        child.kill()
    psutil.wait_procs(processes)
    assert not (tmp_path / "out").exists()
    assert start(photos, tmp_path / "out", vae).returncode == 0
    assert files(tmp_path / "out") == files(tmp_path / "one")


def test_a_missing_source_is_not_reported_as_corrupt_images(tmp_path, vae, small_parts, monkeypatch):
    """Unmounting a disk half-way must not leave out half of the images."""
    write_photographs(tmp_path / "photos")
    write = PartCache.write

    def unmount(folder, number, part):
        write(folder, number, part)
        if (tmp_path / "photos").exists():
            (tmp_path / "photos").rename(tmp_path / "elsewhere")

    message = r"No such file .*; fix this and run the same command again to resume: '(china|flower)/\d+"
    with monkeypatch.context() as patch, pytest.raises(UserError, match=message):
        patch.setattr(PartCache, "write", unmount)
        run(tmp_path / "photos", tmp_path / "out", vae, "skip_corrupt=true")
    (tmp_path / "elsewhere").rename(tmp_path / "photos")
    assert run(tmp_path / "photos", tmp_path / "out", vae, "skip_corrupt=true").manifest.count == 10


def test_a_kill_while_parts_are_joined_loses_none(tmp_path, photos, vae, small_parts, written, monkeypatch):
    run(photos, tmp_path / "whole", vae)
    with monkeypatch.context() as patch:
        # A killed process does not clean up.
        patch.setattr("data.writer.shutil.rmtree", lambda *_, **__: None)
        patch.setattr(LatentWriter, "append", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(photos, tmp_path / "out", vae)
    assert (tmp_path / "out.partial" / ".joined.partial" / "latents.npy").exists()
    written.clear()
    run(photos, tmp_path / "out", vae)
    assert not written
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "whole"]


def test_a_second_encoder_names_the_first_and_exits(tmp_path, photos, vae):
    with lock_of(tmp_path / "out"), pytest.raises(UserError) as raised:
        run(photos, tmp_path / "out", vae)
    assert isinstance(raised.value.__cause__, Busy), "the program exits with TRY_AGAIN"
    assert str(raised.value).startswith(f"out={tmp_path}/out is in use by process {os.getpid()} on ")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_overwritten(tmp_path, photos, vae, monkeypatch):
    """Neither a folder from before, nor one that appears before the lock is acquired."""
    acquire = encode.Lock.acquire

    def late(lock):
        monkeypatch.undo()
        run(photos, tmp_path / "out", vae)
        return acquire(lock)

    monkeypatch.setattr(encode.Lock, "acquire", late)
    for hflip in ("true", "false"):
        with pytest.raises(UserError, match=r"out=.*out already exists: move it away, or choose another"):
            run(photos, tmp_path / "out", vae, f"hflip={hflip}")
    assert open_latents(tmp_path / "out").manifest.hflip
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_relative_and_absolute_paths_are_equal(tmp_path, photos, vae, small_parts, monkeypatch):
    stopped(tmp_path, photos, vae, monkeypatch)
    monkeypatch.chdir(photos.parent)
    assert run(f"{photos.name}/", tmp_path / "out", vae).manifest.encoder == vae
    monkeypatch.chdir(Path(vae).parent)
    assert run(photos, tmp_path / "again", "vae").manifest.encoder == vae, "the path is absolute"


def test_undecodable_names_and_lines_of_pixels_are_handled(tmp_path, vae):
    folder = tmp_path / "photos"
    folder.mkdir()
    Image.fromarray(photographs()["china"][:32, :32]).save(folder / "0.png")
    Image.fromarray(np.zeros((1, 4000, 3), np.uint8)).save(folder / "line.png")
    (folder / "0.png").rename(folder / os.fsdecode(b"\xff.png"))
    (folder / os.fsdecode(b"\xfe.png")).write_bytes(b"")
    dataset = run(folder, tmp_path / "out", vae, "skip_corrupt=true")
    assert dataset.manifest.count == 1
    line, undecodable = dataset.manifest.origin["left_out"]
    assert line == "line.png: image size (4000, 1): one side must be at most 50 times the other"
    assert undecodable.startswith(r"\udcfe.png: cannot identify image")
