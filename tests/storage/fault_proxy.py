"""A proxy before the S3 server that does what networks and servers do at their worst, when a test asks for it.

It passes bytes on as they are, so a signature holds. Offsets count the bytes of one connection.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

METHODS = (b"GET ", b"HEAD ", b"PUT ", b"POST ", b"DELETE ")  # a client sends a head apart from the body
CONTINUE = b"HTTP/1.1 100 "  # the answer to a head whose body waits


class FaultProxy:
    """Faults are switched on by setting attributes; `times` is how many connections have the fault (None: all)."""

    def __init__(self, port: int):
        self.upstream = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.bytes_up = self.bytes_down = 0
        self.open: list[socket.socket] = []
        self.heal()
        threading.Thread(target=self._accept, daemon=True).start()

    def heal(self) -> None:
        self.refuses = False
        self.answer: bytes | None = None  # instead of the server's
        self.delay_seconds = 0.0  # before each piece
        self.cut_up_at: int | None = None
        self.flip_up_at: int | None = None
        self.flip_down_at: int | None = None
        self.times: int | None = None
        self.lose_answer_to: int | None = None  # which of the requests from now on, from 1: it is done all the same
        self.requests = 0

    def drop(self) -> None:
        """End the connections that are open, so that the next request meets what is switched on now."""
        while self.open:
            with suppress(OSError):
                self.open.pop().shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            if self.refuses:
                return
            if self.answer is not None:
                client.recv(1 << 16)
                client.sendall(self.answer)
                return
            with socket.create_connection(("127.0.0.1", self.upstream)) as server:
                self.open.append(client)
                losing = threading.Event()
                up = threading.Thread(target=self._pump, args=(client, server, "up", losing), daemon=True)
                up.start()
                self._pump(server, client, "down", losing)
                up.join()

    def _pump(self, source: socket.socket, target: socket.socket, way: str, losing: threading.Event) -> None:
        passed = 0
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                time.sleep(self.delay_seconds)
                piece = self._flipped(piece, passed, self.flip_up_at if way == "up" else self.flip_down_at)
                if way == "up" and self._is_due(self.cut_up_at, passed, len(piece)):
                    break
                if way == "up" and piece.startswith(METHODS):
                    self.requests += 1
                    if self.requests == self.lose_answer_to:
                        losing.set()
                if way == "down" and losing.is_set() and not piece.startswith(CONTINUE):
                    break
                target.sendall(piece)
                passed += len(piece)
                setattr(self, f"bytes_{way}", getattr(self, f"bytes_{way}") + len(piece))
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _flipped(self, piece: bytes, passed: int, at: int | None) -> bytes:
        if not self._is_due(at, passed, len(piece)):
            return piece
        assert at is not None
        place = max(at - passed, 0)
        return piece[:place] + bytes([piece[place] ^ 1]) + piece[place + 1 :]

    def _is_due(self, at: int | None, passed: int, length: int) -> bool:
        """Whether the fault's offset is in this piece, and the fault is not used up."""
        if at is None or not passed <= at < passed + length or self.times == 0:
            return False
        if self.times is not None:
            self.times -= 1
        return True


def answering(status: str, code: str) -> bytes:
    """An answer of S3 with an error."""
    return answer_of(
        status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>as the test asked</Message></Error>"
    )


def answer_of(status: str, body: str) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\nConnection: close"
    return f"{head}\r\n\r\n{body}".encode()
