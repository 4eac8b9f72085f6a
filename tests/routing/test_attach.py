"""Routes in models of diffusers; see families.py."""

import copy
import gc
import inspect
import io
import pickle
import threading
from collections.abc import MutableSequence

import pytest
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.state import AcceleratorState
from diffusers import FirstBlockCacheConfig
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from routing import Adapter, BlockList, Route, Routing, attach, detach, norm_router
from routing.adapters.families import adapter_of
from tests.routing.families import FAMILIES, NUM_SAMPLES, NUM_TOKENS, seeded
from tests.routing.models import built, in_double
from tests.routing.test_proof import check

WINDOW = Route(0.5, 1, -2)
REFERENCE_FIRST = (torch.arange(NUM_TOKENS) < 4).float()[:, None] * torch.tensor([1.0, 0, 0])
# FLUX also with all its arguments that are indexed by token.
VARIANTS = [(name, {}) for name in FAMILIES]
VARIANTS.append(("flux", {"num_reference_tokens": 4, "controlnet": True, "mask": True}))
every_family = pytest.mark.parametrize("name", FAMILIES)
# For tests of code outside the adapters: one list whose blocks return a tensor, two whose blocks return two.
two_families = pytest.mark.parametrize("name", ["wan", "flux"])
every_variant = pytest.mark.parametrize(
    ("name", "variant"), VARIANTS, ids=["-".join([name, *variant]) for name, variant in VARIANTS]
)


def run(model, arguments, **ours):
    return model(**arguments, **ours).sample


def made(name, **variant):
    """Return a model of a family and its inputs."""
    return FAMILIES[name].build(), FAMILIES[name].arguments(**variant)


def attached(name, **variant):
    model, arguments = made(name, **variant)
    attach(model, [WINDOW])
    return model, arguments


def with_gradient(arguments):
    return {**arguments, "hidden_states": arguments["hidden_states"].clone().requires_grad_()}


@pytest.mark.parametrize(
    ("name", "key", "last"),
    [("flux", "controlnet_single_block_samples", 2), ("sd3", "block_controlnet_hidden_states", 1)],
)
def test_the_residual_of_the_last_block_reaches_the_kept_tokens_alone(name, key, last):
    model, arguments = attached(name, controlnet=True)
    noise = torch.rand(NUM_SAMPLES, NUM_TOKENS, generator=seeded())
    stays = noise.argsort(dim=1).argsort(dim=1) < NUM_TOKENS // 2

    def output(factor):
        residuals = [x * factor if i == last else x for i, x in enumerate(arguments[key])]
        return run(model, {**arguments, key: residuals}, routing=Routing(0.5, noise=[noise]))

    assert torch.equal(output(1), output(stays.unsqueeze(-1)))
    assert not torch.equal(output(1), output(0))


def test_a_seed_is_drawn_for_each_route():
    model, arguments = made("flux")
    routes, generator = attach(model, [Route(0.25, 2, -1), Route(0.5, 0, 1)]), seeded()
    assert routes == (Route(0.5, 0, 1), Route(0.25, 2, 6))  # seeds, ratios and noise have this order too
    seeds = [int(torch.randint(2**63 - 1, (), generator=generator)) for _ in routes]
    noise = [torch.rand(NUM_SAMPLES, NUM_TOKENS, generator=seeded(seed)) for seed in seeds]
    output = run(model, arguments, generator=seeded())
    assert torch.equal(run(model, arguments, routing=Routing([0.5, 0.25], noise=noise)), output)
    assert not torch.equal(run(model, arguments, routing=Routing([0.5, 0.25], noise=noise[::-1])), output)


@every_variant
def test_gradients_reach_every_token(name, variant):
    model, arguments = made(name, **variant)
    arguments = with_gradient(arguments)
    attach(model, [Route(0.75, 0, -1)])
    run(model, arguments).square().sum().backward()
    assert (arguments["hidden_states"].grad != 0).all()


