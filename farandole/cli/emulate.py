"""`farandole emulate`: runs a command on every host of an emulated cluster."""

from __future__ import annotations

import sys

import click

from farandole.cli.options import PASS_ON
from farandole.errors import UserError


@click.command(context_settings=PASS_ON)
@click.option("--hosts", type=int, default=2, show_default=True, help="Number of hosts, 1 to 16.")
@click.option(
    "--rate",
    default="1gbit",
    show_default=True,
    metavar="RATE",
    help="Bandwidth of each host's link in each direction, in kbit, mbit or gbit per second.",
)
@click.option(
    "--delay",
    metavar="TIME",
    help="Delay from any host to any other, in us, ms or s, such as 1ms. It needs a kernel with "
    "netem. [none]",
)
@click.option("--network", metavar="CIDR", help="Addresses of the hosts. [198.18.0.0/24]")
@click.option(
    "--clean",
    is_flag=True,
    help="Remove what killed emulators have left behind, and run nothing.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def emulate(
    hosts: int,
    rate: str,
    delay: str | None,
    network: str | None,
    clean: bool,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND on every host of an emulated cluster. This needs root.

    Each host is a network namespace of this machine. Links with a bandwidth cap connect the hosts.
    In COMMAND, {host} stands for the number of the host (from 0), {hosts} for the number of hosts,
    and {master} for the address of host 0. If COMMAND fails on one host, the others are stopped and
    the exit code is that of the failed host.

    \b
      farandole emulate --hosts 2 --rate 1gbit -- \\
        torchrun --nnodes {hosts} --node-rank {host} --nproc-per-node 2 \\
                 --master-addr {master} --master-port 29500 train.py
    """
    from farandole.emulate.cluster import NETWORK, Cluster
    from farandole.emulate.run import clean_up, run_on_hosts

    if clean:
        if command:
            raise UserError(f"--clean runs nothing, so leave {command[0]!r} out, or --clean.")
        clean_up()
        return
    if not command:
        raise UserError("what shall the hosts run? Give a command after --, such as -- hostname.")
    sys.exit(run_on_hosts(Cluster(hosts, rate, delay, network or NETWORK), command))
