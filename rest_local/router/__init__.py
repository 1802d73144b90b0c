"""The process that clients reach: it forwards calls to one process for each model, and keeps files and batches."""
