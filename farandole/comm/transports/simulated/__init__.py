"""A link in software between the pretended hosts of one machine."""
