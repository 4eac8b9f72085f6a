"""The proof of adapters: models that hide bypassing tokens, inputs of diffusers, errors and the table."""

import inspect
from functools import partial
from importlib.metadata import version

import pytest
import torch

from routing import Route, attach, detach, random_router
from routing.adapters.families import FAMILIES, REFUSED, __main__
from routing.adapters.proof import Proof, prove
from tests.programs import ROOT
from tests.routing.models import MODELS, SMALL, built

MAX_ERROR = 1e-6  # in double precision, of what routes change
NUM_TOKENS = {"HunyuanVideoTransformer3DModel, token replacement": 12}  # the first frame is given
WINDOWS = [Route(0.5, 1, -2), Route(0.75, 0, -1), Route(0.25, 0, 0), Route(0.25, 2, 2)]


def check(model, adapter, arguments, num_tokens, windows=WINDOWS, bound=MAX_ERROR):
    """Prove windows, and check T: a proof takes it from the adapter."""
    for window in windows:
        proof = prove(model, adapter, arguments, window)
        assert proof.dense == 0 and proof.routed < bound
    lengths = []

    def router(x, num_kept, /, **options):
        lengths.append(x.shape[1])
        return random_router(x, num_kept, **options)

    attach(model, WINDOWS[:1], adapter=adapter, router=router)
    model(**arguments)
    detach(model)
    assert lengths == [num_tokens]


def texts_of_other_lengths(model, arguments):
    model.register_to_config(min_num_gist_tokens=1, gist_min_text_len=0, gist_max_text_len=2)
    return arguments


def without_reference(model, arguments):
    return {**arguments, "image_cond_hidden_states": None, "image_cond_ids": None}


def with_a_reference_as_large(model, arguments):
    """The reference attends to itself between the blocks."""
    positions = torch.nn.functional.pad(SMALL.positions.to(arguments["img_ids"]), (0, 1)) + 10
    reference = torch.randn_like(arguments["hidden_states"])
    return {**arguments, "image_cond_hidden_states": reference, "image_cond_ids": positions}


def not_square(model, arguments):
    return {**arguments, "hidden_states": arguments["hidden_states"][..., :4]}


def text_of_first_sample(model, arguments):
    return {name: x if name.startswith("indices") else x[:1] for name, x in arguments.items()}


def a_timestep_for_each_token(model, arguments):
    shape = arguments["indicator"].shape if "indicator" in arguments else (2, 16)
    return {**arguments, "timestep": torch.rand(shape, dtype=torch.float64)}


def with_references(model, arguments):
    """Two reference images of three tokens. Pipelines put each into its own plane."""
    x, of_image = arguments["hidden_states"], arguments["img_ids"]
    ids = [of_image, *(of_image[:3] + plane * (torch.arange(of_image.shape[1]) == 0) for plane in (1, 2))]
    tokens = torch.cat([x, torch.randn_like(x[:, :6])], dim=1)
    further = arguments.get("joint_attention_kwargs", {})
    further = {key: torch.nn.functional.pad(mask, (0, 6), value=True) for key, mask in further.items()}
    given = {"joint_attention_kwargs": further} if further else {}
    return {**arguments, "hidden_states": tokens, "img_ids": torch.cat(ids), **given}


def with_images(model, arguments):
    """Two reference images of 2 x 3 tokens."""
    x, shapes = arguments["hidden_states"], [(1, 4, 4), (1, 2, 3), (1, 2, 3)]
    tokens = torch.cat([x, torch.randn_like(x[:, :12])], dim=1)
    return {**arguments, "hidden_states": tokens, "img_shapes": [shapes] * len(x), "attention_kwargs": {}}


def with_images_that_have_no_noise(model, arguments):
    for module in (model, *model.transformer_blocks):
        module.zero_cond_t = True
    return with_images(model, arguments) | {"additional_t_cond": torch.tensor([0, 1, 0, 1])}


def residuals(num_tokens):
    """Residuals by layer, but not after the last layers of windows: bypassing tokens would get them."""
    return {i: torch.randn(2, num_tokens, 32, dtype=torch.float64) for i in (1, 3)}