@two_families
def test_it_routes_only_in_training_with_gradients(name):
    model, arguments = made(name)
    plain, state = run(model, arguments), torch.get_rng_state()
    attach(model, [WINDOW])
    assert torch.equal(run(model, arguments, routing=Routing(0)), plain)
    with torch.no_grad():
        assert torch.equal(run(model, arguments), plain)
        assert torch.equal(torch.get_rng_state(), state)
        assert not torch.equal(run(model, arguments, routing=Routing(0.5)), plain)
    model.eval()
    assert torch.equal(run(model, arguments), plain)
    model.train()
    assert not torch.equal(run(model, arguments), plain)


@every_family
def test_attach_does_not_change_saved_files_and_detach_undoes_it(name, tmp_path):
    family, (model, arguments) = FAMILIES[name], made(name)
    plain = run(model, arguments)
    model.save_pretrained(tmp_path / "before")
    parts = [model, *(getattr(model, blocks) for blocks in family.block_lists)]
    before = [{**part.__dict__} for part in parts]
    keys, config, text = list(model.state_dict()), dict(model.config), repr(model)
    attach(model, [WINDOW])
    assert (list(model.state_dict()), dict(model.config)) == (keys, config)
    model.save_pretrained(tmp_path / "after")
    for file in (tmp_path / "before").iterdir():
        assert (tmp_path / "after" / file.name).read_bytes() == file.read_bytes()
    assert torch.equal(run(type(model).from_pretrained(tmp_path / "after").train(), arguments), plain)
    run(model, arguments)
    detach(model)
    assert [part.__dict__ for part in parts] == before
    assert repr(model) == text
    assert torch.equal(run(model, arguments), plain)


@pytest.mark.parametrize("copied_by", [copy.deepcopy, copy.copy, nn.Module._replicate_for_data_parallel])
def test_a_copy_has_its_own_routes_and_modules(copied_by):
    model, arguments = attached("sd3")
    routed, copied = run(model, arguments, generator=seeded()), copied_by(model)
    assert torch.equal(run(copied, arguments, generator=seeded()), routed)
    copied._modules = {**model._modules, "proj_out": copy.deepcopy(model.proj_out).requires_grad_(False)}
    copied.proj_out.weight.zero_()
    assert not torch.equal(run(copied, arguments, generator=seeded()), routed)
    assert torch.equal(run(model, arguments, generator=seeded()), routed)
    kept = copy.deepcopy(model)  # the other copies share the lists of blocks
    detach(model)
    assert not torch.equal(run(model, arguments), routed)
    assert torch.equal(run(kept, arguments, generator=seeded()), routed)


@every_variant
def test_checkpointed_gradients_are_bitwise_the_same_with_dropout(name, variant):
    model, arguments = made(name, **variant)
    arguments = with_gradient(arguments)
    attach(model, [WINDOW])
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    gradients, leaves = [], [arguments["hidden_states"], *model.parameters()]
    for checkpointed in (False, True):
        if checkpointed:
            model.enable_gradient_checkpointing()
        model.zero_grad()
        arguments["hidden_states"].grad = None
        torch.manual_seed(5)
        sum(run(model, arguments).square().sum() for _ in range(2)).backward()
        gradients.append([leaf.grad for leaf in leaves if leaf.grad is not None])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@two_families
def test_checkpointing_that_would_lose_gradients_is_refused(name):
    model, arguments = attached(name)
    model.enable_gradient_checkpointing(lambda block, *args: checkpoint(block, *args, use_reentrant=True))
    with pytest.raises(ValueError, match="use_reentrant=True would lose the gradients"):
        run(model, with_gradient(arguments))
    model.eval()
    run(model, arguments)  # the failed pass leaves nothing behind


