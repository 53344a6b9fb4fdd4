"""Simulate fleets of replicas: the requests, the replicas, the choice among them, and the figures."""
