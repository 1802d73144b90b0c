"""Offline batches: files of requests in, files of answers out, on this machine or on several."""
