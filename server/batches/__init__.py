"""Batches: files of requests that run while the server has nothing else to do."""
