"""Models as plain sequences of named blocks, so that layouts can cut them.

Every builder returns an `nn.Sequential` whose forward is nothing but its blocks in order;
residuals, branches and heads live inside blocks. `build` finds a builder by name.
"""

from __future__ import annotations

from farandole.models.alexnet import alexnet, alexnet_towers
from farandole.models.amoebanet import amoebanet_d
from farandole.models.auxiliary import with_auxiliary
from farandole.models.catalog import NAMES, SPECS, ModelSpec, build, spec
from farandole.models.googlenet import googlenet
from farandole.models.inception import inception_v3
from farandole.models.resnet import resnet18, resnet50, resnet110_v2
from farandole.models.small import mlp, small_cnn
from farandole.models.unet import unet
from farandole.models.vgg import vgg16

__all__ = [
    "NAMES",
    "SPECS",
    "ModelSpec",
    "alexnet",
    "alexnet_towers",
    "amoebanet_d",
    "build",
    "googlenet",
    "inception_v3",
    "mlp",
    "resnet18",
    "resnet50",
    "resnet110_v2",
    "small_cnn",
    "spec",
    "unet",
    "vgg16",
    "with_auxiliary",
]
