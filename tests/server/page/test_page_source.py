"""The page's source: one document with its files in place, a policy that names each of them, scripts that parse."""

import base64
import hashlib
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
from live import Live

from rest_local.server.page import document

WEB = Path(str(files("rest_local.server").joinpath("web")))
SCRIPTS = sorted(WEB.glob("*.js"))
VENDORED = {  # the file of the package @highlightjs/cdn-assets 11.12.0, highlight.min.js
    "highlight.js": "8ab71eb09c51f501e5e25157d9cff100e46cc29bcbfc744d0b746d451fca7f53",
}


def test_every_file_is_in_the_document() -> None:
    text = document().decode()
    written = text.replace(r"\x3c", "<")
    assert SCRIPTS
    assert "</style" not in "".join(path.read_text("utf-8") for path in WEB.glob("*.css"))
    for path in (*SCRIPTS, *WEB.glob("*.css")):
        source = path.read_text("utf-8").replace("\r\n", "\n")
        assert source.replace(r"\x3c", "<") in written, path.name
    bodies = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    assert len(bodies) == len(SCRIPTS)
    assert not re.search("<(!--|/?script)", "".join(bodies)), "nothing that a parser of HTML would see in a script"
    assert not re.search(r'(?:src|href)="(?!data:|#)', text), "it loads nothing"


def test_the_policy_names_every_script_and_style(hello: Live) -> None:
    found = hello.get("/")
    assert found.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in found.headers["content-security-policy"].split("; "))
    assert "unsafe" not in str(policy)
    assert policy["default-src"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["trusted-types"] == "'none'"
    for tag in ("script", "style"):
        inline = re.findall(rf"<{tag}>(.*?)</{tag}>", found.text, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline]
        assert policy[f"{tag}-src"].split() == [f"'sha256-{value}'" for value in hashes]
    assert not re.search(r"\sstyle=|\son[a-z]+=", found.text), "the policy refuses them"


def test_libraries_are_unchanged_and_have_their_licence() -> None:
    for name, digest in VENDORED.items():
        content = (WEB / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest, name
        licence = (WEB / name).with_suffix(".LICENSE").read_text("utf-8")
        assert licence.startswith("BSD 3-Clause License\n\nCopyright (c) 2006, Ivan Sagalaev.")


def test_no_script_turns_text_into_markup_or_code() -> None:
    own = [path for path in SCRIPTS if path.name not in VENDORED]
    uses = {call for path in own for call in re.findall(r"\bhljs\.(\w+)", path.read_text("utf-8"))}
    assert uses == {"configure", "getLanguage", "highlight", "highlightAuto"}, "the others of the library write markup"
    for path in own:
        text = path.read_text("utf-8")
        assert text.startswith('"use strict";\n// '), path.name
        for wrong in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert wrong not in text, f"{path.name}: {wrong}"


def test_a_page_that_has_not_changed_is_not_sent_again(hello: Live) -> None:
    tag = hello.get("/").headers["etag"]
    again = hello.get("/", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert hello.get("/", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_scripts_parse() -> None:
    code = """for (const path of process.argv.slice(1))
      new (require("vm").Script)(require("fs").readFileSync(path, "utf8"), { filename: path })"""
    command = ["node", "-e", code, *(str(path) for path in SCRIPTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
