"""Every environment variable of Farandole: its name and its meaning, defined once.

No other file spells such a name. The table in docs/commands.md is generated from `VARIABLES`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

PREFIX: Final = "FARANDOLE_"


class Variable(NamedTuple):
    name: str
    meaning: str
    for_users: bool
    """False: launchers set it for the processes that they start."""


_defined: list[Variable] = []


def _user(name: str, meaning: str) -> str:
    _defined.append(Variable(PREFIX + name, meaning, True))
    return PREFIX + name


def _internal(name: str, meaning: str) -> str:
    _defined.append(Variable(PREFIX + name, meaning, False))
    return PREFIX + name


# The options of `farandole run`, for jobs that another launcher starts.
SYNC: Final = _user("SYNC", "The strategy, in the form that `--sync` takes.")
LAYOUT: Final = _user("LAYOUT", "The layout, in the form that `--layout` takes.")
NAME: Final = _user("NAME", "The name of the run's folder in the folder of all runs.")
RUNS: Final = _user("RUNS", "The folder of all runs.")
SEED: Final = _user("SEED", "The random seed. It takes precedence over `fd.init(seed=…)`.")
FALLBACK: Final = _user(
    "FALLBACK", "1: if the newest checkpoint is damaged, resume from the newest good one."
)
CHECKPOINT: Final = _user(
    "CHECKPOINT", "When to save automatically, in the form that `--checkpoint` takes."
)
CHOOSE: Final = _user(
    "CHOOSE", "Values for `run.choose`: what `--choose` takes, separated by spaces."
)
TRANSPORT: Final = _user(
    "TRANSPORT", "The transport that carries the bytes: auto, shm, c10d or mpi."
)
PRETEND_HOSTS: Final = _user(
    "PRETEND_HOSTS", "Pretended hosts: their number, or the number of workers on each, as in `3,1`."
)
CHECK_FINITE: Final = _user(
    "CHECK_FINITE", "0: do not stop when a gradient or a parameter is NaN or infinite. 1: stop."
)
TRACE: Final = _user("TRACE", "The file to write a trace to. Rank 0 merges the parts of all ranks.")
SERVERS: Final = _user("SERVERS", "The address of the parameter servers' registrar.")
SERVER_KEY: Final = _user("SERVER_KEY", "The file with the parameter servers' key.")
GRACE: Final = _user(
    "GRACE", "How long a worker may take to save and exit after SIGTERM, in seconds."
)
FORK: Final = _user(
    "FORK",
    "0: start every worker as a fresh process. Do not fork it from one that has imported torch.",
)
LINK: Final = _user(
    "LINK",
    "The cost of the network between hosts, as seconds per message and seconds per byte, "
    "separated by a comma. It replaces the measurement.",
)
TOKEN: Final = _user(
    "TOKEN", "The secret that a job's processes show to its store when they are on several hosts."
)
TOKEN_FILE: Final = _user("TOKEN_FILE", "A private file that contains the token.")

# Set by launchers for the processes that they start.
JOB: Final = _internal("JOB", "The identifier of the job that a process belongs to.")
LAUNCHER: Final = _internal("LAUNCHER", "The process id of the launcher.")
SCRIPT: Final = _internal("SCRIPT", "The script, as it was given on the command line.")
STORE: Final = _internal("STORE", "The launcher's store: `unix:PORT:PATH` or `tcp:PORT:HOST`.")
ACTIVITY: Final = _internal("ACTIVITY", "The file in which a worker records its progress.")
STARTED: Final = _internal(
    "STARTED", "When a race started a lane, by the system's monotonic clock."
)
TRIAL: Final = _internal(
    "TRIAL", "The folder of a trial, through which it asks `farandole tune` for its choices."
)
UNTIL_EPOCH: Final = _internal(
    "UNTIL_EPOCH", "After how many epochs `run.epochs` ends this part of a member's training."
)
PERTURBED: Final = _internal(
    "PERTURBED", "1: the optimizer's settings are the script's own, not those of the checkpoint."
)
TRACE_PARTS: Final = _internal(
    "TRACE_PARTS", "The folder in which each rank writes its part of a trace, for the launcher."
)
BENCH_DATA: Final = _internal(
    "BENCH_DATA",
    "What `farandole bench data` measures: batches, batches before, and the file for the figures.",
)
ATTEMPT: Final = _internal(
    "ATTEMPT",
    "Which start of a job this is, from 0, where the launcher starts all workers again after a "
    "failure.",
)
ELASTIC_WORKER: Final = _internal(
    "ELASTIC_WORKER",
    "The number of a worker of an elastic job. Its rank may change; its number does not.",
)
ELASTIC_GENERATION: Final = _internal(
    "ELASTIC_GENERATION", "The generation of an elastic job that a worker joins first."
)
ELASTIC_STATE: Final = _internal(
    "ELASTIC_STATE", "Whether a worker of an elastic job has state to keep."
)
ELASTIC_MOST: Final = _internal(
    "ELASTIC_MOST",
    "The largest number of workers of an elastic job whose script calls `fd.init()`.",
)
FORKS: Final = _internal(
    "FORKS", "The fork server of a launcher that was forked itself: a descriptor and a process id."
)
SIMULATED_LINK: Final = _internal(
    "SIMULATED_LINK", "The link between pretended hosts, in the form that `--link` takes."
)
SIMULATED_LINK_FILE: Final = _internal(
    "SIMULATED_LINK_FILE", "The file in which the workers record when each simulated link is free."
)
PER_GPU: Final = _internal(
    "PER_GPU",
    "The number of workers that share a GPU. Worker r of a host has GPU r divided by it, rounded "
    "down.",
)
GPU_TRIAL: Final = _internal(
    "GPU_TRIAL",
    "The file in which rank 0 writes how fast it trains, in a trial of `--per-gpu auto`.",
)
PRELOAD: Final = _internal(
    "PRELOAD", "Modules that a fork server imports beside torch, separated by commas."
)
RESERVED: Final = _internal("RESERVED", "Space for the variables of a forked process.")
EMULATED_HOST: Final = _internal("EMULATED_HOST", "The number of this emulated host.")
EMULATED_HOSTS: Final = _internal("EMULATED_HOSTS", "The number of emulated hosts.")
EMULATED_ADDRESSES: Final = _internal(
    "EMULATED_ADDRESSES", "The addresses of the emulated hosts, separated by commas."
)
HOROVOD_RANK_OWNER: Final = _internal(
    "HOROVOD_RANK_OWNER", "The process that holds the rank of the other variables, under `hvd`."
)
HOROVOD_TASK: Final = _internal(
    "HOROVOD_TASK", "The function that a worker of `horovod.run()` is importing."
)

VARIABLES: Final = tuple(_defined)
