"""Faults on purpose: a table of them, the jobs they strike, and what is looked at afterwards.

    table      every drill as data: setting, role, action, phase, and the promise
    settings   how a job of each setting is started
    train      the training script of the jobs; `elastic` is the one for horovodrun
    hooks      how a script tells the harness where it is, and waits there
    targets    which processes a role means
    actions    what goes wrong
    prepare    what must be wrong before the job starts: disks, checkpoints, names, limits
    slot       where drills run one after another, and which processes are theirs
    place      where one drill runs
    weights    whether a job has ended with the right ones
    look       what is left afterwards
    run        one drill from its start to its verdict
    book       the table side by side, each verdict kept in a file
    report     the verdicts as text
    page       the page of the docs

`benchmarks/drills.py` is the command.
"""
