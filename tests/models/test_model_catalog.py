"""Models by name: defaults, options, and errors that say what to write instead."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from farandole import models
from farandole.errors import UserError


@pytest.mark.parametrize("name", models.NAMES)
def test_the_table_is_that_of_the_builders(name: str) -> None:
    spec = models.spec(name)
    assert spec.builder is getattr(models, name)
    defaults = spec.builder.__kwdefaults__
    assert (spec.classes, spec.image_size, spec.channels) == tuple(
        defaults[key] for key in ("classes", "image_size", "channels")
    )


# The others run at their native size in test_parameter_counts.py.
@pytest.mark.parametrize("name", ["small_cnn", "mlp"])
def test_the_defaults_fit_together(name: str) -> None:
    spec = models.spec(name)
    with torch.no_grad(), torch.device("meta"):
        model = models.build(name).eval()
        image = torch.empty(2, spec.channels, spec.image_size, spec.image_size)
        assert model(image).shape == (2, spec.classes)


def test_what_is_given_overrides_the_defaults() -> None:
    model = models.build("mlp", classes=3, image_size=4, channels=2, hidden=(5,))
    assert model(torch.zeros(6, 2, 4, 4)).shape == (6, 3)
    assert model.hidden1.linear.weight.shape == (5, 32)


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        models.SPECS["mine"] = models.spec("mlp")  # type: ignore[index]
    with pytest.raises(AttributeError):
        models.spec("mlp").classes = 3  # type: ignore[misc]


def test_an_unknown_model_gets_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"no model 'resnet-50'\. Did you mean 'resnet50'\?"):
        models.build("resnet-50")
    with pytest.raises(UserError, match=r"Known: alexnet, .*vgg16"):
        models.build("transformer")


def test_an_unknown_option_gets_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"amoebanet_d has no option 'layer'.*'layers'"):
        models.build("amoebanet_d", layer=18)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet18", {"classes": 0}, "resnet18: classes=0"),
        ("inception_v3", {"auxiliary": True, "image_size": 298}, "auxiliary head.*at least 299"),
        ("vgg16", {"channels": 0}, "vgg16: channels=0"),
        ("amoebanet_d", {"layers": 20}, "layers=20.*multiple of 3 such as 18"),
        ("amoebanet_d", {"filters": 100}, "filters=100.*multiple of 8 such as 96"),
        ("googlenet", {"wide_kernel": 7}, "wide_kernel=7; write 3 .* or 5"),
        ("unet", {"width": 0}, "unet: width=0"),
        ("unet", {"depth": 0}, "unet: depth=0"),
        ("small_cnn", {"width": 0}, "width=0"),
        ("mlp", {"hidden": (8, 0)}, r"hidden=\(8, 0\)"),
    ],
)
def test_bad_requests_name_the_value_at_fault(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        models.build(name, **options)


SMALLEST = [
    ("alexnet", {}, 63),
    ("alexnet_towers", {}, 67),
    ("googlenet", {}, 31),
    ("inception_v3", {}, 75),
    ("resnet18", {}, 8),
    ("resnet50", {}, 8),
    ("resnet110_v2", {}, 4),
    ("vgg16", {}, 32),
    ("amoebanet_d", {"layers": 3, "filters": 16}, 16),
    ("unet", {}, 16),
    ("unet", {"depth": 2, "width": 8}, 4),
    ("small_cnn", {}, 4),
    ("mlp", {}, 1),
]


@pytest.mark.parametrize(("name", "options", "smallest"), SMALLEST)
def test_the_smallest_image_works_and_one_pixel_less_is_refused(
    name: str, options: dict[str, object], smallest: int
) -> None:
    spec = models.spec(name)
    with torch.no_grad(), torch.device("meta"):
        model = models.build(name, image_size=smallest, **options).eval()
        logits = model(torch.empty(2, spec.channels, smallest, smallest))
    assert logits.shape[:2] == (2, spec.classes)
    with pytest.raises(UserError, match=f"image_size={smallest - 1} is too small.*{smallest}"):
        models.build(name, image_size=smallest - 1, **options)


@pytest.mark.parametrize(
    ("name", "smallest", "convolutional"),
    [
        ("alexnet", 63, 5),
        ("alexnet_towers", 67, 5),
        ("googlenet", 31, -1),
        ("vgg16", 32, 13),
    ],
)
def test_the_limit_is_where_the_image_vanishes(
    name: str, smallest: int, convolutional: int
) -> None:
    with torch.no_grad(), torch.device("meta"):
        blocks = models.build(name)[:convolutional].eval()
        blocks(torch.empty(2, 3, smallest, smallest))
        with pytest.raises(RuntimeError):
            blocks(torch.empty(2, 3, smallest - 1, smallest - 1))


def test_small_images_get_the_small_stem() -> None:
    with torch.no_grad(), torch.device("meta"):
        for name in ("resnet18", "resnet50"):
            assert models.build(name, image_size=63)[0](torch.empty(2, 3, 63, 63)).shape[-1] == 63
            assert models.build(name, image_size=64)[0](torch.empty(2, 3, 64, 64)).shape[-1] == 16
        # The grid in front of the head: 4×4 of 32×32, 7×7 of 224×224.
        small = models.resnet18(image_size=32)[:-1](torch.empty(2, 3, 32, 32))
        native = models.resnet18()[:-1](torch.empty(2, 3, 224, 224))
    assert small.shape == (2, 512, 4, 4)
    assert native.shape == (2, 512, 7, 7)


def test_the_inception_family_starts_from_narrow_normals(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[int, float] = {}
    monkeypatch.setattr(nn.init, "normal_", lambda weight, std: drawn.update({id(weight): std}))

    def deviations(model: nn.Sequential) -> dict[str, set[float]]:
        found: dict[str, set[float]] = {}
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                block = name.split(".")[0].rstrip("12")
                found.setdefault(block, set()).add(drawn[id(weight)])
        return found

    with torch.no_grad(), torch.device("meta"):
        google = models.googlenet(auxiliary=True)
        third = models.inception_v3(auxiliary=True)
    assert set.union(*deviations(google).values()) == {0.01}
    assert deviations(third).pop("auxiliary") == {0.01, 0.001}
    assert drawn[id(third.auxiliary.head.linear.weight)] == 0.001
    rest = [found for block, found in deviations(third).items() if block != "auxiliary"]
    assert set.union(*rest) == {0.1}


def test_zero_residual_starts_every_block_as_the_identity() -> None:
    model = models.resnet18(image_size=32, zero_residual=True).eval()
    x = torch.rand(2, 64, 8, 8)
    assert torch.equal(model[1:3](x), x)


def test_the_shortcut_of_a_pre_activation_unit_only_adds() -> None:
    model = models.resnet110_v2().eval()
    for unit in (model.stage1_unit2, model.stage2_unit1):
        nn.init.zeros_(unit.residual.conv2.weight)
    x = torch.randn(2, 16, 8, 8)
    assert torch.equal(model.stage1_unit2(x), x)
    halved = model.stage2_unit1(x)
    assert torch.equal(halved[:, :16], x[:, :, ::2, ::2])
    assert halved.shape == (2, 32, 4, 4)
    assert not halved[:, 16:].any()


def test_one_seed_gives_one_model() -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return models.amoebanet_d(layers=3, filters=16).state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["stem.conv.weight"], other["stem.conv.weight"])


def test_importing_the_models_needs_nothing_but_torch() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "farandole"}
    for path in Path(models.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] in allowed, (path.name, name)
                if name.startswith("farandole"):
                    assert name.startswith(("farandole.errors", "farandole.models")), name
