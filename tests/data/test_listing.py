import json
import zipfile

import numpy as np
import pytest
from PIL import Image

from data.images import open_images
from data.listing import list_images
from data.manifest import LatentManifest, class_warnings, first_classes
from evaluation.files import fingerprint

NAMES = ["b/2.png", "a/1.jpg", "a/deep/er/0.png", "c/0.webp"]


def write(folder, names=NAMES):
    """Write images, and empty folders where a name ends with a slash."""
    for i, name in enumerate(names):
        (folder / name if name[-1] == "/" else (folder / name).parent).mkdir(parents=True, exist_ok=True)
        if name.endswith((".txt", ".gif")):
            (folder / name).write_text("not an image")
        elif name[-1] != "/":
            Image.fromarray(np.full((4, 4, 3), i, np.uint8)).save(folder / name)
    return folder


def pack(folder, file):
    with zipfile.ZipFile(file, "w") as archive:
        for item in sorted(folder.rglob("*"), reverse=True):
            archive.write(item, item.relative_to(folder))
    return file


def test_class_folders_are_classes_in_a_folder_and_in_a_zip(tmp_path):
    folder = write(tmp_path / "folder", [*NAMES, ".hidden/0.png"])
    (folder / "a" / "notes.txt").write_text("no image")
    for path in (folder, pack(folder, tmp_path / "images.zip")):
        images = list_images(path)
        assert images.names == ["a/1.jpg", "a/deep/er/0.png", "b/2.png", "c/0.webp"]
        assert (images.labels.tolist(), images.num_classes) == ([0, 0, 1, 2], 3)
        assert (images.class_names, images.ignored) == (("a", "b", "c"), ("a/notes.txt",))
        with images.open("b/2.png") as file:
            assert np.asarray(Image.open(file))[0, 0, 0] == 0


@pytest.mark.parametrize(
    ("expected", "names"),
    [
        (("n01", "n02"), ["ILSVRC/train/n01/0.png", "ILSVRC/train/n02/0.png"]),
        (("n01", "n02"), ["train/n01/0.png", "train/n02/0.png", "devkit/readme.txt"]),
        (("cat", "dog"), ["cat/day/0.png", "dog/day/0.png"]),
        (("a", "b"), ["a/a/0.png", "a/b/0.png"]),
        (("only",), ["only/0.png", "only/1.png"]),
        (None, ["0.png", "1.png"]),
        (("plane", "train", "value"), ["train/0.png", "plane/0.png", "value/0.png"]),  # a railway
        (("test_tube", "train_station"), ["test_tube/0.png", "train_station/0.png"]),
        (("b",), ["b/0.png", "@eaDir/b/0.jpg", "b/@eaDir/0.jpg", "lost+found/", "$RECYCLE.BIN/"]),
        (("a", "b", "c"), ["a/0.png", "b/0.gif", "b/1.png", "c/0.png"]),
        ("folder b has no images", ["a/0.png", "b/", "c/0.png"]),
        ("folder b has no images of a known format", ["a/0.png", "b/0.gif", "c/0.png"]),
        ("folder x/b has no images", ["x/a/0.png", "x/b/", "x/c/0.png"]),
        ("folder x/z has no images", ["x/y/a/0.png", "x/y/b/0.png", "x/z/"]),
        ("train, val are splits", ["train/a/0.png", "val/a/0.png"]),
        ("train2017, val2017 are splits", ["x/train2017/0.png", "x/val2017/0.png"]),
        ("Training, test_set are splits", ["Training/0.png", "test_set/0.png", "extra/0.png"]),
        ("1.png is not in a class folder", ["a/0.png", "1.png"]),
        ("has no images", ["notes.txt"]),
    ],
)
def test_folders_are_classes_or_refused(tmp_path, names, expected):
    """Skipping a class without images would change the numbers of all later classes."""
    folder = write(tmp_path / "images", names)
    for path in (folder, pack(folder, tmp_path / "images.zip")):
        if isinstance(expected, str):
            with pytest.raises(ValueError, match=expected):
                list_images(path)
        else:
            assert list_images(path).class_names == expected
            assert (list_images(path).labels is None) == (expected is None)