@pytest.mark.parametrize(
    ("name", "variant", "start", "num_prefix_tokens"),
    [
        *((name, {}, 0, 0) for name in FAMILIES),
        ("flux", {"num_reference_tokens": 4}, 0, 0),
        ("auraflow", {}, 2, 5 + 8),
    ],
    ids=[*FAMILIES, "flux with references", "auraflow from a single block on"],
)
def test_the_router_is_given_the_tokens_of_the_image_and_the_mask(name, variant, start, num_prefix_tokens):
    model, arguments = made(name, **variant)
    seen, given = [], []

    def see(block, args, kwargs):
        seen.append(args[0] if args else kwargs["hidden_states"])

    with FAMILIES[name].layers(model)[start].register_forward_pre_hook(see, with_kwargs=True):
        run(model, arguments)

    def router(x, num_kept, /, *, force_keep=None, noise=None, generator=None):
        given.extend([x, num_kept, force_keep])
        return norm_router(x, num_kept, force_keep=force_keep)

    attach(model, [Route(0.5, start, -2)], router=router)
    force_keep = torch.zeros(NUM_SAMPLES, NUM_TOKENS, dtype=torch.bool)
    run(model, arguments, routing=Routing(force_keep=force_keep))
    assert torch.equal(given[0], seen[0][:, num_prefix_tokens:][:, :NUM_TOKENS])
    assert given[1] == NUM_TOKENS // 2 and given[2] is force_keep
    with pytest.raises(ValueError, match=r"force_keep=torch.bool \(3, 21\) must be torch.bool \(3, 16\)"):
        run(model, arguments, routing=Routing(force_keep=torch.zeros(NUM_SAMPLES, NUM_TOKENS + 5).bool()))


def test_positions_may_be_given_for_each_sample():
    model, arguments = attached("flux", num_reference_tokens=4)
    expected = run(model, arguments, generator=seeded())
    by_sample = {key: arguments[key].expand(NUM_SAMPLES, -1, -1) for key in ("img_ids", "txt_ids")}
    assert torch.equal(run(model, {**arguments, **by_sample}, generator=seeded()), expected)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("flux", {"img_ids": REFERENCE_FIRST}, "must come before tokens of reference images"),
        ("wan", {"routing": Routing(1.0)}, r"^selection_ratio=1.0 must be below 1 with attach$"),
        ("wan", {"routing": Routing([0.5, 0.5])}, r"selection_ratio=\[0\.5, 0\.5\] must be .* each of 1"),
        ("wan", {"routing": 0.5}, r"^routing=0.5 must be a routing.Routing or None"),
        ("wan", {"routing": Routing(noise=[])}, r"^noise=\[\] must have one tensor \(3, 16\) for each route"),
        ("wan", {"routing": Routing(noise=[torch.rand(3, 20)])}, r"^noise=\[\(3, 20\)\] must have one tens"),
        ("wan", {"routing": Routing(noise=[torch.rand(3, 8)])}, r"^noise=\[\(3, 8\)\] must have one tensor"),
    ],
)
def test_arguments_that_are_not_supported_are_refused_by_name(name, arguments, message):
    model, usual = attached(name)
    with pytest.raises(ValueError, match=message):
        run(model, {**usual, **arguments})
    run(model, usual)


def test_caches_parallelism_and_gated_attention_are_refused_by_name():
    model, arguments = attached("flux")
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(ValueError, match="the cache of FluxTransformer2DModel"):
        run(model, arguments)
    model.disable_cache()
    run(model, arguments)
    model._parallel_config = object()  # as enable_parallelism() leaves it
    with pytest.raises(ValueError, match="parallelism of FluxTransformer2DModel is not supported with"):
        run(model, arguments)
    gated = rebuilt("pixart", attention_type="gated")
    attach(gated, [WINDOW])
    with pytest.raises(ValueError, match="attention_type=gated of PixArtTransformer2DModel"):
        run(gated, FAMILIES["pixart"].arguments())


