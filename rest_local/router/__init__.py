"""The process that clients reach: it forwards requests to one process for each model, and keeps files and batches."""
