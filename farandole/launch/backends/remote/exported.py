"""Which variables of the user's shell workers on other hosts get as well."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from farandole.environment import LAUNCHER

# What is a host's own business, or this session's.
_OWN = re.compile(
    r"_$|HOME$|USER$|LOGNAME$|SHELL$|SHLVL$|PWD$|OLDPWD$|MAIL$|HOST$|HOSTNAME$|TERM|DISPLAY$|TMPDIR$|"
    rf"SSH_|XDG_|DBUS_|LS_COLORS$|BASH_FUNC|{LAUNCHER}$|SLURM|OMPI_|PMI|MPI_|MV2_"
)


def exported(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Those of `environ` that do not belong to one host or to one login."""
    return {name: value for name, value in environ.items() if not _OWN.match(name)}
