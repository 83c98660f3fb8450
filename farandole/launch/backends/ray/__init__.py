"""Nodes of a Ray cluster: Ray places an actor on each, which runs the agent of the node."""
