"""Downloads from a stand-in for the hub: what is chosen, resumed and compared, and what each failure says."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hub_server import COMMIT, TOKEN, HubServer, serving

from rest_local.catalog import hub as hub_module
from rest_local.catalog.hub import Hub, pull_model
from rest_local.catalog.stores import stored_models
from rest_local.errors import DownloadFailed, HubError

REPO = "user/tiny-GGUF"


def test_a_quantization_is_downloaded_and_found_again(hub: Hub, hub_server: HubServer) -> None:
    path = pull_model(f"{REPO}:q8_0", hub=hub)
    assert path.read_bytes() == hub_server.repos[REPO]["tiny-Q8_0.gguf"]
    assert path.name == "tiny-Q8_0.gguf"
    assert path.parent.name == COMMIT
    assert path.resolve().name == hub_server.sha256(REPO, "tiny-Q8_0.gguf")
    assert [(model.name, model.path) for model in stored_models() if model.store == "hub"] == [(f"{REPO}:Q8_0", path)]
    before = len(hub_server.transfers)
    assert pull_model(f"{REPO}:Q8_0", hub=hub) == path
    assert len(hub_server.transfers) == before, "what is there is not downloaded again"


def test_all_parts_are_downloaded_and_the_first_returned(hub: Hub, hub_server: HubServer) -> None:
    path = pull_model(f"{REPO}:F16", hub=hub)
    assert path.name == "tiny-f16-00001-of-00002.gguf"
    second = path.with_name("tiny-f16-00002-of-00002.gguf")
    assert second.read_bytes() == hub_server.repos[REPO][second.name]


def test_an_unknown_quantization_lists_what_there_is(hub: Hub) -> None:
    with pytest.raises(HubError) as caught:
        pull_model(f"{REPO}:Q5_K_M", hub=hub)
    assert str(caught.value) == (
        f"model {REPO}: has no Q5_K_M; it has Q4_K_M (14 kB), Q8_0 (30 kB), F16 (93 kB); name one, as in {REPO}:Q4_K_M"
    )


def test_a_lost_connection_is_made_anew_where_it_ended(hub: Hub, hub_server: HubServer) -> None:
    hub_server.break_at = [20_000]
    notices: list[str] = []
    repository = hub.repository(REPO)
    path = hub.download(repository, repository.choose("Q8_0")[0], notice=notices.append)
    assert path.read_bytes() == hub_server.repos[REPO]["tiny-Q8_0.gguf"]
    assert [request.range for request in hub_server.transfers] == ["", "bytes=20000-"]
    assert notices


def part_of(cache: Path) -> Path:
    (part,) = cache.rglob("*.incomplete")
    return part


@pytest.mark.parametrize("left", [b"GGUF something else" * 100, b"x" * 40_000])
def test_wrong_bytes_are_deleted(hub: Hub, hub_server: HubServer, left: bytes) -> None:
    """The hub sends them, or a part does not belong to the file."""
    hub_server.wrong = {"tiny-Q8_0.gguf"}
    with pytest.raises(
        DownloadFailed, match=r"tiny-Q8_0\.gguf has another sha256 than the hub names, so it was deleted"
    ):
        pull_model(f"{REPO}:Q8_0", hub=hub)
    assert not list(hub.cache.rglob("*.gguf"))
    assert not list(hub.cache.rglob("*.incomplete"))
    hub_server.wrong = set()
    blobs = hub.cache / "models--user--tiny-GGUF" / "blobs"
    (blobs / f"{hub_server.sha256(REPO, 'tiny-Q8_0.gguf')}.incomplete").write_bytes(left)
    if len(left) < 30_000:
        with pytest.raises(DownloadFailed, match="another sha256"):
            pull_model(f"{REPO}:Q8_0", hub=hub)
    path = pull_model(f"{REPO}:Q8_0", hub=hub)
    assert path.read_bytes() == hub_server.repos[REPO]["tiny-Q8_0.gguf"]


def refused(hub: Hub, name: str = REPO) -> str:
    with pytest.raises(HubError) as caught:
        pull_model(name, hub=hub)
    message = str(caught.value)
    assert message.startswith(f"model {name.partition(':')[0]}: ")
    assert message.isprintable()
    return message


def test_a_private_repository_needs_the_token(hub: Hub, hub_server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_server.private = {REPO}
    assert "not found" in refused(hub)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert pull_model(REPO, hub=hub).exists()
    assert [request.token for request in hub_server.requests if request.path.startswith("/api/")][-1] == TOKEN
    assert all(not request.token for request in hub_server.transfers), "the token goes to the hub alone"


def test_a_gated_repository_says_where_its_terms_are(hub: Hub, hub_server: HubServer) -> None:
    hub_server.gated = {REPO}
    assert f"(gated); accept them at {hub_server.url}/{REPO} and set HF_TOKEN" in refused(hub)


@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        (403, {}, "the token may not read it"),
        (429, {"Retry-After": "40"}, "refuses more requests for now; wait 40 s"),
        (429, {}, "wait some minutes"),
        (418, {}, "answered with status 418; try again later"),
        (503, {}, "answered with status 503; try again later"),
    ],
)
def test_a_refusal_names_the_way_out(
    hub: Hub, hub_server: HubServer, status: int, headers: dict[str, str], expected: str
) -> None:
    hub_server.refused, hub_server.refused_headers = status, headers
    assert expected in refused(hub)


def test_a_hub_that_is_not_there(tmp_path: Path) -> None:
    with serving() as server:
        url = server.url
    message = refused(Hub(endpoint=url, cache=tmp_path))
    assert f"{url} cannot be reached: " in message
    assert "check the network" in message


def test_a_disk_that_fills_up_keeps_what_there_is(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    write = hub_module._Counted.write

    def write_until_full(self: Any, data: bytes) -> int:
        if self.tell() > 10_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(hub_module._Counted, "write", write_until_full)
        with pytest.raises(DownloadFailed, match="the disk is full; make room and pull again, which goes on where it"):
            pull_model(f"{REPO}:Q8_0", hub=hub)
    assert part_of(hub.cache).stat().st_size > 10_000
    assert pull_model(f"{REPO}:Q8_0", hub=hub).exists()


DOWNLOAD = """
import sys
from pathlib import Path
from rest_local.catalog.hub import Hub, pull_model
print(pull_model(sys.argv[1], hub=Hub(sys.argv[2], Path(sys.argv[3]))))
"""


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_killed_download_goes_on_in_another_process(hub: Hub, hub_server: HubServer) -> None:
    """The library has its own pieces of 10 MB. While one process downloads, another one is refused."""
    data = bytes(range(256)) * 100_000  # 25.6 MB
    hub_server.repos[REPO]["tiny-Q6_K.gguf"] = data
    hub_server.break_at, hub_server.hold = [22_000_000], threading.Event()
    command = [sys.executable, "-c", DOWNLOAD, f"{REPO}:Q6_K", hub_server.url, str(hub.cache)]
    environment = {**os.environ, "HF_HUB_DISABLE_XET": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        whole = 2 * 10 * 1024 * 1024
        wait_for(lambda: any(part.stat().st_size >= whole for part in hub.cache.rglob("*.incomplete")), process)
        with pytest.raises(DownloadFailed, match="another process downloads tiny-Q6_K"):
            pull_model(f"{REPO}:Q6_K", hub=hub)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
        hub_server.hold.set()
    assert pull_model(f"{REPO}:Q6_K", hub=hub).read_bytes() == data
    assert hub_server.transfers[-1].range == f"bytes={whole}-"


def test_an_answer_that_is_no_hubs(hub: Hub, hub_server: HubServer) -> None:
    hub_server.refused, hub_server.refused_headers = 200, {"Content-Type": "text/html"}
    assert "does not answer as a hub does" in refused(hub)
