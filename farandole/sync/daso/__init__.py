"""DASO: asynchronous exchange between hosts, synchronous inside each."""
