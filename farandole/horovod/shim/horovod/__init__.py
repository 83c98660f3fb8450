"""Stands where Python looks for Horovod, and steps aside for Farandole's modules."""

import sys

try:
    from farandole.horovod import aliases
except ModuleNotFoundError as error:
    if error.name != "farandole":
        raise
    raise ImportError(
        f"horovod is to be Farandole's here, and {sys.executable} has no farandole. Install it "
        "there, or start the script with the Python that has it."
    ) from error

aliases.install()
