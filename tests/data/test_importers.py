"""Foreign formats, written from their public descriptions, and files that contradict the assumptions."""

import io
import json
import tarfile
from dataclasses import replace
from functools import partial

import lmdb
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from data import convert, open_latents
from data.importers import FORMATS, open_tars
from runtime.errors import UserError
from tests.data.test_listing import pack
from tests.outside import npy
from tests.runs import composed

COUNT, SIZE = 24, 8
LABELS = np.arange(COUNT) % 5
# Unscaled latents of sd-vae-ft-* on photographs have standard deviations near 4.9, 5.3, 3.9, 4.0.
STDS = np.array([4.9, 5.3, 3.9, 4.0], np.float32).reshape(4, 1, 1)


def latents(seed=0):
    """Draw realistic mean and log-variance (COUNT, 4, SIZE, SIZE): smooth, asymmetric, of low variance."""
    rng = np.random.default_rng(seed)
    coarse = rng.standard_normal((COUNT, 4, SIZE // 2, SIZE // 2)).astype(np.float32)
    mean = STDS * coarse.repeat(2, axis=2).repeat(2, axis=3)
    return mean, rng.uniform(-18, -6, mean.shape).astype(np.float32)


MEAN, LOGVAR = latents()
MOMENTS = np.concatenate([MEAN, LOGVAR], axis=1)


def write_tar(file, members):
    with tarfile.open(file, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def write_tread(folder, arrays=MEAN * 0.18215, labels=LABELS):
    """Write two tars of KEY.latent.npy and KEY.cls."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard, ids in enumerate(np.array_split(np.arange(len(arrays)), 2)):
        members = []
        for i in ids:
            members += [(f"{i:07d}.cls", str(labels[i]).encode()), (f"{i:07d}.latent.npy", npy(arrays[i]))]
        write_tar(folder / f"imagenet-{shard:04d}.tar", members)
    return folder


def write_lmdb(folder, first=None, second=None, labels=None):
    """Write MaskDiT's LMDB: all images, then all flips. `length` counts both."""
    first = MOMENTS if first is None else first
    second = first[..., ::-1] if second is None else second
    folder.mkdir(parents=True)
    entries = np.concatenate([first, second]).astype(np.float32)
    labels = np.concatenate([LABELS, LABELS]) if labels is None else labels
    environment = lmdb.open(str(folder), map_size=2**26)
    with environment.begin(write=True) as transaction:
        for i, (entry, label) in enumerate(zip(entries, labels, strict=True)):
            transaction.put(f"z-{i}".encode(), np.ascontiguousarray(entry).tobytes())
            transaction.put(f"y-{i}".encode(), str(label).encode())
        transaction.put(b"length", str(len(entries)).encode())
    environment.close()
    return folder


def write_npy_folder(folder, arrays, labels=LABELS):
    """Write moments as the tools of EDM2 and REPA do: numbered folders, and dataset.json in another order."""
    entries = []
    for i, array in enumerate(arrays):
        name = f"{i // 10:05d}/img-mean-std-{i:08d}.npy"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(npy(array))
        entries.append([name, int(labels[i])])
    (folder / "dataset.json").write_text(json.dumps({"labels": entries[::-1]}))
    return folder


def mean_std(mean=MEAN, logvar=LOGVAR):
    return np.concatenate([mean, np.exp(0.5 * logvar)], axis=1)


def run(source, out, name, *overrides):
    convert.main(
        composed(f"format={name}", f"source={source}", f"out={out}", *overrides, config_name="convert")
    )
    return open_latents(out)


def close(stored, expected):
    np.testing.assert_allclose(np.asarray(stored, np.float32), expected, rtol=1e-3, atol=2e-2)


def test_tread(tmp_path):
    dataset = run(write_tread(tmp_path / "tread"), tmp_path / "out", "tread_wds")
    manifest = dataset.manifest
    close(dataset.stored, MEAN)  # stored unscaled
    assert (manifest.kind, manifest.scale) == ("samples", 0.18215)
    assert (manifest.hflip, manifest.num_classes) == (False, 5)
    assert np.array_equal(dataset.labels, LABELS)
    seen = manifest.to_latents(dataset.read(np.arange(COUNT))[0])
    close(seen.numpy(), MEAN * 0.18215)
    unscaled = run(write_tread(tmp_path / "raw", MEAN), tmp_path / "raw_out", "tread_wds", "scaled=false")
    close(unscaled.stored, MEAN)
    on_request = ("tread_wds", "stored_as=mean_std", "scaled=false")
    close(run(write_tread(tmp_path / "moments", mean_std()), tmp_path / "std", *on_request).stored, MOMENTS)


def test_entries_in_two_folders_may_share_a_name(tmp_path):
    parts = (("cls", b"1"), ("latent.npy", npy(MEAN[0])))
    write_tar(tmp_path / "two.tar", [(f"{folder}/0.{name}", data) for folder in "ab" for name, data in parts])
    assert open_tars(tmp_path / "two.tar").labels.tolist() == [1, 1]


@pytest.mark.parametrize("stored_as", ["samples", "mean_logvar", "mean_std"])
def test_scale_and_shift_of_each_channel_are_undone(stored_as):
    """The moments of scale * z are (scale * m, scale^2 * v)."""
    chosen = replace(FORMATS["edm2"], stored_as=stored_as, scaled=True)
    scale, shift = (np.reshape(value, (4, 1, 1)).astype(np.float32) for value in (chosen.scale, chosen.shift))
    spreads = {"mean_logvar": LOGVAR + 2 * np.log(scale), "mean_std": np.exp(0.5 * LOGVAR) * scale}
    spread = spreads.get(stored_as)
    seen = (MEAN - shift) * scale
    stored = chosen.to_stored(seen if spread is None else np.concatenate([seen, spread], axis=1))
    np.testing.assert_allclose(stored, MEAN if spread is None else MOMENTS, atol=1e-4)


def test_variances_are_clamped_as_diffusers_does():
    entry = np.array([1.0, 1.0, 1.0, 0.0, 1.0, 1e10]).reshape(1, 6, 1, 1)
    assert FORMATS["repa"].to_stored(entry)[0, 3:].ravel().tolist() == [-30, 0, 20]


def test_maskdit_lmdb(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "ENTRIES_AT_ONCE", 7)
    dataset = run(write_lmdb(tmp_path / "lmdb" / "train"), tmp_path / "out", "maskdit_lmdb", "num_held_out=3")
    manifest = dataset.manifest
    assert (manifest.count, manifest.num_held_out) == (COUNT, 3)
    assert (manifest.hflip, manifest.kind) == (True, "moments")
    close(dataset.stored[:, 0], MOMENTS)
    close(dataset.stored[:, 1], MOMENTS[..., ::-1])
    assert np.array_equal(dataset.labels, LABELS)


def test_an_lmdb_without_flips(tmp_path):
    folder = write_lmdb(tmp_path / "lmdb", second=np.concatenate(latents(seed=1), axis=1))
    assert run(folder, tmp_path / "out", "maskdit_lmdb", "hflip=false").manifest.count == 2 * COUNT


def test_npy_files_without_labels_and_with_flips(tmp_path):
    both = np.concatenate([mean_std(), mean_std()[..., ::-1]])
    folder = write_npy_folder(tmp_path / "source", both, labels=np.zeros(2 * COUNT, int))
    (folder / "dataset.json").write_text('{"labels": null}')
    dataset = run(folder, tmp_path / "out", "repa", "hflip=true")
    assert (dataset.manifest.count, dataset.manifest.num_classes, dataset.labels) == (COUNT, 0, None)
    close(dataset.stored[:, 1], MOMENTS[..., ::-1])


@pytest.mark.parametrize("packed", [False, True])
def test_repa(tmp_path, packed):
    source = write_repa(tmp_path / "vae-sd")
    source = pack(source, tmp_path / "vae-sd.zip") if packed else source
    dataset = run(source, tmp_path / "out", "repa")
    close(dataset.stored, MOMENTS)
    assert np.array_equal(dataset.labels, LABELS)
    assert dataset.manifest.encoder == "stabilityai/sd-vae-ft-mse"
    assert dataset.manifest.pixel_range == (-1.0, 1.0)


def write_repa(folder):
    return write_npy_folder(folder, mean_std())


EDM2_MEAN = np.array([5.81, 3.25, 0.12, -2.15], np.float32).reshape(4, 1, 1)
EDM2_STD = np.array([4.17, 4.62, 3.71, 3.28], np.float32).reshape(4, 1, 1)


def write_edm2(folder):
    return write_npy_folder(folder, mean_std(MEAN / STDS * EDM2_STD + EDM2_MEAN))


def test_edm2(tmp_path):
    dataset = run(write_edm2(tmp_path / "edm2"), tmp_path / "out", "edm2")
    seen = dataset.manifest.to_means(dataset.read(np.arange(COUNT))[0])
    close(seen.numpy(), MEAN / STDS * 0.5)
    assert dataset.manifest.pixel_range == (0.0, 1.0)
    assert dataset.manifest.std == 0.5


def write_lightningdit(folder, stats=None, sizes=(10, 14), **changed):
    """Write two shards, and statistics that differ between channels."""
    folder.mkdir()
    start = 0
    for i, size in enumerate(sizes):
        part = slice(start, start := start + size)
        arrays = {"latents": MEAN[part], "latents_flip": MEAN[part, ..., ::-1], "labels": LABELS[part]}
        tensors = {key: torch.from_numpy(value.copy()) for key, value in (arrays | changed).items()}
        save_file(tensors, folder / f"latents_rank00_shard{i:03d}.safetensors")
    stats = {"mean": torch.tensor(VAVAE_MEAN), "std": torch.tensor(STDS)[None]} if stats is None else stats
    torch.save(stats, folder / "latents_stats.pt")
    return folder


VAVAE_MEAN = np.array([0.5, -0.2, 0.0, 0.1], np.float32).reshape(1, 4, 1, 1)


def test_lightningdit(tmp_path, capsys):
    """Read images and flips of all shards in order. The statistics of channels become shift and scale."""
    dataset = run(write_lightningdit(tmp_path / "vavae"), tmp_path / "out", "lightningdit")
    close(dataset.stored[:, 0], MEAN)
    close(dataset.stored[:, 1], MEAN[..., ::-1])
    assert np.array_equal(dataset.labels, LABELS)
    assert dataset.manifest.shift == pytest.approx((0.5, -0.2, 0.0, 0.1))
    assert dataset.manifest.scale == pytest.approx(tuple(1 / STDS.ravel()))
    seen = dataset.manifest.to_means(dataset.read(np.arange(COUNT))[0])
    close(seen.numpy(), (MEAN - VAVAE_MEAN[0]) / STDS)
    assert "shift=(0.5, -0.2" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["lightningdit", "edm2", "tread_wds"])
def test_scale_and_shift_come_from_one_source(tmp_path, name):
    write = {
        "lightningdit": write_lightningdit,
        "edm2": write_repa,
        "tread_wds": lambda path: write_tread(path, (MEAN - 0.1) * 0.1),
    }[name]
    given = "scale=0.1", "shift=0.1", "std=0.5"
    manifest = run(write(tmp_path / "source"), tmp_path / "out", name, *given).manifest
    assert (manifest.scale, manifest.shift, manifest.std) == (0.1, 0.1, 0.5)
    assert manifest.origin["assumed"]["shift"] == 0.1


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def cut_between_members(folder):
    file = folder / "imagenet-0001.tar"
    with tarfile.open(file) as tar:
        end = [member.offset for member in tar][6]  # complete samples end here
    file.write_bytes(file.read_bytes()[:end])


def put(folder, key, value):
    environment = lmdb.open(str(folder), map_size=2**26)
    with environment.begin(write=True) as transaction:
        transaction.put(key, value) if value else transaction.delete(key)
    environment.close()


def rename_member(folder):
    write_tar(folder / "imagenet-0001.tar", [("7.latent.npy", npy(MEAN[0])), ("8.cls", b"0")])


@pytest.mark.parametrize(
    ("name", "write", "spoil", "overrides", "message"),
    [
        ("tread_wds", lambda p: write_tread(p, MOMENTS), None, (), r"24 entries contradict .* 100.0% of .* negative: set stored_as=mean_logvar"),
        ("tread_wds", lambda p: write_tread(p, mean_std()), None, (), r" 0.0% of .* is negative: set stored_as=mean_std"),
        ("tread_wds", lambda p: write_tread(p, MEAN), None, (), r"std 4\.\d+, not 1:"),
        ("tread_wds", write_tread, None, ("scaled=false",), r"std 0\.15\d?, not 1: try scaled=true"),
        ("tread_wds", write_tread, None, ("hflip=true",), "the two halves have different labels"),
        ("tread_wds", write_tread, cut_between_members, (), r"imagenet-0001.tar cannot be read as an uncompressed tar: it is truncated"),
        ("repa", lambda p: write_npy_folder(p, MOMENTS), None, (), "is negative: set stored_as=mean_logvar"),
        ("maskdit_lmdb", lambda p: write_lmdb(p, second=np.concatenate(latents(seed=1), axis=1)), None, (), "the second half holds no flips .*: set hflip=false"),
        ("maskdit_lmdb", lambda p: write_lmdb(p, labels=np.concatenate([LABELS, LABELS[::-1]])), None, (), "the two halves have different labels: set hflip=false"),
        ("maskdit_lmdb", write_lmdb, lambda p: cut(p / "data.mdb"), (), r"source is truncated: it has \d+ of \d+ bytes"),
        ("maskdit_lmdb", write_lmdb, partial(put, key=b"length", value=b"-3"), (), "length is b'-3', must be an integer"),
        ("maskdit_lmdb", write_lmdb, partial(put, key=b"length", value=b"1"), (), "hflip needs pairs, not 1 entries"),
        ("maskdit_lmdb", write_lmdb, partial(put, key=b"y-3", value=b"9" * 30), (), "y-3 is b'9+', must be an integer in .*999999"),
        ("maskdit_lmdb", write_lmdb, partial(put, key=b"z-3", value=b"12345678"), (), "z-3 has 2 numbers, must have 8 square channels"),
        ("repa", write_edm2, None, (), r"mean 1.0\d in channel 0.*another range of pixels"),
        ("edm2", write_repa, None, (), "in channel 0.*another range of pixels"),
        ("repa", lambda p: write_npy_folder(p, MEAN[:, :3]), None, (), "3 channels cannot be halved:"),
        ("repa", lambda p: write_npy_folder(p, MEAN * np.nan), None, (), "some values are not finite"),
        ("tread_wds", write_tread, rename_member, (), r"must have both parts of each entry: imagenet-0001/7.cls is missing"),
        ("tread_wds", lambda p: write_tread(p, labels=["a"] * COUNT), None, (), r"0000000.cls is b'a', must be an integer in"),
        ("tread_wds", write_tread, None, ("num_classes=4",), r"label 4 at position 4 must be in \[0, 3\]"),
        ("repa", lambda p: p.mkdir(), None, (), "has no dataset.json with the labels"),
        ("repa", lambda p: write_npy_folder(p, np.full((4, 8, 8, 8), "a")), None, (), "the type is <U1, must be numbers"),
        ("tread_wds", lambda p: p.mkdir(), None, (), "has no entries"),
        ("lightningdit", write_lightningdit, lambda p: cut(p / "latents_rank00_shard001.safetensors"), (), r"shard001.safetensors is damaged, or does not have all"),
        ("lightningdit", lambda p: write_lightningdit(p, sizes=(24,), labels=LABELS[1:]), None, (), r"has \[24, 24, 23\] entries of"),
        ("lightningdit", write_lightningdit, lambda p: (p / "latents_stats.pt").unlink(), (), "No such file or directory: .*latents_stats.pt"),
        ("lightningdit", write_lightningdit, lambda p: cut(p / "latents_stats.pt"), (), "latents_stats.pt is damaged"),
        ("lightningdit", lambda p: write_lightningdit(p, dict.fromkeys(("mean", "std"), torch.zeros(4))), None, (), "has no tensors mean and std"),
        ("repa", lambda p: write_npy_folder(p, [*mean_std()[1:], MEAN[0]]), None, (), "all entries must have one shape"),
    ],
)  # fmt: skip
def test_damaged_and_contradictory_sources_are_one_clear_error(
    tmp_path, name, write, spoil, overrides, message
):
    write(tmp_path / "source")
    if spoil:
        spoil(tmp_path / "source")
    with pytest.raises(UserError, match=message):
        run(tmp_path / "source", tmp_path / "out", name, *overrides)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
