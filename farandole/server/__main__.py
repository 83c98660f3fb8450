"""One parameter server as a process: what a `Cluster` starts."""

from __future__ import annotations

import argparse
import gc
import signal
import sys
from pathlib import Path

from farandole.errors import FarandoleError
from farandole.server.node.service import Service
from farandole.server.protocol.process import keep_freed_memory, limit_connections, limit_threads
from farandole.server.protocol.seal import read_key


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m farandole.server")
    parser.add_argument("registrar", help="its address, such as tcp://127.0.0.1:43210")
    parser.add_argument("key_file", type=Path)
    parser.add_argument("--bind", default="tcp://127.0.0.1:*")
    parser.add_argument("--functions", action="append", default=[], metavar="MODULE")
    parser.add_argument("--mark", default="", help="by which the registrar's owner knows it again")
    said = parser.parse_args()
    sys.path.insert(0, str(Path.cwd()))  # rules of the user's own lie beside their script
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher
    limit_threads()
    limit_connections()
    keep_freed_memory()
    try:
        service = Service(
            said.registrar,
            read_key(said.key_file),
            bind=said.bind,
            functions=said.functions,
            mark=said.mark,
        )
        gc.freeze()  # else all of torch is looked through once more at the end, for half a second
        service.run()
    except FarandoleError as error:
        sys.exit(f"farandole: parameter server: {error}")


if __name__ == "__main__":
    main()
