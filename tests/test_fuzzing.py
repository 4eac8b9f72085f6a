"""Whatever bytes a file contains, its reader returns, or raises an error of one line that names the file."""

import contextlib
import io
import json
import pickle
import struct
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save

from data.images import IMAGE_ERRORS, read_image
from data.importers import FORMATS
from data.manifest import LatentManifest, load_manifest, to_json
from data.unpickle import unpickle_array
from evaluation.detectors import inception
from tests.networks import small_dit
from tests.outside import (
    latent_folder,
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
    shards_folder,
    wds,
    written,
)
from training.weights import load_weights

EXAMPLES = 300
FUZZED = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "number"]),
        st.floats(0, 1, exclude_max=True),
        st.binary(max_size=4),
    ),
    min_size=1,
    max_size=4,
)
NET = small_dit(depth=1)
DAMAGE = st.one_of(st.binary(max_size=300), EDITS)
NUMBERS = (b"\xff" * 4, b"\x7f" + b"\xff" * 3, b"\0" * 4, b"9" * 8, b"-1")


def damaged(data, damage):
    """Return the damage itself if it is bytes, else the data with the edits that it lists."""
    if isinstance(damage, bytes):
        return damage
    data = bytearray(data)
    for kind, place, filler in damage:
        at = int(place * len(data))
        if kind == "flip" and data:
            data[at] ^= (filler or b"\x01")[0] or 255
        elif kind == "cut":
            del data[at : at + 1 + len(filler) ** 4]
        elif kind == "insert":
            data[at:at] = filler
        elif kind == "number":
            number = NUMBERS[len(filler)]
            data[at : at + len(number)] = number
    return bytes(data)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inception, "MIN_FILE_BYTES", 0)


def reads_or_refuses(file, data, read):
    """Write the bytes and read them: the outcome is a value, or an error of one line that names the file."""
    file.write_bytes(data)
    try:
        read()
    except (ValueError, FileNotFoundError) as error:  # the second where a list names a missing shard
        assert isinstance(error, ValueError) or file.name == "shards.json"
        assert len(str(error).splitlines()) == 1
        assert str(file) in str(error) or str(file.parent) in str(error)


def in_folder(make, name, read):
    """Return what a folder's reader needs: the file to damage, its content, and the reader."""

    def prepare():
        folder = make()
        return folder / name, (folder / name).read_bytes(), lambda: read(folder)

    return prepare


def alone(make, read):
    def prepare():
        file = make()
        return file, file.read_bytes(), lambda: read(file)

    return prepare


def reference():
    return npz(weights=npy(np.array("0" * 64)), arr_0=npy(np.zeros((2, 8, 8, 3), np.uint8)))


def weights(name):
    state = NET.state_dict()
    if name.endswith(".safetensors"):
        data = save(state)
    else:
        buffer = io.BytesIO()
        torch.save({"ema": state}, buffer, _use_new_zipfile_serialization=name == "zip.pt")
        data = buffer.getvalue()
    return written(name, data)


def graph():
    from tensorboard.compat.proto.graph_pb2 import GraphDef

    found = GraphDef()
    for name, shape in (
        ("softmax/weights", (4, 3)),
        ("softmax/biases", (3,)),
        ("conv/conv2d_params", (1, 1, 2, 2)),
    ):
        tensor = found.node.add(name=name, op="Const").attr["value"].tensor
        tensor.dtype = 1
        for size in shape:
            tensor.tensor_shape.dim.add(size=size)
        tensor.tensor_content = bytes(4 * int(np.prod(shape)))
    return written("g.pb", found.SerializeToString())


def tar_of_latents():
    return wds(npy(np.zeros((8, 4, 4), np.float32)), "latent.npy")


def npy_folder():
    written("npys/dataset.json", b'{"labels": [["a.npy", 0]]}')
    return written("npys/a.npy", npy(np.zeros((8, 4, 4), np.float32))).parent


