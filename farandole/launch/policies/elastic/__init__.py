"""Elastic jobs: workers fail, hosts come and go, and training goes on with those that are there."""
