"""Where the workers of a job go: lists of hosts, host files and schedulers become a `Topology`."""
