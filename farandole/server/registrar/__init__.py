"""Membership of a cluster of servers: who is alive, and who holds which range."""
