import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data import (
    IdentityEncoder,
    LatentDataset,
    LatentManifest,
    LatentWriter,
    digits,
    open_latents,
    real_images,
    to_uint8,
)
from tests.runs import ROOT

SIZES = {"input_size": 8, "in_channels": 4, "num_classes": 5}
MANIFEST = LatentManifest(20, (4, 8, 8), "float16", "samples", 5, "identity")
HELD_OUT_OF_20 = [2, 4, 6, 13, 16, 19]


def write(path, kind="samples", count=20, **changes):
    """Write a folder of random latents and return what it holds."""
    rng = np.random.default_rng(0)
    shape = (8 if kind == "moments" else 4, 8, 8)
    stored = rng.standard_normal((count, *shape)).astype(np.float16)
    labels = rng.integers(0, 5, count)
    with LatentWriter(path, replace(MANIFEST, count=count, shape=shape, kind=kind, **changes)) as writer:
        writer.append(stored[:13], labels[:13])
        writer.append(stored[13:], labels[13:])
    return stored, labels


def test_what_is_written_is_read(tmp_path):
    stored, labels = write(tmp_path / "a", num_held_out=6)
    dataset = open_latents(str(tmp_path / "a"), **SIZES)
    ids = np.array([3, 17, 3, 0])
    got, got_labels = dataset.read(ids)
    assert np.array_equal(got.numpy(), stored[ids])
    assert got_labels.tolist() == labels[ids].tolist()
    assert isinstance(dataset.stored, np.memmap)
    assert dataset.held_out_ids.tolist() == HELD_OUT_OF_20, "for everyone, and for ever"
    together = np.sort(np.concatenate([dataset.train_ids, dataset.held_out_ids]))
    assert len(dataset.held_out_ids) == 6
    assert np.array_equal(together, np.arange(20))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_classes_without_entries_to_train_on_are_known():
    labels = np.full(20, 3)
    labels[HELD_OUT_OF_20] = 1  # only held out
    dataset = LatentDataset(np.zeros((20, 4, 8, 8)), labels, replace(MANIFEST, num_held_out=6))
    assert dataset.manifest.untrained_classes == (0, 1, 2, 4)
    assert dataset.describe()["manifest"]["untrained_classes"] == (0, 1, 2, 4)
    assert LatentDataset(dataset.stored, labels, MANIFEST).manifest.untrained_classes == (0, 2, 4)


def test_moments_are_sampled_anew():
    manifest = LatentManifest(20, (2, 8, 8), "float16", "moments", 0, "identity", scale=0.5)
    assert manifest.in_channels == 1
    mean, logvar = torch.full((20_000, 1, 8, 8), 3.0), torch.full((20_000, 1, 8, 8), -1.0)
    generator = torch.Generator().manual_seed(0)
    first, second = (manifest.to_latents(torch.cat([mean, logvar], dim=1), generator) for _ in range(2))
    assert not torch.equal(first, second)
    assert abs(first.mean() - 1.5) < 0.01
    # std = exp(logvar / 2) * scale
    assert abs(first.std() - np.exp(-0.5) * 0.5) < 0.01
    draws, again = (
        manifest.to_latents(torch.zeros(6, 2, 8, 8), torch.Generator().manual_seed(0)) for _ in range(2)
    )
    assert draws.shape == (6, 1, 8, 8)
    assert len(draws.unique()) > 0.99 * draws.numel(), "every number of every entry has a draw of its own"
    assert torch.equal(again, draws)


def test_unconditional_folders_have_no_labels(tmp_path):
    manifest = LatentManifest(3, (1, 4, 4), "float32", "samples", 0, "identity")
    with LatentWriter(tmp_path / "a", manifest) as writer:
        writer.append(np.zeros((3, 1, 4, 4), np.float32), None)
    dataset = open_latents(tmp_path / "a")
    assert dataset.read(np.array([1]))[1] is None


STORED, LABELS, MASKS = np.zeros((3, 4, 8, 8)), np.zeros(3, int), np.zeros((3, 8, 8), np.uint8)


def test_the_position_of_a_wrong_label_counts_from_the_first_entry(tmp_path):
    message = r"label 7 at position 4 must be in \[0, 4\]"
    with pytest.raises(ValueError, match=message), LatentWriter(tmp_path / "a", MANIFEST) as writer:
        writer.append(STORED, LABELS)
        writer.append(STORED, np.array([0, 7, 0]))


