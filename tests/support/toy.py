"""The toy model of the tests, of 15M parameters. It completes Python; its chat template serves to try the APIs."""

from pathlib import Path


def demo_model() -> Path:
    """Return its file, which is committed."""
    return Path(__file__).parents[2] / "models" / "demo.gguf"
