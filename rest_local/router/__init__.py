"""The process that clients reach: it loads models on demand, each in a process, and forwards requests to them."""
