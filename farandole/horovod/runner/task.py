"""What a worker of `horovod.run()` runs: `python -m farandole.horovod.runner.task FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from farandole.horovod.runner.call import Call, write_result
from farandole.system.orphans import end_with_launcher
from farandole.worker.failure import record_uncaught


def perform(folder: Path) -> None:
    """Calls the function that the folder names, and writes its result there."""
    call = Call.read(folder)
    func = call.function.find()
    result = func(*call.args, **call.kwargs)
    write_result(folder, os.environ["RANK"], result, func.__name__)


if __name__ == "__main__":
    record_uncaught()
    end_with_launcher(os.environ)
    perform(Path(sys.argv[1]))