READERS = {
    "samples": alone(lambda: npz(arr_0=npy(np.zeros((3, 8, 8, 3), np.uint8))), read_images),
    "reference": alone(reference, read_reference),
    "latents": in_folder(latent_folder, "latents.npy", read_latents),
    "labels": in_folder(latent_folder, "labels.npy", read_latents),
    "manifest": in_folder(latent_folder, "manifest.json", read_latents),
    "shards.json": in_folder(shards_folder, "shards.json", read_stream),
    "shard": in_folder(shards_folder, "train-000000.tar", read_stream),
    "tread_wds": alone(tar_of_latents, lambda file: read_all(FORMATS["tread_wds"].open(file))),
    "repa": alone(
        lambda: npy_zip(npy(np.zeros((8, 4, 4), np.float32))),
        lambda file: read_all(FORMATS["repa"].open(file)),
    ),
    "repa folder": in_folder(npy_folder, "a.npy", lambda folder: read_all(FORMATS["repa"].open(folder))),
    "dataset.json": in_folder(
        npy_folder, "dataset.json", lambda folder: read_all(FORMATS["repa"].open(folder))
    ),
    "part": in_folder(lambda: parts(npy(np.zeros((1, 4, 4, 4), np.float16))), "0000000.npz", read_part),
    "safetensors": alone(lambda: weights("w.safetensors"), lambda file: load_weights(NET, file)),
    "pt": alone(lambda: weights("zip.pt"), lambda file: load_weights(NET, file)),
    "old pt": alone(lambda: weights("old.pt"), lambda file: load_weights(NET, file)),
    "inception.pth": alone(lambda: weights("old.pt"), read_inception),
    "graph": alone(graph, read_inception),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
def test_damaged_files_raise_nothing_but_the_documented_errors(name):
    file, content, read = READERS[name]()

    @FUZZED
    @given(DAMAGE)
    def fuzz(damage):
        reads_or_refuses(file, damaged(content, damage), read)

    fuzz()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "bmp", "ppm", "tiff"])
def test_damaged_images_raise_nothing_but_the_documented_errors(kind):
    buffer = io.BytesIO()
    Image.effect_noise((24, 20), 50).convert("RGB").save(buffer, kind)

    @FUZZED
    @given(DAMAGE)
    def fuzz(damage):
        with contextlib.suppress(*IMAGE_ERRORS):
            assert read_image(io.BytesIO(damaged(buffer.getvalue(), damage)), 8).shape == (8, 8, 3)

    fuzz()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**19), 1e308])
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


MANIFEST = LatentManifest(
    6, (4, 4, 4), "float16", "moments", 2, "identity", class_names=("a", "b"), num_held_out=1
)


@settings(FUZZED, max_examples=1000)
@given(st.data())
def test_a_manifest_of_any_values_is_read_or_refused(data):
    fields = asdict(MANIFEST)
    key = data.draw(st.sampled_from(sorted(fields)))
    text = json.dumps({**fields, key: data.draw(VALUES)}).encode()
    try:
        manifest = load_manifest(io.BytesIO(text), "a/manifest.json")
    except ValueError as error:
        assert "a/manifest.json is not a latent manifest" in str(error)
    else:
        to_json(manifest)
        manifest.to_latents(torch.zeros(1, *manifest.shape))


@settings(FUZZED, max_examples=400)
@given(EDITS, st.integers(0, 5))
def test_damaged_pickles_of_arrays_are_read_or_refused(damage, protocol):
    data = pickle.dumps(np.arange(6, dtype=np.float32), protocol=protocol)
    with contextlib.suppress(ValueError):
        assert isinstance(unpickle_array(damaged(data, damage)), np.ndarray)


@settings(FUZZED, max_examples=300)
@given(VALUES, VALUES)
def test_a_header_of_safetensors_of_any_values_is_read_or_refused(shape, offsets):
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
    file = Path("w.safetensors")
    reads_or_refuses(file, struct.pack("<Q", len(header)) + header, lambda: load_weights(NET, file))
