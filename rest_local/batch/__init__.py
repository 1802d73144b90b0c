"""Offline batches: files of requests in, files of answers out, on one machine or several."""
