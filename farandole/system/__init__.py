"""Processes and folders of this host, as the operating system sees them."""