def test_classes_behind_links_are_found(tmp_path):
    write(tmp_path / "real", ["a/0.png", "b/deep/0.png"])
    (tmp_path / "linked/.hidden").mkdir(parents=True)
    (tmp_path / "linked/.hidden/back").symlink_to("..")
    (tmp_path / "linked" / "z").symlink_to(tmp_path / "real" / "a")
    (tmp_path / "linked" / "y").symlink_to(tmp_path / "real" / "b")
    assert list_images(tmp_path / "linked").names == ["y/deep/0.png", "z/0.png"]
    assert list_images(tmp_path / "linked").class_names == ("y", "z")


@pytest.mark.parametrize("links", [{"up": "."}, {"x": ".", "y": "."}, {"cats": "cat"}, {"dog/back": ".."}])
def test_a_folder_that_links_lead_to_twice_is_refused(tmp_path, links):
    """Otherwise its images would count several times, or endlessly."""
    write(tmp_path / "images", ["cat/0.png", "dog/1.png"])
    for name, to in links.items():
        (tmp_path / "images" / name).symlink_to(to)
    for read in (list_images, open_images, fingerprint):
        with pytest.raises(ValueError, match=r"images/.* is reached twice, through links") as raised:
            read(tmp_path / "images")
        assert len(str(raised.value).splitlines()) == 1


def test_a_fingerprint_follows_links(tmp_path):
    write(tmp_path, ["a/cat/0.png", "b/dog/0.png"])
    (tmp_path / "a" / "linked").symlink_to(tmp_path / "b")
    before = fingerprint(tmp_path / "a")
    (tmp_path / "b" / "dog" / "0.png").write_bytes(b"x")
    assert fingerprint(tmp_path / "a") != before


def test_a_list_gives_paths_and_classes(tmp_path):
    write(tmp_path / "images", ["a b/0.png", "c/1.png", "d/2.png"])
    (tmp_path / "names.txt").write_text("images/a b/0.png dog\nimages/d/2.png cat\n\nimages/c/1.png  dog\n")
    named = list_images(tmp_path / "names.txt")
    assert named.names == ["images/a b/0.png", "images/d/2.png", "images/c/1.png"]
    assert (named.labels.tolist(), named.class_names) == ([1, 0, 1], ("cat", "dog"))
    (tmp_path / "numbers.tsv").write_text("images/a b/0.png\t5\nimages/d/2.png\t0\n")
    numbered = list_images(tmp_path / "numbers.tsv")
    assert (numbered.labels.tolist(), numbered.num_classes, numbered.class_names) == ([5, 0], 6, None)
    with numbered.open("images/d/2.png") as file:
        assert np.asarray(Image.open(file))[0, 0, 0] == 2


