"""Several workers on each GPU of this host: which GPUs there are, their MPS daemon, and trials."""
