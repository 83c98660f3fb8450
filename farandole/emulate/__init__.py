"""An emulated cluster: hosts as network namespaces, joined by links with a bandwidth cap."""
