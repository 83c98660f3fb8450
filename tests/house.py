"""The rooms of the package, from the lowest floor to the highest, and what each is for.

The one place in which their order stands: a room imports those of lower floors only. The test of
the imports and the table in `docs/architecture.md` are made from it.
"""

from __future__ import annotations

FLOORS: tuple[dict[str, str], ...] = (
    {
        "errors": "the exceptions that users meet",
        "environment": "every environment variable, with its meaning",
    },
    {
        "options": "the text form of strategies and layouts",
        "topology": "which rank is on which host",
        "network_link": "the rate and the delay of a link between hosts",
        "registry": "names under which strategies, schedules and transports are found",
        "files": "files that are written whole or not at all",
        "urls": "files behind URLs, through fsspec",
        "serialization": "trees of tensors and plain values as bytes, without pickle",
        "system": "processes and folders of this host",
        "models": "networks, as sequences of blocks",
        "optim": "optimizers and recipes for large batches",
    },
    {
        "schedule": "who does what when, as data: all-reduces, pipelines; checkers, cost. No torch",
        "trace": "spans, their recorder, one clock for all ranks, Chrome's file",
    },
    {
        "comm": "how bytes travel: groups, transports, codecs, messages between two ranks",
        "report": "metrics, ranking, plots, the page of a race",
    },
    {
        "server": "parameter servers: client, node, registrar, protocol",
        "layout": "where one replica lives: partition, pipeline, tiles, shares, self-check",
        "data": "each rank's share of the samples, resumable",
    },
    {
        "sync": "how replicas stay in step: the strategies",
        "worker": "what runs in a worker before and beside the script: joining, failing, forking",
    },
    {
        "train": "where layout, sync and data meet: run, trainer, checkpoints",
        "launch": "starting workers and supervising them: policies and backends",
    },
    {
        "race": "the same script under several schemes",
        "tune": "many trials of one script, and the best choices",
        "bench": "communication and synthetic training, measured",
        "doctor": "what works on this machine",
        "emulate": "hosts as network namespaces, with links of a given rate",
        "horovod": "Horovod's interface, on the rooms below",
        "jax": "JAX's arrays and optimizers, on the rooms below",
        "keras": "Keras 3 models on any backend, on the rooms below",
        "learn": "estimators whose fit is a map over chunks of rows, and a sum",
    },
    {
        "watch": "the page of a run, a race or a study while it runs, served on loopback",
    },
    {
        "cray": "the Cray plugin's vocabulary, for PyTorch and Keras",
        "testing": "for users' tests: ranks as threads, conformance suites",
        "cli": "the commands; they parse and call",
    },
    {"__main__": "`python -m farandole`"},
)
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}


def table() -> str:
    """As it stands in the documentation, the highest floor first."""
    lines = ["| floor | room | what it is for |", "|---|---|---|"]
    for height in range(len(FLOORS) - 1, -1, -1):
        for at, (room, purpose) in enumerate(FLOORS[height].items()):
            lines.append(f"| {height if not at else ''} | `{room}` | {purpose} |")
    return "\n".join(lines)