@pytest.mark.parametrize(
    ("conditioning_type", "entries", "message"),
    [
        (None, (STORED, LABELS[:1]), r"labels int64 \(1,\), must be .* labels int64 \(3,\)"),
        (None, (STORED, None), r"entries 0..2 are latents float16 \(3, 4, 8, 8\), must be .*, labels int64"),
        (None, (STORED[..., :7], LABELS), r"latents float16 \(3, 4, 8, 7\), .* must be latents"),
        (None, (STORED + 1e6, LABELS), "not finite in float16"),
        (None, (STORED, np.array([0, 4, 5])), r"label 5 at position 2 must be in \[0, 4\]"),
        (None, (STORED[:2], LABELS[:2]), "2 entries written, the manifest promises 3"),
        (None, (STORED, LABELS, MASKS), r"masks uint8 \(3, 8, 8\), must be"),
        ("mask", (STORED, LABELS), r"must be .*, masks uint8 \(3, 8, 8\)"),
        ("mask", (STORED, LABELS, MASKS[:, :4, :4]), r"masks uint8 \(3, 4, 4\), must be"),
        ("segmentation", (STORED, LABELS, MASKS.astype(float)), r"masks float64 \(3, 8, 8\), must be"),
    ],
)
def test_entries_that_do_not_fit_are_refused_and_leave_nothing(tmp_path, conditioning_type, entries, message):
    manifest = replace(MANIFEST, count=3, conditioning_type=conditioning_type)
    with pytest.raises(ValueError, match=message), LatentWriter(tmp_path / "a", manifest) as writer:
        writer.append(*entries)
    assert not list(tmp_path.iterdir())


def test_a_worker_process_gets_the_file_and_not_its_content(tmp_path):
    stored, _ = write(tmp_path / "a")
    pickled = pickle.dumps(open_latents(str(tmp_path / "a"), **SIZES))
    assert len(pickled) < stored.nbytes / 2
    assert np.array_equal(pickle.loads(pickled).read(np.arange(20))[0].numpy(), stored)


def change(**changes):
    """Changes of the manifest of a folder."""

    def apply(folder):
        file = folder / "manifest.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return apply


def put_labels(labels):
    return lambda folder: np.save(folder / "labels.npy", labels)


def cut_latents(num_bytes):
    return lambda folder: os.truncate(folder / "latents.npy", num_bytes)


def remove(name):
    return lambda folder: (folder / name).unlink()


# What bytes may contain, and what no manifest may say, is in tests/test_outside.py and below.
@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (remove("manifest.json"), FileNotFoundError, r"data\.path=.* must be a latent"),
        (remove("latents.npy"), FileNotFoundError, r"latents\.npy is missing"),
        (remove("labels.npy"), FileNotFoundError, r"labels\.npy is missing"),
        (change(conditioning_type="mask"), FileNotFoundError, r"masks\.npy is missing"),
        (cut_latents(10_000), ValueError, r"latents\.npy is truncated"),
        (cut_latents(0), ValueError, r"latents\.npy is truncated"),
        (put_labels(np.full(20, 5)), ValueError, r"labels\.npy: label 5 at position 0 must be in \[0, 4\]"),
        (
            put_labels(np.zeros(19, int)),
            ValueError,
            r"holds int64 \(19,\), the manifest promises int64 \(20,\)",
        ),
        (change(count=21), ValueError, r"latents\.npy holds float16 \(20, 4, 8, 8\), the manifest"),
        (change(dtype="float32"), ValueError, r"the manifest promises float32"),
        (change(num_classes=4), ValueError, r"data\.num_classes=5 must be 4, as in"),
        (change(shape=[4, 16, 16]), ValueError, r"data\.input_size=8 must be 16, as in"),
        (change(surprise=1), ValueError, "manifest.json is not a latent manifest: .*surprise"),
    ],
)
def test_a_damaged_folder_is_one_clear_error(tmp_path, damage, error, message):
    write(tmp_path / "a")
    damage(tmp_path / "a")
    with pytest.raises(error, match=message):
        open_latents(str(tmp_path / "a"), **SIZES)


