"""Readers of files from outside, and small files for them, valid or damaged."""

import io
import json
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from data import LatentManifest, LatentWriter, open_images, open_latents, open_shards
from data.make_shards import write_shards
from data.parts import EncodedParts
from data.shards import read_shard_manifest
from evaluation import open_reference
from evaluation.detectors import inception
from tests.networks import small_dit
from training.weights import load_weights

COUNT, SHAPE = 6, (4, 4, 4)
SIZES = {"input_size": 4, "in_channels": 4, "num_classes": 2}


# Readers: each takes a file or folder, and reads all of it.
def read_all(source):
    return list(source.entries())


def read_latents(path):
    return open_latents(str(path), **SIZES)


def read_stream(path):
    read_shard_manifest.cache_clear()  # of another test's folder of this name
    dataset = open_shards(str(path), **SIZES)
    shards = zip(dataset.names, dataset.counts, strict=True)
    return [dataset.read_shard(name, int(count)) for name, count in shards]


def read_images(path):
    images = open_images(path)
    return list(images.batches(2, range(-(-images.count // 2))))


def read_reference(path):
    return open_reference(path, open_images)


def read_part(path):
    return EncodedParts(path, {}, 1).read_part(0)


def load_net(path):
    load_weights(small_dit(), path)


def read_inception(path):
    return inception.read_weights(path, allow_unpublished=True)


# Valid files, to be damaged.
def latent_folder(path=Path("latents")):
    layout = {"num_held_out": 1, "conditioning_type": "mask"}
    manifest = LatentManifest(COUNT, SHAPE, "float16", "samples", 2, "identity", **layout)
    with LatentWriter(path, manifest) as writer:
        writer.append(np.ones((COUNT, *SHAPE)), np.arange(COUNT) % 2, np.ones((COUNT, 4, 4), np.uint8))
    return path


def shards_folder(path=Path("shards")):
    manifest = LatentManifest(COUNT, SHAPE, "float16", "samples", 2, "identity", num_held_out=1)
    with LatentWriter("to_shard", manifest) as writer:
        writer.append(np.ones((COUNT, *SHAPE)), np.arange(COUNT) % 2)
    write_shards(read_latents("to_shard"), path, 3)
    return path


def npz(path=Path("a.npz"), **members):
    """Write an .npz whose members are given as bytes."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return path


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def declared(shape, dtype="|u1"):
    """Return an .npy that declares a shape and contains 16 bytes."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue() + b"\0" * 16


def npy_zip(data, path=Path("npy.zip"), labels=b'{"labels": [["a.npy", 0]]}'):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", data)
        archive.writestr("dataset.json", labels)
    return path


def wds(data, suffix, path=Path("w.tar"), change=lambda info: None, name="a"):
    with tarfile.open(path, "w") as tar:
        for member, content in ((f"{name}.cls", b"0"), (f"{name}.{suffix}", data)):
            info = tarfile.TarInfo(member)
            info.size = len(content)
            if member.endswith(suffix):
                change(info)
            if info.size == len(content):
                tar.addfile(info, io.BytesIO(content))
            else:  # a header alone
                tar.offset += tar.fileobj.write(info.tobuf(tar.format))
    return path


def written(name, data):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(data)
    return Path(name)


def spoilt(folder, name, data):
    (folder / name).write_bytes(data)
    return folder


def shard_of(data, change=lambda info: None):
    """Return shards of which the first has other latents."""
    folder = shards_folder()
    wds(data, "latents.npy", folder / "train-000000.tar", change)
    return folder


def parts(data):
    written("parts/0000000.npz", npz(latents=data, positions=npy(np.zeros(1, np.int64))).read_bytes())
    return Path("parts")


def saved(content, name):
    torch.save(content, name)
    return Path(name)


def images_with_labels(data):
    written("images/dataset.json", data)
    Image.new("RGB", (8, 8)).save("images/a.png")
    return Path("images")


def manifest_with(**changes):
    folder = latent_folder()
    text = json.loads((folder / "manifest.json").read_text())
    return spoilt(folder, "manifest.json", json.dumps({**text, **changes}).encode())


def shards_with(manifest=None, shards=None):
    """Return shards with changes in their manifest and their list."""
    folder = shards_folder()
    for name, changes in (("manifest.json", manifest), ("shards.json", shards)):
        text = json.loads((folder / name).read_text())
        spoilt(folder, name, json.dumps({**text, **(changes or {})}).encode())
    return folder
