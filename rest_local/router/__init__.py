"""The process that clients reach: it starts one process for each model and forwards requests to them."""