def rebuilt(name, **changed):
    model = FAMILIES[name].build()
    config = {key: value for key, value in model.config.items() if not key.startswith("_")}
    return type(model)(**config | changed).train()


@every_family
def test_projections_may_be_fused(name):
    model, arguments = made(name)
    if name == "sd3":
        model = rebuilt(name, dual_attention_layers=())  # diffusers cannot fuse their second attention
    model.fuse_qkv_projections()
    assert any(getattr(module, "fused_projections", False) for module in model.modules())
    check(model.double(), adapter_of(model), tree_map(in_double, arguments), NUM_TOKENS, [WINDOW], bound=1e-9)


def test_arguments_may_be_positional_and_residuals_repeated():
    """FLUX repeats its ControlNet's residuals in turn or, by default, uses each for several blocks."""
    model, arguments = made("flux", controlnet=True)
    a, b = arguments["controlnet_block_samples"]
    names = list(inspect.signature(model.forward).parameters)
    attach(model, [WINDOW])
    expected = run(model, {**arguments, "controlnet_block_samples": [a, b, a]}, generator=seeded())
    repeated = {**arguments, "controlnet_blocks_repeat": True}
    assert torch.equal(run(model, repeated, generator=seeded()), expected)
    positional = [repeated.get(name) for name in names]
    positional[names.index("return_dict")] = False
    assert torch.equal(model(*positional, generator=seeded())[0], expected)


def test_unknown_models_and_blocks_that_do_not_fit_are_refused():
    model = FAMILIES["sd3"].build()
    with pytest.raises(ValueError, match=r"no adapter is known for Linear: pass a class of `python -m r"):
        attach(nn.Linear(2, 2), [WINDOW])
    # A class of the same name, and a derived class with another forward.
    for like in (type("SD3Transformer2DModel", (nn.Module,), {})(), copy.copy(model)):
        like.__class__ = type("SD3Transformer2DModel", (type(like),), {"forward": lambda self: None})
        with pytest.raises(ValueError, match="no adapter is known for SD3Transformer2DModel"):
            attach(like, [WINDOW])
    with pytest.raises(ValueError, match=r"must be .* or Sequential, not a PatchEmbed"):
        attach(model, [WINDOW], adapter=Adapter([BlockList("pos_embed")], ()))
    with pytest.raises(ValueError, match="JointTransformerBlock in transformer_blocks takes no argument to"):
        attach(model, [WINDOW], adapter=Adapter([BlockList("transformer_blocks", tokens="tokens")], ()))
    attach(model, [WINDOW])
    with pytest.raises(ValueError, match="already has routes"):
        attach(model, [WINDOW])
    detach(model)
    with pytest.raises(ValueError, match="has no routes"):
        detach(model)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_blocks_or_the_whole_model_may_be_compiled(whole):
    model, arguments = attached("sd3")
    expected, dense = run(model, arguments, generator=seeded()), run(model, arguments, routing=Routing(0))
    if whole:
        model = torch.compile(model, backend="eager")
    else:
        model.transformer_blocks[2].compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(run(model, arguments, generator=seeded()), expected)
    torch.testing.assert_close(run(model, arguments, routing=Routing(0)), dense)


def test_a_forward_that_would_lose_the_routes_is_refused():
    model = FAMILIES["sd3"].build()
    add_hook_to_module(model, ModelHook())
    with pytest.raises(ValueError, match="forward of SD3Transformer2DModel was replaced"):
        attach(model, [WINDOW])
    remove_hook_from_module(model)
    routes = attach(model, WINDOW)
    detach(model)
    assert attach(model, (route for route in [WINDOW])) == routes


