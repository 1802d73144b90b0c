"""Many clients at once with the real engine: all are served, none fails, and every slot is freed."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

from live import Live, becomes_idle

ROUNDS = 4


def test_eight_clients_are_all_served(demo: Live) -> None:
    """Twice as many clients as slots. benchmarks/server.py has a form of 60 s with times."""
    finished: list[tuple[int, str]] = []
    wrong: list[Any] = []
    ready = threading.Barrier(8)  # a busy machine may take longer to start a thread than others to be answered

    def ask(number: int) -> None:
        with demo.client() as client:
            client.get("/health")  # connects
            ready.wait(60)
            for turn in range(ROUNDS):
                text = f"def function_{number}_{turn}(value):\n"
                body = {"prompt": text, "n_predict": 24, "temperature": 0.5, "ignore_eos": True}
                answer = client.post("/completion", json=body)
                if answer.status_code != 200 or answer.json()["tokens_predicted"] != 24:
                    wrong.append(answer.text)
                finished.append((number, text))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert wrong == []
    assert len(finished) == 8 * ROUNDS
    last_first = max(next(i for i, (number, _) in enumerate(finished) if number == client) for client in range(8))
    assert last_first < 8 * (ROUNDS - 1), "the first answer of each client comes before the last round is over"
    becomes_idle(demo)


def test_fifty_disconnects_at_once_free_every_slot(demo: Live) -> None:
    prompt = "\n".join(f"value_{number} = {number}" for number in range(150))  # most of them leave in prefill
    data = json.dumps({"prompt": prompt, "n_predict": 500, "stream": True}).encode()
    head = (
        f"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    )
    connections = [socket.create_connection(("127.0.0.1", demo.port), timeout=60) for _ in range(50)]
    for connection in connections:
        connection.sendall(head.encode() + b"\r\n\r\n" + data)
    for connection in connections:
        connection.close()
    becomes_idle(demo)
    assert demo.post("/completion", {"prompt": "x", "n_predict": 2}).status_code == 200
    service = demo.serving.state.service
    assert service is not None
    assert (service.running, service.waiting) == (0, 0)
