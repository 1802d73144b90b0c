"""The Python of the README runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rest_local.paths import demo_model

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_examples_run_with_the_demo_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REST_LOCAL_DATASTORES", str(tmp_path / "home"))
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("def main():\n    print('hello')\n" * 9)
    build_and_generate, many = EXAMPLES
    first = build_and_generate.replace("model.gguf", str(demo_model())).replace(
        "~/src/myproject", str(tmp_path / "src")
    )
    exec(compile(first.replace("max_tokens=200", "max_tokens=20"), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("1 files, ")
    assert "tokens per forward pass" in printed
    second = "from rest_local import Engine\ntexts = ['import os', 'def f(']\n" + many
    second = second.replace("model.gguf", str(demo_model())).replace("n_ctx=8192", "n_ctx=256")
    exec(compile(second.replace("max_tokens=100", "max_tokens=5"), "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()