def test_digits_go_through_the_format_and_come_back(tmp_path):
    from sklearn.datasets import load_digits

    source = load_digits()
    dataset = digits(str(tmp_path / "digits"), input_size=8, in_channels=1, num_classes=10)
    images, labels = real_images(dataset, np.arange(1797), IdentityEncoder())
    assert np.array_equal(images[..., 0], np.rint(source.images * 255 / 16))
    assert np.array_equal(labels, source.target)
    assert (len(dataset.train_ids), len(dataset.held_out_ids)) == (1500, 297)
    latents = dataset.manifest.to_latents(dataset.read(dataset.train_ids)[0])
    assert abs(latents.mean()) < 0.01
    assert abs(latents.std() - 0.5) < 0.01
    again = digits(str(tmp_path / "digits"), input_size=8, in_channels=1, num_classes=10)
    assert again.describe() == dataset.describe()


def test_real_images_of_moments_are_those_of_their_means():
    manifest = LatentManifest(3, (2, 4, 4), "float32", "moments", 0, "identity", scale=0.5, shift=0.1)
    pixels = np.linspace(-1, 1, 48, dtype=np.float32).reshape(3, 1, 4, 4)
    dataset = LatentDataset(np.concatenate([pixels, np.zeros_like(pixels)], axis=1), None, manifest)
    images, labels = real_images(dataset, np.arange(3), IdentityEncoder())
    assert labels is None
    assert np.array_equal(images, to_uint8(torch.from_numpy(pixels)).permute(0, 2, 3, 1).numpy())


def test_bytes_survive_the_identity_encoder_and_the_rounding_rule():
    every_byte = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    encoder = IdentityEncoder()
    assert torch.equal(to_uint8(encoder.decode(encoder.encode(every_byte).half().float())), every_byte)
    # 127.5 x + 128, truncated: the middle rounds up, and what lies outside [-1, 1] is clamped.
    assert to_uint8(torch.tensor([-2.0, -1.0, 0.0, 0.996, 1.0, 2.0])).tolist() == [0, 0, 128, 254, 255, 255]


def write_masked(path, conditioning_type="mask", masks=None):
    """Write six entries with masks and return the masks."""
    manifest = replace(MANIFEST, count=6, num_classes=0, conditioning_type=conditioning_type)
    if masks is None:
        masks = np.random.default_rng(0).integers(0, 256, (6, 8, 8), dtype=np.uint8)
    with LatentWriter(path, manifest) as writer:
        writer.append(np.zeros((4, 4, 8, 8)), None, masks[:4])
        writer.append(np.zeros((2, 4, 8, 8)), None, masks[4:])
    return masks


@pytest.mark.parametrize("conditioning_type", ["mask", "segmentation"])
def test_masks_are_weights_and_segmentations_are_all_or_nothing(tmp_path, conditioning_type):
    masks = write_masked(tmp_path / "a", conditioning_type)
    dataset = open_latents(tmp_path / "a")
    weights = dataset.read_masks(np.array([5, 0, 5]))
    expected = masks[[5, 0, 5]] / 255 if conditioning_type == "mask" else masks[[5, 0, 5]] > 0
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-6)
    assert weights.dtype == torch.float32
    restored = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(restored.read_masks(np.array([5, 0, 5])), weights)
    assert isinstance(restored.masks, np.memmap)


def test_the_foreground_of_the_digits_is_their_mask(tmp_path):
    dataset = digits(str(tmp_path / "digits"), 8, 1, 10, foreground_masks=True)
    images, _ = real_images(dataset, np.arange(50), IdentityEncoder())
    assert np.array_equal(dataset.read_masks(np.arange(50)).numpy() > 0, images[..., 0] > 0)
    assert digits(str(tmp_path / "plain"), 8, 1, 10).masks is None


def write_flipped(path, count=12, **changes):
    """Entries whose every number is that of their entry, and 100 more in the flip; masks of one pixel."""
    fields = {"hflip": True, "conditioning_type": "mask", **changes}
    manifest = LatentManifest(count, (4, 8, 8), "float16", "samples", 3, "identity", **fields)
    stored = np.arange(count)[:, None, None, None, None] + np.array([0, 100])[None, :, None, None, None]
    masks = np.zeros((count, 8, 8), np.uint8)
    masks[:, 2, 1] = 255
    with LatentWriter(path, manifest) as writer:
        writer.append(np.broadcast_to(stored, manifest.stored_shape), np.arange(count) % 3, masks)
    return open_latents(path)