def masked_with_residuals(model, arguments):
    """FLUX: two double blocks, then four single ones."""
    by_layer, sees = residuals(16), torch.rand(2, 1, 21, 21) > 0.3
    none = torch.zeros_like(by_layer[1])
    return {
        **arguments,
        "joint_attention_kwargs": {"attention_mask": sees | torch.eye(21, dtype=torch.bool)},
        "controlnet_block_samples": [none, by_layer[1]],
        "controlnet_single_block_samples": [none, by_layer[3], none, none],
        "controlnet_blocks_repeat": True,
    }


def masked(model, arguments):
    return {**arguments, "attention_mask": (torch.rand(2, 16) > 0.3).double()}


def with_residuals(model, arguments, key="controlnet_block_samples"):
    by_layer = residuals(16)
    none = torch.zeros_like(by_layer[1])
    return {**arguments, key: [by_layer.get(i, none) for i in range(6)]}


def with_residuals_by_layer(model, arguments):
    """The sequence has 32 tokens of the image and 64 of the text, with padding."""
    return {**arguments, "controlnet_block_samples": residuals(96)}


def in_a_padded_sequence(model, arguments):
    """Patches of the image and four others."""
    ids = torch.nn.functional.pad(SMALL.positions, (0, 0, 0, 4)).expand(2, -1, -1)
    packed = {"hidden_states": torch.randn(2, 20, 64).double(), "img_ids": ids, "img_sizes": [(4, 4)] * 2}
    return {**arguments, **packed, "hidden_states_masks": (torch.arange(20) < 16).double().expand(2, -1)}


def with_keyframes(model, arguments):
    """Six tokens after the video."""
    more = {"hidden_states": torch.randn(2, 22, 128), "timestep": torch.randint(1000, (2, 22))}
    more |= {"video_coords": torch.rand(2, 3, 22, 2), "video_keyframes_mask": torch.ones(2, 22, 1)}
    more["video_self_attention_mask"] = (torch.rand(2, 22, 22) > 0.3).float()
    return arguments | {key: value.double() if key != "timestep" else value for key, value in more.items()}


def with_layers(model, arguments):
    """Two layers, and the image that they were taken from as the last entry."""
    from diffusers.models.transformers.transformer_qwenimage import QwenEmbedLayer3DRope

    model.register_to_config(use_layer3d_rope=True)
    model.pos_embed = QwenEmbedLayer3DRope(10000, list(model.config.axes_dims_rope), scale_rope=True)
    return with_images(model, arguments)


OTHERS = [
    ("BriaFiboTransformer2DModel", with_references, 16),
    ("Flux2Transformer2DModel", with_references, 16),
    ("LongCatImageTransformer2DModel", with_references, 16),
    ("FluxTransformer2DModel", masked_with_residuals, 16),
    ("FluxTransformer2DModel", with_references, 16),
    ("LTX2VideoTransformer3DModel, 2.3", with_keyframes, 16),
    ("PixArtTransformer2DModel", masked, 16),
    ("WanTransformer3DModel", a_timestep_for_each_token, 16),
    ("ChronoEditTransformer3DModel", a_timestep_for_each_token, 16),
    ("SD3Transformer2DModel", partial(with_residuals, key="block_controlnet_hidden_states"), 16),
    ("QwenImageTransformer2DModel", with_images, 16),
    ("QwenImageTransformer2DModel", with_images_that_have_no_noise, 16),
    ("QwenImageTransformer2DModel", with_layers, 16 + 6),
    ("BriaFibo2Transformer2DModel", texts_of_other_lengths, 16),
    ("Flux3Transformer2DModel", without_reference, 16),
    ("Flux3Transformer2DModel", with_a_reference_as_large, 16),
    ("HiDreamImageTransformer2DModel", not_square, 8),
    ("HiDreamImageTransformer2DModel", in_a_padded_sequence, 16),
    ("QwenImageTransformer2DModel", with_residuals, 16),
    ("ZImageTransformer2DModel", with_residuals_by_layer, 16),
    ("HunyuanVideoFramepackTransformer3DModel", text_of_first_sample, 16),
    ("Ideogram4Transformer2DModel", a_timestep_for_each_token, 16),
]


