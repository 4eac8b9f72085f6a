"""What may be built is what files of `configs/` name, or those of a folder that the command line adds."""

import pytest

from builders import config as configuration
from runtime.config import build_node
from runtime.targets import CONFIGS, allowed_targets, check_targets, load_target
from tests.outside import TIMEIT, spoil_run
from tests.programs import start
from tests.runs import ROOT, composed

# As `python -m runtime.targets` prints it: what a run from elsewhere could at most have built.
LISTED = """
data                 data.digits                          configs/data/digits.yaml
data                 data.glyphs                          configs/data/glyphs.yaml
data                 data.mixture                         configs/data/mixture.yaml
data                 data.open_latents                    configs/data/imagenet256.yaml
data                 data.open_shards                     configs/data/stream.yaml
data                 data.synthetic                       configs/data/synthetic.yaml
diffusion.loss       diffusion.DDPMLoss                   configs/diffusion/ddpm.yaml
diffusion.loss       diffusion.EDMLoss                    configs/diffusion/edm.yaml
diffusion.loss       diffusion.FlowLoss                   configs/diffusion/flow.yaml
diffusion.loss       diffusion.X0Loss                     configs/diffusion/x0.yaml
diffusion.precond    diffusion.DDPMPrecond                configs/diffusion/ddpm.yaml
diffusion.precond    diffusion.EDMPrecond                 configs/diffusion/edm.yaml
diffusion.precond    diffusion.FlowPrecond                configs/diffusion/flow.yaml
diffusion.precond    diffusion.X0Precond                  configs/diffusion/x0.yaml
ema                  training.ema.EMA                     configs/ema/on.yaml
evaluation           evaluation.AdmSuite                  configs/evaluation/adm.yaml
evaluation           evaluation.Suite                     configs/evaluation/digits.yaml
evaluation.detector  evaluation.DigitClassifier           configs/evaluation/digits.yaml
evaluation.detector  evaluation.GlyphClassifier           configs/evaluation/glyphs.yaml
evaluation.metrics.accuracy evaluation.LabelAccuracy             configs/evaluation/digits.yaml
evaluation.metrics.coverage evaluation.PrecisionRecall           configs/evaluation/digits.yaml
evaluation.metrics.distance evaluation.FrechetDistance           configs/evaluation/digits.yaml
guidance             diffusion.AutoGuidance               configs/guidance/auto.yaml
guidance             diffusion.CFG                        configs/guidance/cfg.yaml
guidance             diffusion.PathDropGuidance           configs/guidance/path_drop.yaml
guidance             diffusion.SparseGuidance             configs/guidance/sparse.yaml
model                models.DiT                           configs/model/dit.yaml
model.block          models.blocks.DiTBlock               configs/model/block/dit.yaml
model.block          models.blocks.LightningBlock         configs/model/block/lightning.yaml
model.block          models.blocks.MambaBlock             configs/model/block/mamba.yaml
model.block          models.blocks.ModernBlock            configs/model/block/modern.yaml
model.block          models.blocks.RWKVBlock              configs/model/block/rwkv.yaml
model.block          models.blocks.SprintBlock            configs/model/block/sprint.yaml
model.rejoin         models.rejoin.Bypass                 configs/model/rejoin/bypass.yaml
model.rejoin         models.rejoin.Fuse                   configs/model/rejoin/fuse.yaml
model.rejoin         models.rejoin.Mask                   configs/model/rejoin/mask.yaml
model.router         routing.grid_router                  configs/model/router/grid.yaml
model.router         routing.norm_router                  configs/model/router/norm.yaml
model.router         routing.random_router                configs/model/router/random.yaml
optimizer            torch.optim.AdamW                    configs/optimizer/adamw.yaml
optimizer            torch.optim.SGD                      configs/optimizer/sgd.yaml
optimizer            training.muon.muon                   configs/optimizer/muon.yaml
sampler              diffusion.adaptive_sampler           configs/sampler/dopri5.yaml
sampler              diffusion.ddpm_sampler               configs/sampler/ddpm.yaml
sampler              diffusion.edm_sampler                configs/sampler/edm.yaml
sampler              diffusion.ode_sampler                configs/sampler/heun.yaml
sampler              diffusion.sde_sampler                configs/sampler/sde.yaml
sampler.times        diffusion.iddpm_times                configs/sampler/times/iddpm.yaml
sampler.times        diffusion.respaced_times             configs/sampler/times/respaced.yaml
sampler.times        diffusion.rho_times                  configs/sampler/times/rho.yaml
sampler.times        diffusion.uniform_times              configs/sampler/times/sit.yaml
sampler.times        diffusion.ve_times                   configs/sampler/times/ve.yaml
sampler.times        diffusion.vp_times                   configs/sampler/times/vp.yaml
tracker              training.trackers.TensorBoardTracker configs/tracker/tensorboard.yaml
tracker              training.trackers.WandbTracker       configs/tracker/wandb.yaml
"""
OWN = """
import torch

def heun_twice(denoise, noise, path, *, num_steps: int, twice: bool = True, randn_like=torch.randn_like):
    return torch.zeros_like(noise)
"""