def test_dataset_json_gives_the_classes(tmp_path):
    folder = write(tmp_path / "edm", ["00000/img0.png", "00000/img1.png", "00001/img2.png"])
    labels = [["00000/img1.png", 7], ["00000/img0.png", 3], ["00001/img2.png", 0]]
    (folder / "dataset.json").write_text(json.dumps({"labels": labels}))
    for path in (folder, pack(folder, tmp_path / "edm.zip")):
        images = list_images(path)
        assert (images.labels.tolist(), images.num_classes) == ([3, 7, 0], 8)
    (folder / "dataset.json").write_text(json.dumps({"labels": None}))
    assert list_images(folder).labels is None


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("[]", "dataset.json must have the form"),
        ('["00000/img0.png", 3], ["00000/img0.png", 1]', "lists a file twice"),
        ('["00000/img0.png", 3]', r"must have a label in \[0, 999999\] for 00000/img1.png \(1 of \d+\)"),
        *(
            (f'["00000/img0.png", 3], ["00000/img1.png", {label}]', "must have a label in .* for")
            for label in (-1, '"cat"', 10**30, 2**62, 1_000_000, "true")
        ),
    ],
)
def test_a_wrong_dataset_json_is_one_clear_error(tmp_path, labels, message):
    folder = write(tmp_path / "edm", ["00000/img0.png", "00000/img1.png"])
    (folder / "dataset.json").write_text(f'{{"labels": [{labels}]}}')
    with pytest.raises(ValueError, match=message):
        list_images(folder)
    with pytest.raises(ValueError, match=r"edm/dataset.json is not at the top: set source to the folder"):
        list_images(tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a\\0.png", "b\\", "b\\1.png", "c/0.png"], None),  # of older tools of Windows
        (["./", "./a/", "./a/0.png", "./b/1.png", "./c/0.png"], None),  # of bsdtar
        (["/a/0.png", "/b/1.png", "/c/0.png"], None),
        (["a\\0.png", "b\\", "c\\0.png"], "folder b has no images"),
        (["a/0.png", "b/1.png", "a/0.png"], "has a/0.png twice"),
        (["a/0.png", "b/1.png", "a\\0.png"], "has a/0.png twice"),
        (["a/0.png", "b/1.png", "../../c/0.png"], r"has \.\./\.\./c/0.png, a path outside of it"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_zips_of_any_tool_have_the_same_classes(tmp_path, names, message):
    image = (write(tmp_path, ["0.png"]) / "0.png").read_bytes()
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for name in names:
            archive.writestr(name, b"" if name[-1] in "/\\" else image)
    if message:
        with pytest.raises(ValueError, match=message):
            list_images(tmp_path / "x.zip")
        return
    images = list_images(tmp_path / "x.zip")
    assert (images.names, images.class_names) == (["a/0.png", "b/1.png", "c/0.png"], ("a", "b", "c"))
    assert images.open("b/1.png").read() == image


LISTED = "images/a b/0.png\t1\nimages/c/1.png\t10\nimages/d/2.png\t2\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (LISTED.encode("utf-8-sig"), None),
        (LISTED.replace("\n", "\r\n").encode(), None),
        (LISTED.replace("\n", " \n").replace("\t", " \t ").encode(), None),
        (LISTED.replace("10", "-1").encode(), "class -1 must be in"),
        (LISTED.replace("10", "1000000").encode(), "class 1000000 must be in .*999999"),
        (LISTED.replace("\t", ",").encode(), "separated by a space or a tab|not found"),
        (LISTED.replace("1\n", "train\n").replace("2\n", "val\n").encode(), "train, val are splits"),
        (b"one-word\n", "line 'one-word' must be a path and a class"),
        (b"nowhere.png 3\n", r"nowhere.png not found \(1 of 1\)"),
        (b"\n", "lists no images"),
        (b"edm/\xff.png 3\n", "list.txt must be a list in UTF-8"),
        (None, "list.txt cannot be read as a folder, zip or tar"),
    ],
)
def test_lists_of_any_tool_have_the_same_classes(tmp_path, data, message):
    write(tmp_path / "images", ["a b/0.png", "c/1.png", "d/2.png"])
    if data is not None:
        (tmp_path / "list.txt").write_bytes(data)
    if message:
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            list_images(tmp_path / "list.txt")
    else:
        images = list_images(tmp_path / "list.txt")
        assert (images.labels.tolist(), images.class_names) == ([1, 10, 2], None)


def manifest(**changes):
    return LatentManifest(9, (3, 4, 4), "float16", "samples", encoder="identity", **changes)


def test_numbers_of_classes_and_classes_without_images_are_printed():
    names = tuple(sorted(map(str, range(12))))
    numbered = manifest(num_classes=12, class_names=names)
    assert first_classes(numbered) == "12: 0, 1, 2 10, 3 11, 4 2, 5 3, 6 4, 7 5, 8 6, 9 7, ..."
    assert class_warnings(numbered)[0].startswith("class 2 is 10, class 3 is 11, class 4 is 2")
    gaps = manifest(num_classes=9, untrained_classes=(0, 2, 3, 4, 8))
    assert class_warnings(gaps)[0].startswith("5 of 9 classes have no images")
    assert class_warnings(gaps)[0].endswith(": 0, 2, 3, 4, 8")
    assert gaps.trained_classes.tolist() == [1, 5, 6, 7]
