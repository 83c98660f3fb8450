"""How throughput grows with the number of workers."""
