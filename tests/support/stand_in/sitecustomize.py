"""Python imports this as it starts. A process that mpirun, srun or ssh has started then stands in
for one that is forked from a process with torch imported; see `tests/support/stand_ins.py`.

It does so where WARM_STARTS names the socket of such a process, and the command is a script. It
passes on its streams, variables and namespaces, then the signals that it gets, and ends as the
other one does. It imports little, and nothing of the project.
"""

from __future__ import annotations

import os
import sys

_SOCKET = "WARM_STARTS"


def _stand_in(path: str) -> None:
    """Returns where nobody can be stood in for: then this process does the work itself."""
    import contextlib
    import json
    import signal
    import socket
    import struct

    numbers = [number for number in signal.valid_signals() if isinstance(number, signal.Signals)]
    ignored = {number for number in numbers if signal.getsignal(number) == signal.SIG_IGN}
    request = {
        "command": [sys.executable, *sys.orig_argv[1:]],
        "variables": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109
        "kept": [],
        "session": os.getsid(0) == os.getpid(),
        "tied": False,
        "ignored": [int(n) for n in ignored - {signal.SIGPIPE, signal.SIGXFSZ}],
        "parent": os.getpid(),
    }
    content = json.dumps(request).encode()
    line = socket.socket(socket.AF_UNIX)
    try:
        line.connect(path)
        socket.send_fds(line, [struct.pack(">I", len(content))], [0, 1, 2])
        line.sendall(content)
        answer = line.recv(4, socket.MSG_WAITALL)
    except OSError:
        answer = b""
    pid = struct.unpack(">i", answer)[0] if len(answer) == 4 else 0
    if not pid:
        line.close()
        return

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in set(numbers) - {*ignored, signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, pass_on)
    answer = line.recv(4, socket.MSG_WAITALL)
    status = struct.unpack(">i", answer)[0] if len(answer) == 4 else 1
    if status < 0:  # it was killed
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _is_plain_script() -> bool:
    """Without options of the interpreter, and with nothing open but the standard streams."""
    words = sys.orig_argv[1:]
    if not words or not words[0].endswith(".py"):
        return False
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
    return not any(number > 2 and os.path.exists(f"/proc/self/fd/{number}") for number in numbers)  # noqa: PTH110


if _SOCKET in os.environ and _is_plain_script():
    _stand_in(os.environ[_SOCKET])
