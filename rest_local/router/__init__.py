"""The server that clients reach: it loads models on demand, and forwards requests to those in other processes."""
