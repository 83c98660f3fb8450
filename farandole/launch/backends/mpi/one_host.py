"""What lets Open MPI's mpirun start a job of one host where there is neither ssh nor rsh.

It looks for one of them before it knows whether it needs it, and ends where there is none. A job of
one host never uses what it finds, so any program will do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_UNUSED = "false"  # the program that is found and never run
_AGENT = ("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent")  # Open MPI 4's name for it, and 5's


def one_host_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """For mpirun's environment. What the user has set stays."""
    return {name: _UNUSED for name in _AGENT if name not in environ}