def printed(*arguments):
    return start("-m runtime.targets", *arguments).stdout


@pytest.fixture
def own(tmp_path):
    """A folder of configurations that names code of the user's."""
    (tmp_path / "own/sampler").mkdir(parents=True)
    twice = "# Ours.\n_target_: own_sampler.heun_twice\nnum_steps: 2\n"
    (tmp_path / "own/sampler/twice.yaml").write_text(twice)
    (tmp_path / "own_sampler.py").write_text(OWN)
    return tmp_path / "own"


def test_the_command_lists_all_that_can_be_built(own):
    assert printed() == LISTED.lstrip()
    added = "sampler              own_sampler.heun_twice               own/sampler/twice.yaml\n"
    assert set(printed("--config-dir", own).splitlines(True)) == {*LISTED.lstrip().splitlines(True), added}


def test_each_of_them_can_be_imported():
    for key, names in allowed_targets().items():
        for name in names:
            assert callable(load_target(key, name))


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("", "sampler"),
        ("# Words.\n# @package _group_\n", "sampler"),
        ("# @package _global_\n", ""),
        ("# @package _global_.a.b\n", "a.b"),
        ("# @package model\n", "model"),
        ("x: 1\n# @package model\n", "sampler"),
    ],
)
def test_a_file_names_for_the_key_to_which_its_content_goes(tmp_path, header, key):
    (tmp_path / "sampler").mkdir()
    (tmp_path / "sampler/own.yaml").write_text(f"{header}node:\n- - _target_: os.system\n")
    inner = f"{key}.node".lstrip(".")
    assert allowed_targets((tmp_path,)) == {inner: {"os.system": f"{tmp_path.name}/sampler/own.yaml"}}
    check_targets({"_target_": "os.system"}, allowed_targets((tmp_path,)), inner)
    with pytest.raises(ValueError, match=r"\._target_=os\.system must not be there"):
        check_targets({"_target_": "os.system"}, allowed_targets((tmp_path,)), "other")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "cannot be imported: .*No module named 'nowhere'"),
        ("diffusion.nothing", "cannot be imported: module 'diffusion' has no attribute 'nothing'"),
        ("models", "must be the dotted name of a class or a function"),
        ("..", "cannot be imported: invalid format"),
    ],
)
def test_what_cannot_be_built_is_an_error(name, message):
    with pytest.raises(ValueError, match=f"^sampler={name} {message}"):
        load_target("sampler", name)


def test_a_file_that_is_not_yaml_is_named(tmp_path):
    (tmp_path / "a.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"a\.yaml is not YAML: ") as raised:
        allowed_targets((tmp_path,))
    assert len(str(raised.value).splitlines()) == 1


def test_a_node_that_was_changed_after_it_was_checked_is_not_built():
    config = configuration.validate(composed())
    with pytest.raises(
        ValueError, match=r"sampler\._target_=timeit\.timeit must be diffusion\.adaptive_sampler or "
    ):
        build_node(config | {"sampler": TIMEIT}, "sampler")


@pytest.mark.slow
def test_code_of_the_user_is_trained_and_sampled_with_its_folder_alone(own):
    """Its folder is given to each program; a run of it is refused where it is not."""
    folder, given = own.parent, f"--config-dir={own}"
    where = {"folder": folder, "variables": {"PYTHONPATH": str(folder)}}
    small = ("model=tread", "data=synthetic", "train.total_steps=2", "run_name=r")
    start("train.py", given, *small, "sampler=twice", **where)
    start("sample.py", given, "run=runs/r", "num_samples=2", "output=a.npz", **where)
    message = "sampler._target_=own_sampler.heun_twice must be diffusion.adaptive_sampler or "
    chosen = "sampler._target_=own_sampler.heun_twice"
    for arguments in (("sample.py", "run=runs/r"), ("train.py", *small, chosen)):
        result = start(*arguments, **where, check=False)
        assert result.returncode == 1
        assert message in result.stderr
    spoil_run(folder / "runs/r", {"sampler": TIMEIT})
    refused = start("sample.py", given, "run=runs/r", **where, check=False)
    message = "diffusion.sde_sampler or own_sampler.heun_twice, as"
    assert message in refused.stderr


def test_our_own_files_are_those_of_the_project():
    assert CONFIGS == ROOT / "configs"