@pytest.mark.parametrize("edit", ["replaced", "longer", "shorter"])
def test_a_list_of_blocks_that_was_edited_is_refused(edit):
    """Layers are counted through the lists, so the window would move."""
    model, arguments = attached("sd3")
    blocks = model.transformer_blocks
    if edit == "replaced":
        model.transformer_blocks = nn.ModuleList(list(blocks))
    elif edit == "longer":
        blocks.insert(1, copy.deepcopy(blocks[1]))
    else:
        del blocks[0]
    with pytest.raises(ValueError, match=r"of SD3Transformer2DModel has changed since attach \(it had 5"):
        run(model, arguments)
    detach(model)
    run(model, arguments)


def test_routes_can_be_detached_from_a_wrapped_model():
    model, arguments = made("sd3")
    plain = run(model, arguments)
    attach(model, [WINDOW])
    routed = run(model, arguments, generator=seeded())
    add_hook_to_module(model, ModelHook())
    assert torch.equal(run(model, arguments, generator=seeded()), routed)
    detach(model)
    assert torch.equal(run(model, arguments), plain)
    remove_hook_from_module(model)
    attach(model, [WINDOW])
    AcceleratorState._reset_state()  # earlier tests chose no precision
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    wrapped = accelerator.prepare(model)
    detach(accelerator.unwrap_model(wrapped, keep_fp32_wrapper=True))
    with torch.autocast("cpu", torch.bfloat16):
        expected = type(model).forward(model, **arguments).sample.float()
    assert torch.equal(run(wrapped, arguments), expected)
    attach(accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False), [WINDOW])
    assert not torch.equal(run(model, arguments), plain)
    detach(model)
    assert torch.equal(run(model, arguments), plain)


@two_families
def test_another_thread_may_run_a_dense_pass(name):
    """It runs while a routed pass is between two blocks."""
    family, (model, arguments) = FAMILIES[name], made(name)
    dense = run(model, arguments)
    attach(model, [WINDOW])
    routed, outputs = run(model, arguments, generator=seeded()), []

    def other():
        outputs.append(run(model, arguments, routing=Routing(0)).detach())

    def interrupt(*_):
        hook.remove()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    hook = family.layers(model)[2].register_forward_pre_hook(interrupt)
    assert torch.equal(run(model, arguments, generator=seeded()), routed)
    assert torch.equal(outputs[0], dense)


class MutableList(nn.ModuleList, MutableSequence):
    """A list of blocks with its own ways to read them, as in SimpleTuner."""

    def __getitem__(self, i):
        return super().__getitem__(i)

    def __iter__(self):
        return (self[i] for i in range(len(self)))


class Backwards(nn.ModuleList):
    def __getitem__(self, i):
        return super().__getitem__(len(self) - 1 - i)


def test_lists_that_derive_from_modulelist_are_routed_if_they_are_indexed_as_they_iterate():
    model, arguments = made("sd3")
    attach(model, [WINDOW])
    expected = run(model, arguments, generator=seeded())
    detach(model)
    model.transformer_blocks = MutableList(model.transformer_blocks)
    attach(model, [WINDOW])
    assert torch.equal(run(model, arguments, generator=seeded()), expected)
    detach(model)
    assert type(model.transformer_blocks) is MutableList
    model.transformer_blocks = Backwards(model.transformer_blocks)
    with pytest.raises(ValueError, match="must be a ModuleList or Sequential, not a Backwards"):
        attach(model, [WINDOW])


@pytest.mark.parametrize("routes", [0.5, [0.5], None, []])
def test_routes_must_be_routes(routes):
    with pytest.raises(ValueError, match=r"^routes=\(.*\) must be a routing.Route, or several"):
        attach(made("sd3")[0], routes)
    with pytest.raises(ValueError, match=r"^router='random' must be a function"):
        attach(made("sd3")[0], WINDOW, router="random")
    with pytest.raises(ValueError, match=r"^adapter='sd3' must be a routing.Adapter"):
        attach(made("sd3")[0], WINDOW, adapter="sd3")