def test_flips_are_read_on_request_with_their_masks(tmp_path):
    dataset = write_flipped(tmp_path / "a", num_held_out=4)
    ids = np.array([7, 0, 7, 3])
    stored, labels = dataset.read(ids, np.array([1, 0, 0, 1]))
    assert stored[:, 0, 0, 0].tolist() == [107, 0, 7, 103]
    assert labels.tolist() == [1, 0, 1, 0]
    assert dataset.read(ids)[0][:, 0, 0, 0].tolist() == [7, 0, 7, 3], "images unless asked otherwise"
    assert stored.shape == (4, 4, 8, 8)
    assert dataset.read_masks(ids[:2], np.array([0, 1])).nonzero().tolist() == [[0, 2, 1], [1, 2, 6]]
    assert dataset.read_masks(ids[:1]).nonzero().tolist() == [[0, 2, 1]]
    # An image and its flip are one entry: no flip of a held-out image is trained on.
    assert set(dataset.held_out_ids).isdisjoint(dataset.train_ids)
    assert len(dataset.train_ids) == 8


def test_means_are_what_moments_are_sampled_around():
    manifest = LatentManifest(20, (2, 8, 8), "float16", "moments", 0, "identity", scale=0.5, shift=1.0)
    mean, logvar = torch.randn(3, 1, 8, 8), torch.full((3, 1, 8, 8), -40.0)
    torch.testing.assert_close(manifest.to_means(torch.cat([mean, logvar], dim=1)), (mean - 1.0) * 0.5)
    torch.testing.assert_close(manifest.to_latents(torch.cat([mean, logvar], dim=1)), (mean - 1.0) * 0.5)


def test_a_channel_may_have_a_scale_and_a_shift_of_its_own(tmp_path):
    write(tmp_path / "a", scale=(0.5, 1.0, 2.0, 4.0), shift=(1.0, 0.0, -1.0, 0.5))
    manifest = open_latents(str(tmp_path / "a"), **SIZES).manifest
    assert manifest.scale == (0.5, 1.0, 2.0, 4.0)
    stored = torch.randn(2, 4, 8, 8)
    seen = manifest.to_latents(stored)
    torch.testing.assert_close(seen[:, 2], (stored[:, 2] + 1.0) * 2.0)
    torch.testing.assert_close(seen[:, 3], (stored[:, 3] - 0.5) * 4.0)
    torch.testing.assert_close(manifest.to_encoder(seen), stored)


