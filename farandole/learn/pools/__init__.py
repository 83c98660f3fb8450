"""Who computes the sums: threads, processes, ranks."""
