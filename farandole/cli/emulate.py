"""`farandole emulate`: run a command on every host of an emulated cluster."""

from __future__ import annotations

import sys

import click

from farandole.cli.options import PASS_ON
from farandole.errors import UserError


@click.command(context_settings=PASS_ON)
@click.option("--hosts", type=int, default=2, show_default=True, help="How many hosts, up to 16.")
@click.option(
    "--rate", default="1gbit", show_default=True, help="Of each host's link, in either direction."
)
@click.option("--delay", help="From any host to any other, such as 1ms; the kernel needs netem.")
@click.option("--network", help="The hosts' addresses. [198.18.0.0/24]")
@click.option("--clean", is_flag=True, help="Only remove what killed emulators have left.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def emulate(
    hosts: int,
    rate: str,
    delay: str | None,
    network: str | None,
    clean: bool,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND on every host of an emulated cluster: network namespaces of this machine, joined
    by links with a bandwidth cap. Needs root.

    {host}, {hosts} and {master} in COMMAND stand for the host's number, how many there are, and the
    address of host 0. The exit code is that of the first host to fail; the others are stopped then.

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
