"""Sharded, resumable input."""

from farandole.data.chunks.open import array, shards
from farandole.data.dealing import BatchInfo
from farandole.data.images.arrays import images
from farandole.data.images.slides import slides
from farandole.data.loader import Loader
from farandole.data.mixture import mix
from farandole.data.options import LoaderOptions
from farandole.data.registry import Loaders, Request
from farandole.data.shares import Shares

__all__ = [
    "BatchInfo",
    "Loader",
    "LoaderOptions",
    "Loaders",
    "Request",
    "Shares",
    "array",
    "images",
    "mix",
    "shards",
    "slides",
]
