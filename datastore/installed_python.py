"""A datastore of the running interpreter's standard library, or of its installed packages.

python datastore/installed_python.py [--site-packages] [-m MODEL] [-o NAME] [--replace]
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path

from rest_local import Model, build_datastore
from rest_local.errors import RestLocalError
from rest_local.paths import demo_model
from rest_local.retrieval import Built

TESTS = ("test/", "tests/", "testing/", "idle_test/")
PACKAGES = ("site-packages/", "dist-packages/")


def build(folder: Path, model: Path, name: str, exclude: tuple[str, ...] = (), replace: bool = False) -> Built:
    """Index the Python files below `folder` in the vocabulary of `model`."""
    with Model.open(model, vocab_only=True) as opened:
        return build_datastore(
            name,
            [folder],
            vocabulary=opened.vocabulary,
            include=["*.py"],
            exclude=[*TESTS, *exclude],
            recipe={"model": str(model.absolute())},
            replace=replace,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site-packages", action="store_true", help="the installed packages, not the standard library")
    parser.add_argument("-m", "--model", type=Path, default=demo_model(), help="GGUF whose vocabulary is used")
    parser.add_argument("--replace", action="store_true", help="replace what exists for the model's vocabulary")
    parser.add_argument("-o", "--output", help="name or path; default: standard-library or site-packages")
    args = parser.parse_args()
    paths = sysconfig.get_paths()
    if args.site_packages:
        built = build(Path(paths["purelib"]), args.model, args.output or "site-packages", (), args.replace)
    else:
        built = build(Path(paths["stdlib"]), args.model, args.output or "standard-library", PACKAGES, args.replace)
    print(f"{built.path}: {built.tokens:,} tokens of {built.documents:,} files; skipped: {built.skipped.summary()}")


if __name__ == "__main__":
    try:
        main()
    except RestLocalError as error:
        sys.exit(f"error: {error}")
