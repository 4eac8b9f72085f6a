"""Captions of photographs: read from files, encoded, stored, and drawn in training."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from data import Words, encode, open_latents, stream, text_encoder_for
from data.captions import Captions, read_captions
from data.listing import list_images
from data.tars import index_tars
from data.text import LanguageModel
from evaluation import ClipScore
from evaluation.features import FeatureSet
from evaluation.statistics import AllFeatures
from runtime.errors import UserError
from tests.data.test_importers import write_tar
from tests.data.test_latents import MANIFEST
from tests.data.test_listing import pack
from tests.runs import composed, metrics, tiny_run, tiny_trainer

CAPTIONS = ["a red roof", "The flower, yellow!", "two roofs"]
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CLIP = SIZES | {"vocab_size": 6, "eos_token_id": 1, "pad_token_id": 0}


def write_images(folder, count=6):
    """Write images with one or two captions each; return their names."""
    folder.mkdir(parents=True)
    for i in range(count):
        pixels = np.random.default_rng(i).integers(0, 256, (40, 32, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        captions = [CAPTIONS[i % 3], *["a roof"] * (i % 2)]
        (folder / f"{i}.txt").write_text("\n".join(captions) + "\n\n")
    return [f"{i}.png" for i in range(count)]


def encoded(source, out, *overrides):
    options = (f"source={source}", f"out={out}", "encoder=identity", "resolution=8", "hflip=false")
    encode.main(composed(*options, "num_held_out=2", *overrides, config_name="encode"))
    return open_latents(out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captions")
    write_images(folder / "images")
    encoded(folder / "images", folder / "latents", "captions=beside")
    return folder


def test_the_command_that_is_printed_trains_on_captions(folder, tmp_path, capsys):
    data = f"data.path={folder / 'latents'}"
    encoded(folder / "images", tmp_path / "out", "captions=beside")
    printed = capsys.readouterr().out
    assert "6 images of no classes, captions of up to 3 tokens, 2 of them held out" in printed
    command = f"train.py model=tread model/conditioning=prefix data=latents data.path={tmp_path / 'out'}"
    assert command in printed
    for keys, is_warned in (((), True), (("model/conditioning=prefix",), False)):
        tiny_trainer(tmp_path / f"run_{is_warned}", "data=latents", data, "train.batch_size=2", *keys)
        assert ("the captions of the data are not used" in capsys.readouterr().out) == is_warned


def test_long_captions_are_no_prompts(tmp_path):
    write_images(tmp_path / "images", 3)
    (tmp_path / "images/0.txt").write_text("a" * 5000)
    captions = Captions("beside", list_images(tmp_path / "images"), "words", 77, torch.device("cpu"))
    assert captions.describe([0, 1, 2])["prompts"] == CAPTIONS[1:]
    with pytest.raises(ValueError, match="all captions have more than 4096 letters"):
        captions.describe([0])


def test_captions_beside_images_become_words(folder):
    dataset = open_latents(folder / "latents")
    text = dataset.manifest.text
    assert text["words"] == ["a", "flower", "red", "roof", "roofs", "the", "two", "yellow"]
    assert (text["num_tokens"], text["num_captions"], dataset.manifest.num_classes) == (3, 2, 0)
    assert dataset.text.dtype == np.int16 and dataset.text.shape == (6, 2, 3)
    ids = np.arange(6)
    plain = ["a red roof", "the flower yellow", "two roofs"] * 2
    assert dataset.captions(ids).tolist() == plain
    words = Words(text["words"], 3)
    second = dataset.read_text(ids, np.ones(6, dtype=int))
    expected = words([plain[i] if i % 2 == 0 else "a roof" for i in range(6)])  # one caption: repeated
    assert np.array_equal(second, expected)
    assert text["prompts"] == [CAPTIONS[i % 3] for i in dataset.held_out_ids]
    shape = {"num_tokens": 3, "vocab_size": 8, "num_features": None}
    assert dataset.manifest.text_shape == shape


def test_archives_and_annotations_give_the_same_captions(folder, tmp_path, capsys):
    images = folder / "images"
    pack(images, tmp_path / "images.zip")
    (tmp_path / "shards").mkdir()
    for shard in range(2):
        members = []
        for i in range(3 * shard, 3 * shard + 3):
            captions = {"caption": (images / f"{i}.txt").read_text().splitlines()}
            members.append((f"{i}.png", (images / f"{i}.png").read_bytes()))
            members.append((f"{i}.json", json.dumps(captions).encode()))
        write_tar(tmp_path / f"shards/{shard}.tar", members)
    coco = {"images": [], "annotations": []}
    for i in reversed(range(6)):
        coco["images"].append({"id": 10 * i, "file_name": f"{i}.png"})
        for caption in (images / f"{i}.txt").read_text().splitlines():
            coco["annotations"].append({"image_id": 10 * i, "caption": caption})
    (tmp_path / "coco.json").write_text(json.dumps(coco))
    expected = open_latents(folder / "latents")
    sources = {"images.zip": "beside", "shards": "beside", "coco": tmp_path / "coco.json"}
    for name, captions in sources.items():
        source = images if name == "coco" else tmp_path / name
        dataset = encoded(source, tmp_path / f"latents_{name}", f"captions={captions}")
        assert np.array_equal(dataset.stored, expected.stored), name
        assert np.array_equal(dataset.text, expected.text), name
    hint = "captions=beside would read .txt files"
    assert hint not in capsys.readouterr().out
    encoded(images, tmp_path / "without")
    assert hint in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("unread", b"", r"must have a caption for 3.png \(1 of 6 have none\)"),
        ("3.txt", b"\n \n", "must have a caption for 3.png"),
        ("3.txt", b"\xff\xfe\xfa", "3.txt must have captions in UTF-8"),
        ("3.json", b"{}", "3.json must have captions"),
        ("3.json", b"[" * 900, "3.json must have captions"),
        ("3.json", b'{"caption": [null]}', "must be text"),
    ],
    ids=["missing", "empty", "bytes", "json", "nested", "null"],
)
def test_an_image_without_a_caption_is_refused(name, content, message, tmp_path):
    write_images(tmp_path / "images")
    (tmp_path / "images/3.txt").unlink()
    (tmp_path / "images" / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_captions("beside", list_images(tmp_path / "images"))


@pytest.mark.parametrize("content", ["{", "[]", '{"images": [{"id": 1}], "annotations": []}', "[" * 9000])
def test_damaged_annotations_are_refused(content, tmp_path):
    write_images(tmp_path / "images", 1)
    (tmp_path / "coco.json").write_text(content)
    with pytest.raises(ValueError, match=r"must be annotations of COCO|coco.json is damaged"):
        read_captions(str(tmp_path / "coco.json"), list_images(tmp_path / "images"))


def test_damaged_tars_are_refused(tmp_path):
    """Also one that ends between two files, or has a wrong header, where tarfile stops without an error."""
    names = write_images(tmp_path / "images", 3)
    write_tar(tmp_path / "0.tar", [(name, (tmp_path / "images" / name).read_bytes()) for name in names])
    whole = (tmp_path / "0.tar").read_bytes()
    second = whole.index(b"1.png")
    damaged = whole[: second + 148] + b"x" + whole[second + 149 :]
    for content in (whole[:900], whole[:second], whole[: second + 100], damaged):
        (tmp_path / "0.tar").write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read as an uncompressed tar"):
            index_tars([tmp_path / "0.tar"])
    write_tar(tmp_path / "0.tar", [("a/b.png", b""), ("./a/b.png", b"")])
    with pytest.raises(ValueError, match=r"two files are named 0/a/b.png"):
        index_tars([tmp_path / "0.tar"])


def test_tars_of_a_folder_have_no_hidden_files_and_no_classes(tmp_path):
    """As `tar cf 0.tar .` writes them, also on a Mac."""
    write_tar(tmp_path / "0.tar", [("./cat/0.png", b"an image"), ("./cat/._0.png", b"a fork")])
    images = list_images(tmp_path / "0.tar")
    assert images.names == ["0/cat/0.png"] and images.labels is None and images.num_classes == 0


def test_a_tar_beside_class_folders_is_ignored(tmp_path):
    for name in ("a", "b"):
        write_images(tmp_path / "images" / name, 2)
    write_tar(tmp_path / "images/old.tar", [("0.png", b"an image")])
    images = list_images(tmp_path / "images")
    assert images.class_names == ("a", "b") and len(images.names) == 4 and "old.tar" in images.ignored


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["text_encoder=t5"], "text_encoder=t5 needs captions"),
        (["captions=missing.json"], "captions=missing.json not found"),
        (["captions=beside", "max_text_tokens=0"], "max_text_tokens=0"),
        (["captions=beside", "max_text_tokens=513"], "max_text_tokens=513 must be at most 512"),
        (["captions=beside", "max_text_tokens=10"], "max_text_tokens=10 needs a language model"),
    ],
)
def test_wrong_requests_are_refused(options, message, folder, tmp_path):
    with pytest.raises((UserError, SystemExit), match=message):
        encoded(folder / "images", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_words_must_be_known_and_captions_short_enough():
    words = Words(("a", "flower"), 2)
    assert words(["A flower!", "", "flower"]).tolist() == [[1, 2], [0, 0], [2, 0]]
    with pytest.raises(ValueError, match="'a tree': tree must be among the words of the data: a, flower"):
        words(["a tree"])
    with pytest.raises(ValueError, match="'a a a' has 3 words, must have at most 2"):
        words(["a a a"])
    with pytest.raises(ValueError, match="0 different words, up to 0 in a caption"):
        Words.of_captions(["!", ""])


def test_the_caption_of_a_step_depends_on_seed_and_step_alone(folder):
    dataset = open_latents(folder / "latents")

    def read(start, rank=0, world_size=1, seed=0):
        options = {"batch_size": 4, "micro_batch_size": 2, "num_workers": 0, "pin_memory": False}
        place = {"rank": rank, "world_size": world_size, "seed": seed}
        return iter(stream(dataset, start, **options, **place, with_text=True))

    def texts(batches, count):
        return [next(batches).labels for _ in range(count)]

    all_texts = texts(read(0), 12)
    resumed = texts(read(3), 6)
    assert all(torch.equal(a, b) for a, b in zip(resumed, all_texts[6:], strict=True))
    both = [texts(read(0, rank, 2), 6) for rank in range(2)]
    shared = [batch for pair in zip(*both, strict=True) for batch in pair]
    assert all(torch.equal(a, b) for a, b in zip(shared, all_texts, strict=True))
    choices = {tuple(row) for batch in texts(read(0), 200) for row in batch.tolist()}
    assert choices == {tuple(row) for row in dataset.text[dataset.train_ids].reshape(-1, 3).tolist()}


@pytest.fixture(scope="module")
def language_models(tmp_path_factory):
    """A tokenizer of a few words, and small random models of three families."""
    transformers = pytest.importorskip("transformers", reason="`make finetune` installs it")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {"<pad>": 0, "</s>": 1, "a": 2, "red": 3, "roof": 4, "<unk>": 5}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    folder, nets = tmp_path_factory.mktemp("models"), {}
    torch.manual_seed(0)
    nets["clip"] = transformers.CLIPTextModel(transformers.CLIPTextConfig(**CLIP))
    t5 = transformers.T5Config(vocab_size=6, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    nets["t5"] = transformers.T5EncoderModel(t5)
    qwen = transformers.Qwen2Config(vocab_size=6, num_key_value_heads=2, **SIZES)
    nets["qwen"] = transformers.Qwen2Model(qwen)
    for name, net in nets.items():
        net.eval().save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    return SimpleNamespace(folder=folder, nets=nets, tokenizer=fast)


@pytest.mark.parametrize("name", ["clip", "t5", "qwen"])
def test_embeddings_are_the_last_hidden_states_without_padding(name, language_models, folder, tmp_path):
    from transformers import AutoTokenizer

    path = language_models.folder / name
    keys = ("captions=beside", f"text_encoder={path}", "max_text_tokens=6")
    dataset = encoded(folder / "images", tmp_path / "latents", *keys)
    text = dataset.manifest.text
    assert dataset.manifest.text_shape == {"num_tokens": 6, "vocab_size": None, "num_features": 16}
    assert dataset.text.dtype == np.float16 and dataset.text.shape == (6, 2, 6, 16)
    tokens = AutoTokenizer.from_pretrained(path)("a red roof", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        hidden = language_models.nets[name](input_ids=tokens).last_hidden_state[0]
    used = len(hidden)
    np.testing.assert_allclose(dataset.text[0, 0, :used], hidden, rtol=2e-3, atol=2e-3)
    assert not dataset.text[0, 0, used:].any() and dataset.captions(np.arange(2)) is None
    again = text_encoder_for(text, torch.device("cpu"))(["a red roof"])
    np.testing.assert_allclose(again[0], dataset.text[0, 0], rtol=1e-3, atol=1e-3)
    other = {"clip": "t5", "t5": "qwen", "qwen": "clip"}[name]
    with pytest.raises(ValueError, match=f"{other} must have the weights of"):
        text_encoder_for(text, torch.device("cpu"), str(language_models.folder / other))
    if name != "clip":
        return
    with pytest.raises(ValueError, match=r"max_text_tokens=512 is not possible with .*/clip: "):
        LanguageModel(str(path), 512, torch.device("cpu"))
    run = ("data=latents", f"data.path={tmp_path / 'latents'}", "model/size=tiny", "model/conditioning=cross")
    small = ("model.hidden_size=16", "model.depth=6", "train.batch_size=2", "train.total_steps=2")
    watched = ("train.log_every=1", "train.save_every=2", "train.eval_every=2", "train.sample_every=null")
    tiny_run(tmp_path / "run", *run, *small, *watched)
    assert np.isfinite(metrics(tmp_path / "run")[-1]["val_loss_dense"])


def test_a_language_model_without_some_of_its_weights_is_refused(language_models, tmp_path):
    shutil.copytree(language_models.folder / "t5", tmp_path / "t5")
    weights = load_file(file := tmp_path / "t5/model.safetensors")
    first = next(name for name in weights if "SelfAttention.q" in name)
    save_file({k: v for k, v in weights.items() if k != first}, file, {"format": "pt"})
    with pytest.raises(ValueError, match="is missing in its weights"):
        LanguageModel(str(tmp_path / "t5"), 6, torch.device("cpu"))
    file.unlink()
    torch.save(weights, tmp_path / "t5/pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be loaded by transformers"):
        LanguageModel(str(tmp_path / "t5"), 6, torch.device("cpu"))


def test_the_clip_score_is_the_mean_cosine(language_models, tmp_path):
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    torch.manual_seed(1)
    net = CLIPTextModelWithProjection(CLIPTextConfig(projection_dim=8, **CLIP)).eval()
    net.save_pretrained(tmp_path)
    language_models.tokenizer.save_pretrained(tmp_path)
    captions, images = ["a red roof", "a roof"], np.random.default_rng(0).standard_normal((2, 8))
    features = {(AllFeatures, "clip"): AllFeatures(8).update(images, 0)}
    samples = FeatureSet(features, labels=np.array(captions))
    metric = ClipScore("clip", str(tmp_path))
    metric.prepare(samples.labels)
    score = metric(FeatureSet(), samples)["clip_score"]
    with torch.no_grad():
        tokens = [language_models.tokenizer(text, return_tensors="pt") for text in captions]
        texts = torch.cat([net(**row).text_embeds for row in tokens]).double().numpy()
    cosines = (texts * images).sum(1) / np.linalg.norm(texts, axis=1) / np.linalg.norm(images, axis=1)
    assert score == pytest.approx(100 * cosines.mean(), rel=1e-5)
    with pytest.raises(ValueError, match=r"text_model=.* cannot be loaded by transformers"):
        ClipScore("clip", str(tmp_path / "missing")).prepare(samples.labels)


OF_WORDS = {"encoder": "words", "num_tokens": 3, "num_captions": 1, "words": ["a"], "prompts": ["a"]}
OF_MODEL = {"encoder": "m", "weights_hash": "h", "num_tokens": 3, "num_captions": 1, "num_features": 4}
OF_MODEL["prompts"] = ["a"]
WRONG_WORDS = [{"encoder": None}, {"num_tokens": 0}, {"num_tokens": 513}, {"num_captions": True}]
WRONG_WORDS += [{"words": "abc"}, {"words": ["a"] * 32_768}, {"prompts": ["a"] * 1001}, {"prompts": [1]}]
WRONG_WORDS += [{"words": []}, {"prompts": ["a" * 4097]}]
WRONG_MODEL = [{"words": ["a"]}, {"weights_hash": None}, {"num_features": 2**18}]
WRONG_TEXTS = [5, [], {}, {key: value for key, value in OF_WORDS.items() if key != "words"}]
WRONG_TEXTS += [OF_WORDS | wrong for wrong in WRONG_WORDS] + [OF_MODEL | wrong for wrong in WRONG_MODEL]


@pytest.mark.parametrize("text", WRONG_TEXTS, ids=lambda text: str(text)[:60])
def test_a_manifest_with_another_description_of_captions_is_refused(text):
    for valid in (OF_WORDS, OF_MODEL, None):
        assert replace(MANIFEST, text=valid).text == valid
    with pytest.raises(ValueError, match=r"^text=.* must be null, or have "):
        replace(MANIFEST, text=text)


def test_a_word_that_the_vocabulary_does_not_have_is_refused(folder, tmp_path):
    shutil.copytree(folder / "latents", tmp_path / "latents")
    text = np.load(tmp_path / "latents/text.npy")
    text[0, 0, 0] = 9
    np.save(tmp_path / "latents/text.npy", text)
    with pytest.raises(ValueError, match=r"text\.npy has ids \d\.\.9, not in \[0, 8\]"):
        open_latents(tmp_path / "latents").read_text(np.arange(6))
