"""What a file only declares, and does not hold, is refused before memory is taken for it."""

import io
import struct
import time
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data import open_images, read_manifest
from data.importers import FORMATS
from data.listing import list_images
from data.verify import damages
from evaluation import inception
from fid import read_labelled
from tests.outside import (
    declared,
    images_with_labels,
    latent_folder,
    load_net,
    manifest_with,
    npy,
    npy_zip,
    npz,
    parts,
    read_all,
    read_images,
    read_inception,
    read_latents,
    read_part,
    read_reference,
    read_stream,
    saved,
    shard_of,
    shards_folder,
    shards_with,
    spoilt,
    wds,
    written,
)

HUGE = 10**15
MOST_MEMORY, MOST_SECONDS = 2**26, 5
NESTED = b"[" * 200_000
ZEROS = npy(np.zeros(1))


def hole(info):
    """Make a member of a tar one that consists of a hole."""
    info.size = 0
    info.pax_headers = {"GNU.sparse.map": f"{HUGE},0", "GNU.sparse.size": str(HUGE)}


def huge(info):
    info.size = HUGE


def inflated(path, name, data):
    """Write a zip whose directory declares more of its member than its bytes can become."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
        archive.infolist()[0].file_size = HUGE + len(declared((HUGE, 1, 1, 1))) - 16
    return Path(path)


def expanded(name):
    """Save weights whose only number is seen a thousand million million times."""
    return saved({"fc.weight": torch.zeros(1).expand(HUGE)}, name)


def graph(shape):
    from tensorboard.compat.proto.graph_pb2 import GraphDef

    found = GraphDef()
    tensor = found.node.add(name="softmax/weights", op="Const").attr["value"].tensor
    tensor.dtype = 1
    tensor.float_val.append(1)
    for size in shape:
        tensor.tensor_shape.dim.add(size=size)
    return written("g.pb", found.SerializeToString())


def png(side):
    """Write an image that declares other sides than it has."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "png")
    data = bytearray(file.getvalue())
    data[16:24] = struct.pack(">2I", side, side)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return written("images/a.png", bytes(data)).parent


def crop_images(path):
    return list(open_images(path, resolution=8).batches(1))


def tread(path):
    return read_all(FORMATS["tread_wds"].open(path))


def repa(path):
    return read_all(FORMATS["repa"].open(path))


