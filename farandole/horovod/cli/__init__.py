"""`farandole horovodrun`: accepts every flag of Horovod's own command."""

from __future__ import annotations

from typing import Any

import click

from farandole.errors import UserError
from farandole.horovod.cli.flags import horovod_flags


@click.command(context_settings={"allow_interspersed_args": False})
@horovod_flags
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def horovodrun(command: tuple[str, ...], **flags: Any) -> None:
    """Start COMMAND on workers, with the flags of Horovod 0.28's horovodrun.

    In the workers, `import horovod.torch` imports Farandole's module. The script needs no change. A
    flag that has no effect is accepted with a message.

    \b
      farandole horovodrun -np 4 python train.py --epochs 10
      farandole horovodrun -np 4 -H here:2,there:2 python train.py
      farandole horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh \\
                           python train.py
    """
    from farandole.horovod.cli.build import show_build
    from farandole.horovod.cli.config import with_config_file
    from farandole.horovod.cli.start import start

    if flags["check_build"]:
        click.echo(show_build())
        return
    if not command:
        raise UserError("what shall the workers run? End with it: … -np 2 python train.py")
    start(with_config_file(flags), command)
