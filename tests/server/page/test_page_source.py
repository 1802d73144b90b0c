"""The page's source: modules that are served as they are, a policy that allows nothing else, types that fit."""

import hashlib
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
from live import Live

WEB = Path(str(files("rest_local.server").joinpath("web")))
SCRIPTS = sorted(WEB.glob("*.js"))
VENDORED = {  # the file of the package @highlightjs/cdn-assets 11.12.0, es/highlight.min.js
    "highlight.js": "1ed8fc5256b738b8875b74e4d3f0754f60d6411fb034d618dfbc4e6e6c9999d7",
}


def test_every_file_is_served_as_it_is(hello: Live) -> None:
    assert hello.get("/").content == (WEB / "page.html").read_bytes()
    for path in (*SCRIPTS, WEB / "page.css"):
        found = hello.get(f"/page/{path.name}")
        kind = "text/css" if path.suffix == ".css" else "text/javascript"
        assert found.headers["content-type"] == f"{kind}; charset=utf-8"
        assert found.headers["x-content-type-options"] == "nosniff"
        assert found.content == path.read_bytes()
    for other in ("types.d.ts", "highlight.LICENSE", "no.js", "..%2fpage.py", "%2e%2e%2fpage.py", "/etc/passwd"):
        assert hello.get(f"/page/{other}").status_code == 404, other


def test_the_page_loads_one_module_and_one_style_of_this_server(hello: Live) -> None:
    text = hello.get("/").text
    assert re.findall("<script.*", text) == ['<script type="module" src="page/page.js"></script>']
    assert re.findall(r'(?:src|href)="((?!data:|#).*?)"', text) == ["page/page.css", "page/page.js"]
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=", text), "the policy refuses them"
    for path in SCRIPTS:
        imports = re.findall(r"^(?:import|export) .*from \"(.*)\";$", path.read_text("utf-8"), re.MULTILINE)
        assert {each.removeprefix("./") for each in imports} <= {each.name for each in SCRIPTS}, path.name


def test_the_policy_allows_only_files_of_this_server(hello: Live) -> None:
    for name in ("/", "/page/page.js", "/page/page.css"):
        found = hello.get(name).headers["content-security-policy"]
        policy = dict(part.split(" ", 1) for part in found.split("; "))
        assert policy.pop("require-trusted-types-for") == "'script'"
        assert policy.pop("img-src") == "data:"
        own = {each for each, value in policy.items() if value == "'self'"}
        assert own == {"script-src", "style-src", "connect-src"}
        assert {value for each, value in policy.items() if each not in own} == {"'none'"}
        assert policy.keys() >= {"default-src", "trusted-types", "base-uri", "form-action", "frame-ancestors"}


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
        assert text.startswith("// "), path.name
        for wrong in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert wrong not in text, f"{path.name}: {wrong}"


def test_a_page_that_has_not_changed_is_not_sent_again(hello: Live) -> None:
    tag = hello.get("/").headers["etag"]
    again = hello.get("/", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert hello.get("/", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_scripts_parse() -> None:
    for path in SCRIPTS:
        command, text = ["node", "--input-type=module", "--check"], path.read_text("utf-8")
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, (path.name, done.stderr)


def test_the_check_of_types_says_in_one_line_that_it_is_skipped(tmp_path: Path) -> None:
    """Neither node nor npm is on the path."""
    tool = shutil.which("dirname")
    assert tool is not None
    (tmp_path / "dirname").symlink_to(tool)
    script = Path(__file__).parents[3] / "scripts/page_types"
    done = subprocess.run(
        [script], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "The types of the page are not checked: node is not installed.\n"