@pytest.mark.parametrize(
    ("std", "warned"), [(1.0, False), (0.6, False), (1.7, False), (0.18, True), (5.5, True), (0.5, True)]
)
def test_a_standard_deviation_far_from_the_promised_one_warns(std, warned):
    manifest = replace(MANIFEST, scale=0.18215, std=1.0)
    warning = manifest.std_warning(torch.tensor(std))
    assert bool(warning) == warned
    if warned:
        assert f"standard deviation of {std:.3g}, the manifest promises 1." in warning
        assert f"set scale {0.18215 / std:.4g} in manifest.json" in warning
    assert MANIFEST.std_warning(torch.tensor(9.0)) is None, "nothing was promised"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "mean"}, "kind='mean' must be one of samples, moments"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16' must be one of float16, float32"),
        ({"format_version": 99}, "format_version=99 must be 1"),
        ({"scale": "0.18"}, "scale='0.18' must be a number other than 0"),
        ({"scale": 0}, "scale=0 must be a number other than 0"),
        ({"num_held_out": 20}, r"num_held_out=20 must be in \[0, 19\]"),
        ({"scale": (1.0, 2.0)}, r"scale=\(1.0, 2.0\) must be a number other than 0, or one for each of 4"),
        ({"scale": (1.0, 2.0, 0.0, 1.0)}, "must be a number other than 0"),
        ({"shift": float("nan")}, "shift=nan must be a number, or one for each"),
        ({"scale": True}, "scale=True must be a number"),
        ({"std": 0.0}, "std=0.0 must be a number greater than 0, or null"),
        ({"pixel_range": (1.0, 1.0)}, "must be two numbers: what black is, and what white is"),
        ({"class_names": (1, 2, 3, 4, 5)}, r"class_names=\(1, 2, 3, 4, 5\) must be texts"),
        ({"class_names": ("a", "b")}, "class_names has 2 names, must be num_classes=5"),
        ({"block_bytes": 0}, "block_bytes=0 must be greater than 0"),
        ({"num_classes": -1}, r"num_classes=-1 must be in \[0, 1000000\]"),
        ({"num_held_out": 3.0}, r"num_held_out=3.0 must be in \[0, 19\]"),
        ({"encoder": None}, "encoder=None must be a name"),
        ({"encoder_hash": 5}, "encoder_hash=5 must be a hash or null"),
        ({"hflip": "x"}, "hflip='x' must be true or false"),
        ({"resolution": "x"}, "resolution='x' must be greater than 0, or null"),
        ({"checksums": {"latents.npy": "abc"}}, "checksums of 'latents.npy' must be a list of hashes"),
        ({"shape": (4, 0, 0)}, r"shape=\(4, 0, 0\) must be \(channels, size, size\)"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(MANIFEST, **changes)


def test_a_manifest_survives_its_file(tmp_path):
    names = ("a", "b", "c", "d", "e")
    fields = {"origin": {"by": ["hand", 1]}, "std": 1.0, "resolution": 64, "pixel_range": (0.0, 1.0)}
    write(tmp_path / "a", class_names=names, **fields)
    manifest = open_latents(tmp_path / "a").manifest
    assert replace(manifest, checksums=None) == replace(MANIFEST, class_names=names, **fields)
    assert set(manifest.checksums) == {"latents.npy", "labels.npy"}


@pytest.mark.parametrize("with_checksums", [False, True])
def test_a_fingerprint_is_of_all_but_the_origin(tmp_path, with_checksums):
    """One number that changes is enough; without checksums, one of the 64 entries that are read."""
    manifest = replace(MANIFEST, count=500, shape=(1, 4, 4), conditioning_type="mask")
    arrays = [np.zeros((500, 1, 4, 4)), np.zeros(500, np.int64), np.zeros((500, 4, 4), np.uint8)]
    prints = []
    for i, key in enumerate((None, "origin", "scale", 0, 1, 2)):
        stored, labels, masks = (array.copy() for array in arrays)
        if isinstance(key, int):
            (stored, labels, masks)[key][1 if with_checksums else 0] = 1  # the second is not read
        changed = replace(manifest, **{key: 2.0} if key == "scale" else {}, origin={"by": key or "hand"})
        if with_checksums:
            with LatentWriter(tmp_path / str(i), changed) as writer:
                writer.append(stored, labels, masks)
            prints.append(open_latents(tmp_path / str(i)).describe()["fingerprint"])
        else:
            prints.append(LatentDataset(stored, labels, changed, masks).describe()["fingerprint"])
    assert prints[0] == prints[1]
    assert len(set(prints)) == 5


def test_a_folder_appears_by_one_rename(tmp_path, monkeypatch):
    """Until the last moment nothing is there that could be taken for a latent folder."""
    seen = []

    def killed(self, target):
        seen.append(sorted(file.name for file in self.iterdir()))
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a")
    assert seen == [["labels.npy", "latents.npy", "manifest.json"]]
    assert not (tmp_path / "a").exists()


FULL_DISK = """
import resource, sys
import numpy as np
from data import LatentManifest, LatentWriter
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    manifest = LatentManifest(100, (4, 8, 8), "float16", "samples", 0, "identity")
    with LatentWriter({path!r}, manifest) as writer:
        for _ in range(10):
            writer.append(np.zeros((10, 4, 8, 8)), None)
except OSError as error:
    sys.exit(f"error: {{error}}")
"""


@pytest.mark.parametrize("limit", [0, 100, 30_000])
def test_a_full_disk_is_one_error_with_the_file_and_leaves_nothing(tmp_path, limit):
    code = FULL_DISK.format(limit=limit, path=str(tmp_path / "a"))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 1
    assert result.stderr.startswith("error: [Errno 27] File too large: ")
    assert "latents.npy" in result.stderr
    assert not list(tmp_path.iterdir())
