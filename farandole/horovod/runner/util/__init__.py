"""Horovod's helpers of this name, as far as scripts and their tests import them."""
