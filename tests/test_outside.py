"""Files from outside: each reader meets each damage, and refuses it in one line that names the file.

Nothing that a file holds is executed, nothing is written, and no memory is taken for what it only declares.
"""

import contextlib
import io
import json
import pickle
import time
import tracemalloc
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from data.images import IMAGE_ERRORS, open_picture, to_pixels
from data.importers import FORMATS
from data.manifest import LatentManifest, manifest_from
from data.masks import read_mask
from tests import outside
from tests.outside import LATENT, PICKLE, POSTSCRIPT

MAX_MEMORY, MAX_SECONDS = 2**26, 5


@pytest.fixture(autouse=True)
def no_side_effects(tmp_path, monkeypatch):
    """Run each test in a folder of its own: nothing may appear beside it, and nothing may be executed."""
    folder = tmp_path / "inside"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield
    assert not list(tmp_path.rglob("EXECUTED"))
    assert {path.name for path in tmp_path.iterdir()} == {"inside"}


@pytest.mark.parametrize(("read", "make", "rule"), outside.cases())
def test_a_damaged_file_is_refused_in_one_line_and_takes_no_memory(read, make, rule):
    file = make()
    started = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rule) as raised:
            read(file)
        assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY
    finally:
        tracemalloc.stop()
    assert time.monotonic() - started < MAX_SECONDS
    assert len(str(raised.value).splitlines()) == 1
    assert getattr(file, "name", file) in str(raised.value)


def test_masks_execute_no_code():
    for data in (PICKLE, POSTSCRIPT):
        with pytest.raises(IMAGE_ERRORS, match="cannot identify image file"):
            read_mask(io.BytesIO(data), (8, 8), 8, True)


def test_malicious_files_harm_unsafe_readers():
    for data in (PICKLE, pickle.dumps(outside.Malicious())):
        pickle.loads(data)
        Path("EXECUTED").unlink()
    np.load(io.BytesIO(outside.OBJECTS), allow_pickle=True)
    Path("EXECUTED").unlink()
    assert Image.open(io.BytesIO(POSTSCRIPT)).format == "EPS"


def test_every_importer_has_a_malicious_file():
    names = {*outside.ARRAYS, *(name for name, *_ in outside.OTHERS)}
    assert {name.partition(":")[0] for name in names} >= set(FORMATS)


@pytest.mark.parametrize("name", ["../x", "/x", "../../x", "inside/../../x"])
def test_member_names_do_not_leave_the_folder(name):
    secret = outside.written("secret.npy", outside.npy(np.ones((8, 4, 4), np.float32)))
    labels = json.dumps({"labels": [[f"{name}.npy", 0], [str(secret), 0]]})
    archive = outside.packed("a.zip", **{f"{name}.npy": LATENT, "dataset.json": labels})
    assert all((entry == 0).all() for entry in outside.tread(outside.wds(LATENT, "latent.npy", name=name)))
    if name.startswith("/"):
        assert all((entry == 0).all() for entry in outside.repa(archive))
    else:
        with pytest.raises(ValueError, match=r"a\.zip has \.\./.*, a path outside of it"):
            outside.repa(archive)
    assert {path.name for path in Path().iterdir()} == {"secret.npy", "a.zip", "w.tar"}


# Whatever bytes a file contains, its reader returns, or raises an error of one line that names the file.
FUZZED = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
KINDS = st.sampled_from(["flip", "cut", "insert", "number"])
EDIT = st.tuples(KINDS, st.floats(0, 1, exclude_max=True), st.binary(max_size=4))
EDITS = st.lists(EDIT, min_size=1, max_size=4)
DAMAGE = st.one_of(st.binary(max_size=300), EDITS)
NUMBERS = (b"\xff" * 4, b"\x7f" + b"\xff" * 3, b"\0" * 4, b"9" * 8, b"-1")
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    PLAIN | st.sampled_from([10**400, -(10**19), 1e308]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
MANIFEST = LatentManifest(
    6, (4, 4, 4), "float16", "moments", 2, "identity", class_names=("a", "b"), num_held_out=1
)


def damaged(data, damage):
    """The damage itself if it is bytes, else the data with the edits that it lists."""
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", outside.VALID)
def test_any_bytes_are_read_or_refused(name):
    """The outcome is a value, or an error of one line that names the file."""
    read, make, inner = outside.VALID[name]
    path = make()
    file = path / inner if inner else path
    content = file.read_bytes()
    with pytest.raises(ValueError) if read is outside.read_inception else contextlib.nullcontext():
        read(path)

    @FUZZED
    @given(DAMAGE)
    def fuzz(damage):
        file.write_bytes(damaged(content, damage))
        try:
            read(path)
        except ValueError as error:
            assert len(str(error).splitlines()) == 1
            assert str(file) in str(error) or str(file.parent) in str(error)

    fuzz()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "bmp", "ppm", "tiff"])
def test_any_bytes_are_an_image_or_refused(kind):
    buffer = io.BytesIO()
    Image.effect_noise((24, 20), 50).convert("RGB").save(buffer, kind)

    @FUZZED
    @given(DAMAGE)
    def fuzz(damage):
        with contextlib.suppress(*IMAGE_ERRORS):
            picture = open_picture(io.BytesIO(damaged(buffer.getvalue(), damage)))
            assert to_pixels(picture, 8).shape == (8, 8, 3)

    fuzz()


@settings(FUZZED, max_examples=500)
@given(st.sampled_from(sorted(asdict(MANIFEST))), VALUES)
def test_any_values_of_a_manifest_are_read_or_refused(key, value):
    fields = json.loads(json.dumps({**asdict(MANIFEST), key: value}))
    try:
        manifest = manifest_from(fields, "a/manifest.json")
    except ValueError as error:
        assert "a/manifest.json is not a latent manifest" in str(error)
    else:
        json.dumps(asdict(manifest))
        manifest.to_latents(torch.zeros(1, *manifest.shape))
