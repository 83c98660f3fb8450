"""Tools for testing what runs on many ranks; public, for users' tests too."""

from farandole.testing.world import run_world

__all__ = ["run_world"]