def test_samples_that_share_positions_keep_the_same_tokens():
    model, arguments = built("MiniMaxH3Transformer3DModel")
    attach(model, [WINDOW])
    seen = []
    model.transformer_blocks[2].register_forward_pre_hook(lambda block, args: seen.append(args[0].shape))
    model(**arguments, routing=Routing(0.5, force_keep=torch.ones(1, 16, dtype=torch.bool)))
    assert seen == [(2, 5 + 3 + 2 + 8, 32)]
    with pytest.raises(ValueError, match=r"^noise=\[\(2, 16\)\] must have one tensor \(1, 16\)"):
        model(**arguments, routing=Routing(0.5, noise=[torch.rand(2, 16)]))
    arguments["video_indices"] = arguments["video_indices"].roll(1)[1:]  # without the last token
    with pytest.raises(ValueError, match="the video to generate must come last"):
        model(**arguments)


@two_families
def test_wrapped_blocks_are_refused(name):
    family = FAMILIES[name]
    model = family.build()
    for blocks in (getattr(model, blocks) for blocks in family.block_lists):
        for i, block in enumerate(blocks):
            blocks[i] = checkpoint_wrapper(block)
    with pytest.raises(ValueError, match=r"CheckpointWrapper in .* takes no .*attach before wrapping"):
        attach(model, [WINDOW])


@two_families
def test_the_signature_has_the_added_keywords(name):
    model = FAMILIES[name].build()
    parameters = inspect.signature(model.forward).parameters
    attach(model, [WINDOW])
    assert list(inspect.signature(model.forward).parameters) == [*parameters, "routing", "generator"]
    assert type(model).__name__ == type(FAMILIES[name].build()).__name__


def test_one_graph_of_a_whole_model_is_refused():
    model, arguments = attached("sd3")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile the blocks, or the model without full"):
        run(torch.compile(model, backend="eager", fullgraph=True), arguments)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_of_the_whole_model_is_refused(reentrant):
    model, arguments = attached("sd3")
    x = with_gradient(arguments)["hidden_states"]
    output = checkpoint(lambda x: run(model, {**arguments, "hidden_states": x}), x, use_reentrant=reentrant)
    with pytest.raises(ValueError, match="as a whole would draw other tokens"):
        output.sum().backward()


def test_a_model_with_routes_is_not_pickled():
    with pytest.raises(pickle.PicklingError, match="not the same object"):
        torch.save(attached("sd3")[0], io.BytesIO())


def test_a_pass_without_backward_leaves_nothing_behind():
    model, arguments = FAMILIES["sd3"].build(), with_gradient(FAMILIES["sd3"].arguments())
    attach(model, [Route(0.5, 1, 1), Route(0.5, 2, 3)])
    model.enable_gradient_checkpointing()
    run(model, arguments)
    gc.collect()
    kinds = {type(instance).__name__ for instance in gc.get_objects()}
    assert not kinds & {"_RoutedPass", "_Window", "_RoutedBlock"}


def test_a_window_returns_the_dtype_of_its_blocks():
    model, seen = FAMILIES["pixart"].build(), []
    model.transformer_blocks[2].register_forward_pre_hook(lambda block, args: seen.append(args[0].dtype))
    attach(model, [Route(0.5, 0, 1)])
    with torch.autocast("cpu", torch.bfloat16):
        for ratio in (0, 0.5):
            run(model, FAMILIES["pixart"].arguments(), routing=Routing(ratio))
    assert seen[0] == seen[1]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(4))

    def forward(self, x, scale=1.5):
        for block in self.blocks:
            x = block(x)
        return scale * x


def test_an_argument_that_equals_its_default_is_not_refused():
    model = Scaled()
    attach(model, [WINDOW], adapter=Adapter(BlockList("blocks", tokens="src"), accepts=["x"]))
    model(torch.randn(2, 6, 8), scale=float("1.5"))
    for scale in (2.0, torch.tensor(1.5)):
        with pytest.raises(ValueError, match=r"^scale of Scaled is not supported with routing"):
            model(torch.randn(2, 6, 8), scale=scale)