class OtherProcessor:
    """An attention processor that no adapter knows."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_class_refuses_what_its_adapter_does_not_know(name):
    model, arguments = built(name)
    accepts, names = FAMILIES[name].accepts, [*inspect.signature(type(model).forward).parameters][1:]
    wrong = {key: {key: object()} for key in names if key not in accepts}
    dicts = [key for key in names if key.endswith("attention_kwargs") and key in accepts]
    wrong |= {rf"{key}\.other": {key: {"other": 1}} for key in dicts}
    attach(model, WINDOWS[:1])
    for message, argument in wrong.items():
        with pytest.raises(ValueError, match=f"^{message} of {name} is not supported with routing"):
            model(**{**arguments, **argument})
    next(module for module in model.modules() if hasattr(module, "processor")).processor = OtherProcessor()
    with pytest.raises(ValueError, match=f"^OtherProcessor of {name} is not supported with routing"):
        model(**arguments)


@pytest.mark.parametrize(
    ("name", "key", "change", "message"),
    [
        ("Ideogram4Transformer2DModel", "indicator", lambda x: x.flip(1), "must come last"),
        ("JoyImageEditTransformer3DModel", "hidden_states", lambda x: x.unsqueeze(1), "a row of reference"),
        ("JoyImageEditPlusTransformer3DModel", "shape_list", lambda x: [x[0], [(1, 3, 4)]], r"\[12, 16\]"),
        ("Lumina2Transformer2DModel", "encoder_attention_mask", lambda x: x.tril(2), r"texts of \[3, 4\]"),
        ("ZImageTransformer2DModel", "x", lambda x: [x[0], x[1][..., :4]], "needs one image per sample"),
        # Attributes of the model
        ("AceStepTransformer1DModel", "_attention_backend", lambda x: "flash", "the attention backend flash"),
        ("MotifVideoTransformer3DModel", "num_decoder_layers", lambda x: 1, "num_decoder_layers=1 of Motif"),
        ("Transformer2DModel", "is_input_continuous", lambda x: False, "an input of patches or codes of"),
    ],
)
def test_a_row_refuses_models_and_arguments_that_it_cannot_route(name, key, change, message):
    model, arguments = built(name)
    attach(model, WINDOWS[:1])
    model(**arguments)
    if key in arguments:
        arguments[key] = change(arguments[key])
    else:
        setattr(model.layers[0].self_attn.processor if key == "_attention_backend" else model, key, change(0))
    with pytest.raises(ValueError, match=message):
        model(**arguments)


def test_a_proof_fails_for_any_dense_difference_large_errors_and_nan():
    assert [Proof(*errors).passes for errors in ((1e-9, 0), (0, 0.011), (0, float("nan")))] == [False] * 3


def test_a_class_that_copies_one_of_diffusers_takes_its_adapter():
    """A trainer's own class."""
    model, arguments = built("SD3Transformer2DModel")
    kind = type(model)
    members = {"__module__": "trainer", "forward": lambda self, *a, **k: kind.forward(self, *a, **k)}
    copied = type("Copied", (kind,), members)
    copied.forward.__signature__ = inspect.signature(kind.forward)
    model.__class__ = copied
    with pytest.raises(ValueError, match="no adapter is known for Copied"):
        attach(model, WINDOWS[:1])
    check(model, FAMILIES["SD3Transformer2DModel"], arguments, 16, WINDOWS[:1])


def test_the_page_has_the_table_of_the_installed_version():
    """Rows with "yes" are proved above, on small models."""
    kinds = __main__.classes()
    assert FAMILIES.keys() == {name.partition(",")[0] for name in MODELS}
    assert FAMILIES.keys() | REFUSED.keys() == kinds.keys()
    page = (ROOT / "routing/adapters/README.md").read_text()
    assert f"diffusers {version('diffusers')}" in page
    assert f"<!-- routing.adapters.families -->\n{__main__.table(kinds)}\n<!-- end -->" in page


def test_the_table_marks_unknown_and_changed_classes(monkeypatch):
    name, kinds = "SD3Transformer2DModel", __main__.classes()
    changed = type(name, (), {"forward": lambda self, hidden_states, timestep: None})
    assert "| fails | forward takes no block_controlnet_hidden_states |" in __main__.table({name: changed})
    monkeypatch.delitem(FAMILIES, name)
    assert __main__.row(name, kinds[name]) == "unknown | "
    monkeypatch.setitem(REFUSED, name, "its blocks convolve")
    with pytest.raises(ValueError, match=rf"^{name} cannot be routed: its blocks convolve$"):
        attach(built(name)[0], WINDOWS[:1])
    assert __main__.row(name, kinds[name]) == "refused | its blocks convolve"
