import re
import struct
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
from PIL import ExifTags, Image

from data import centre_crop, open_images
from data.images import open_picture

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (11, 6, 5, 3), dtype=np.uint8)
NAMES = [f"{'ab'[i % 2]}/{i:02}.png" for i in range(11)]
ORDER = np.argsort(NAMES)


def write_folder(folder, names=NAMES, images=IMAGES):
    for name, image in zip(names, images, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / name)
    return folder


def read(images, batch_size=4):
    parts = range(-(-images.count // batch_size))
    return np.concatenate([part.images for part in images.batches(batch_size, parts)])


def test_every_kind_gives_the_same_images_in_sorted_order(tmp_path):
    folder = write_folder(tmp_path / "folder")
    (folder / "notes.txt").write_text("not an image")
    (folder / ".hidden.png").write_bytes(b"nor this")
    np.savez(tmp_path / "plain.npz", IMAGES[ORDER])
    np.savez_compressed(tmp_path / "packed.npz", other=np.zeros(3), arr_0=IMAGES[ORDER])
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        for name in reversed(NAMES):
            archive.write(folder / name, name)
        archive.writestr("__MACOSX/a/._00.png", "nor this")
    for name in ("folder", "plain.npz", "packed.npz", "images.zip"):
        images = open_images(tmp_path / name)
        assert (images.count, images.shape) == (11, (6, 5, 3))
        assert (read(images) == IMAGES[ORDER]).all(), name


@pytest.mark.parametrize(
    ("count", "batch_size", "num_processes"), [(1, 3, 2), (11, 4, 2), (11, 3, 5), (8, 8, 3)]
)
def test_processes_share_images_without_gaps_or_doubles(tmp_path, count, batch_size, num_processes):
    np.savez(tmp_path / "x.npz", IMAGES[:count])
    write_folder(tmp_path / "x", [f"{i:02}.png" for i in range(count)], IMAGES[:count])
    for path in (tmp_path / "x.npz", tmp_path / "x"):
        seen = []
        for process in range(num_processes):
            mine = range(process, -(-count // batch_size), num_processes)
            for part in open_images(path).batches(batch_size, mine):
                seen += zip(range(part.index * batch_size, count), part.images, strict=False)
        assert sorted(i for i, _ in seen) == list(range(count))
        assert all((image == IMAGES[i]).all() for i, image in seen)


def test_an_array_is_never_entirely_in_memory(tmp_path):
    size = 64 * 2**20
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "large.npz", np.zeros((size // (64 * 64 * 3), 64, 64, 3), np.uint8))
        tracemalloc.start()
        large = open_images(tmp_path / "large.npz")
        for _ in large.batches(16, range(1, large.count // 16, 2)):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < size / 16


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 8, 8, 3), np.float32), "arr_0 is float32 (4, 8, 8, 3), must be uint8"),
        (np.zeros((4, 8, 8), np.uint8), "arr_0 is uint8 (4, 8, 8), must be uint8 (N, H, W, C)"),
        (np.zeros((0, 8, 8, 3), np.uint8), "arr_0 is uint8 (0, 8, 8, 3), must be"),
        (np.asfortranarray(np.zeros((4, 8, 8, 3), np.uint8)), "arr_0 is uint8 (4, 8, 8, 3), must be"),
        (np.zeros((4, 3, 8, 8), np.uint8), "3, 8, 8), must be uint8 (N, H, W, C) in C order, with 1 to 4"),
        ({"images": IMAGES, "labels": np.zeros(11)}, "no item named 'arr_0.npy'"),
    ],
)
def test_arrays_that_are_not_images_are_refused(tmp_path, array, message):
    np.savez(tmp_path / "x.npz", **(array if isinstance(array, dict) else {"arr_0": array}))
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        open_images(tmp_path / "x.npz")
    assert "x.npz" in str(raised.value)
    with pytest.raises(ValueError, match=r"resolution=16 crops image files: it does not apply to .*x.npz"):
        open_images(tmp_path / "x.npz", resolution=16)


def test_damaged_arrays_are_refused(tmp_path):
    images = RNG.integers(0, 256, (50, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", images)
    whole = (tmp_path / "x.npz").read_bytes()
    middle = len(whole) // 2
    for data, message in (
        (whole[:middle], r"a.npz cannot be read as an .npz with arr_0"),
        (whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :], "a.npz is damaged"),
    ):
        (tmp_path / "a.npz").write_bytes(data)
        with pytest.raises(ValueError, match=message):
            for process in range(2):
                list(open_images(tmp_path / "a.npz").batches(20, range(process, 3, 2)))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_images(tmp_path / "nowhere")


def test_files_that_are_not_lossless_rgb_of_one_size_are_refused(tmp_path):
    def refused(folder, message):
        with pytest.raises(ValueError) as raised:
            read(open_images(folder))
        assert message in str(raised.value)

    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "has no images")
    Image.fromarray(IMAGES[0]).save(write_folder(tmp_path / "lossy") / "z.JPG")
    refused(tmp_path / "lossy", "z.JPG has a lossy format")
    for mode in ("L", "RGBA", "I;16"):
        folder = write_folder(tmp_path / mode)
        pixels = IMAGES[0, :, :, 0].astype(np.uint16) if mode == "I;16" else IMAGES[0]
        Image.fromarray(pixels).convert(mode).save(folder / "a/03.png")
        refused(folder, f"a/03.png cannot be read: image mode {mode}")
    deep = np.concatenate([np.zeros((6, 1), np.uint8), np.zeros((6, 30), np.uint8)], axis=1).tobytes()
    chunks = (b"IHDR" + struct.pack(">IIBBBBB", 5, 6, 16, 2, 0, 0, 0), b"IDAT" + zlib.compress(deep), b"IEND")
    packed = (struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks)
    (write_folder(tmp_path / "deep") / "a/03.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(packed))
    refused(tmp_path / "deep", "a/03.png cannot be read: image mode RGB with 16 bits must have 8 bits")
    Image.fromarray(IMAGES[0, :3]).save(write_folder(tmp_path / "sizes") / "b/05.png")
    refused(tmp_path / "sizes", "b/05.png is (3, 5, 3), a/00.png is (6, 5, 3)")


def test_with_a_resolution_images_of_any_kind_are_cropped(tmp_path):
    gradient = np.linspace(0, 255, 90)[None, :].repeat(40, axis=0).astype(np.uint8)
    tmp_path.joinpath("d").mkdir()
    Image.fromarray(gradient).save(tmp_path / "d/grey.jpg", quality=95)
    Image.fromarray(RNG.integers(0, 256, (30, 50, 3), dtype=np.uint8)).save(tmp_path / "d/colour.png")
    images = open_images(tmp_path / "d", resolution=16)
    assert (images.count, images.shape) == (2, (16, 16, 3))
    colour, grey = read(images)
    assert colour.std() > 10
    # The middle of the gradient: 40 of 90 columns, from the 25th on.
    expected = np.interp(25 + (np.arange(16) + 0.5) * 2.5 - 0.5, np.arange(90), gradient[0])
    np.testing.assert_allclose(grey.mean(axis=(0, 2)), expected, atol=4)


def turned(pixels, orientation):
    """Apply an EXIF orientation by the table of the standard: the sides of row 0 and column 0."""
    top, left = ["tl", "tr", "br", "bl", "lt", "rt", "rb", "lb"][orientation - 1]
    shown = pixels if top in "tb" else pixels.swapaxes(0, 1)
    return shown[:: -1 if "b" in (top, left) else 1, :: -1 if "r" in (top, left) else 1]


@pytest.mark.parametrize(
    ("suffix", "orientation"),
    [*(("png", orientation) for orientation in range(1, 9)), ("tiff", 6), ("webp", 6), ("jpg", 6)],
)
def test_images_are_read_as_viewers_show_them(tmp_path, suffix, orientation):
    pixels = np.kron(RNG.integers(0, 256, (2, 3, 3), dtype=np.uint8), np.ones((16, 16, 1), np.uint8))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(pixels).save(tmp_path / f"0.{suffix}", exif=exif)
    lossy = suffix in ("webp", "jpg")
    got = read(open_images(tmp_path, 32 if lossy else None))[0].astype(int)
    shown = Image.fromarray(np.ascontiguousarray(turned(pixels, orientation)))
    assert np.abs(got - np.asarray(centre_crop(shown, 32) if lossy else shown)).mean() <= (20 if lossy else 0)
    with (tmp_path / f"0.{suffix}").open("rb") as file:
        assert open_picture(file).size == shown.size


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0II"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_exif_is_ignored(tmp_path, exif):
    for name in ("0.png", "1.jpg"):
        Image.fromarray(IMAGES[0]).save(tmp_path / name, exif=exif)
        with (tmp_path / name).open("rb") as file:
            assert open_picture(file).size == (5, 6)


def published_crop(image, size):
    """center_crop_arr of [ADM]."""
    while min(*image.size) >= 2 * size:
        image = image.resize(tuple(x // 2 for x in image.size), resample=Image.BOX)
    scale = size / min(*image.size)
    pixels = np.array(image.resize(tuple(round(x * scale) for x in image.size), resample=Image.BICUBIC))
    top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
    return pixels[top : top + size, left : left + size]


@pytest.mark.parametrize("size", [(24, 41), (57, 25), (100, 67), (11, 13), (32, 65)])
def test_centre_crop_matches_the_reference_code(size):
    image = Image.fromarray(RNG.integers(0, 256, (*size, 3), dtype=np.uint8))
    assert np.array_equal(np.asarray(centre_crop(image, 16)), published_crop(image, 16))