LYING_SHARDS = {"manifest": {"count": HUGE + 3}, "shards": {"train-000000.tar": HUGE, "train-000001.tar": 2}}
LYING_HELD_OUT = {"manifest": {"count": HUGE + 5}, "shards": {"held_out-000000.tar": HUGE}}
LYING_TENSOR = b'{"a":{"dtype":"F32","shape":[1000000000],"data_offsets":[0,4000000000]}}'
LABELLED = npy(np.zeros((2, 8, 8, 1), np.uint8))
FILES = {
    "samples": (read_images, lambda: npz(arr_0=declared((HUGE, 8, 8, 3)))),
    "samples, and their archive": (read_images, lambda: inflated("a.npz", "arr_0.npy", declared((HUGE, 1, 1, 1)))),
    "size of a sample": (read_images, lambda: npz(arr_0=declared((1, 10**6, 10**6, 3)))),
    "header of samples": (read_images, lambda: npz(arr_0=b"\x93NUMPY\x01\x00\x10\x27" + b"(" * 10_000)),
    "labels of samples": (read_labelled, lambda: npz(arr_0=LABELLED, arr_1=declared((HUGE,)))),
    "reference": (read_reference, lambda: npz(mu=declared((HUGE,), "<f8"), sigma=declared((HUGE,), "<f8"))),
    "numbers of a reference": (read_reference, lambda: npz(mu=declared((2048,), "|V2000000000"), sigma=ZEROS)),
    "hash of a reference": (read_reference, lambda: npz(weights=declared((), "<U500000000"))),
    "latents": (read_latents, lambda: spoilt(latent_folder(), "latents.npy", declared((HUGE, 4, 4, 4), "<f2"))),
    "labels": (read_latents, lambda: spoilt(latent_folder(), "labels.npy", declared((10**30,), "<i8"))),
    "masks": (read_latents, lambda: spoilt(latent_folder(), "masks.npy", declared((HUGE, 4, 4)))),
    "count": (read_latents, lambda: manifest_with(count=HUGE)),
    "scale": (read_latents, lambda: manifest_with(scale=10**400)),
    "classes": (read_latents, lambda: manifest_with(num_classes=HUGE)),
    "shape": (read_latents, lambda: manifest_with(shape=[4, 10**6, 10**6])),
    "blocks": (lambda path: list(damages(path, read_manifest(path))), lambda: manifest_with(block_bytes=10**30)),
    "depth of a manifest": (read_latents, lambda: spoilt(latent_folder(), "manifest.json", NESTED)),
    "shards.json": (read_stream, lambda: shards_with(**LYING_SHARDS)),
    "shards.json, held out": (read_stream, lambda: shards_with(**LYING_HELD_OUT)),
    "depth of shards.json": (read_stream, lambda: spoilt(shards_folder(), "shards.json", NESTED)),
    "latents of a shard": (read_stream, lambda: shard_of(declared((HUGE,)))),
    "hole in a shard": (read_stream, lambda: shard_of(ZEROS, hole)),
    "member of a shard": (read_stream, lambda: shard_of(ZEROS, huge)),
    "part": (read_part, lambda: parts(declared((HUGE,)))),
    "safetensors": (load_net, lambda: written("w.safetensors", struct.pack("<Q", len(LYING_TENSOR)) + LYING_TENSOR)),
    "header of safetensors": (load_net, lambda: written("w.safetensors", struct.pack("<Q", HUGE) + b"{}")),
    "weights.pt": (load_net, lambda: expanded("w.pt")),
    "inception.pth": (read_inception, lambda: expanded("w.pth")),
    "constant of a graph": (read_inception, lambda: graph((HUGE,))),
    "constant that wraps around": (read_inception, lambda: graph((2**32, 2**32))),
    "length in a graph": (read_inception, lambda: written("g.pb", b"\x0a\xff\xff\xff\xff\x0f")),
    "image": (crop_images, lambda: png(2**31 - 1)),
    "image in a zip": (crop_images, lambda: inflated("a.zip", "a.webp", b"RIFF" + b"\0" * 2**20)),
    "depth of dataset.json": (list_images, lambda: images_with_labels(NESTED)),
    "latents in a tar": (tread, lambda: wds(declared((HUGE,)), "latent.npy")),
    "hole in a tar": (tread, lambda: wds(ZEROS, "latent.npy", change=hole)),
    "class in a tar": (tread, lambda: wds(ZEROS, "cls", change=huge)),
    "latents in a zip": (repa, lambda: npy_zip(declared((HUGE,)))),
    "archive in a zip": (repa, lambda: npy_zip(npz(a=ZEROS).read_bytes())),
}

# The rule that refuses a file, where what comes after it would refuse it too, in another way, or later.
RULES = {
    "samples": "bytes, its shape .* needs",
    "samples, and their archive": "declares .* bytes, more than the .* that are there can be",
    "size of a sample": "an image has at most .* pixels",
    "labels of samples": "bytes, its shape .* needs",
    "reference": "must be .*: of another network",
    "numbers of a reference": "must be floats",
    "hash of a reference": "must be a hash",
    "latents": "bytes, its shape .* needs",
    "classes": "num_classes=.* must be in",
    "shape": "must be of at most .* numbers",
    "blocks": "block_bytes=.* and at most",
    "hole in a shard": "declares .* bytes, must be a file",
    "member of a shard": "declares .* bytes, must be a file",
    "part": "bytes, its shape .* needs",
    "weights.pt": "has shape|not of this network",
    "inception.pth": "declares .* bytes, more than the file holds",
    "constant of a graph": "must be at most .* numbers",
    "constant that wraps around": "must be at most .* numbers",
    "image": "exceeds limit",
    "image in a zip": "must have at most .*",
    "latents in a tar": "bytes, its shape .* needs",
    "hole in a tar": "declares .* bytes, more than are there",
    "class in a tar": "declares .* bytes, more than are there",
    "latents in a zip": "bytes, its shape .* needs",
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_only_declared_takes_no_memory(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inception, "SMALLEST_FILE", 0)
    read, make = FILES[name]
    file = make()
    began = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=RULES.get(name, ".")) as raised:
            read(file)
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()
    assert time.monotonic() - began < MOST_SECONDS
    assert file.name in str(raised.value)
