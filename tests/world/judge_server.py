"""A server of OpenAI's chat completions API, in a thread; tests supply the replies of its language model."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JudgeServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, answer, models=("judge-8b",), key=None):
        """`answer(text)` returns a reply, or a status with response headers."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.models, self.key = answer, models, key
        self.requests = []
        """Bodies of the requests, in order of arrival."""

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"  # one connection per request, so tests leave none open

    def do_GET(self):
        self._send(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in self.server.models]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        reply = self.server.answer(body["messages"][-1]["content"])
        if isinstance(reply, tuple):
            status, headers = reply
            self._send(status, {"error": {"message": f"status {status}"}}, headers)
            return
        text, reason = (reply[4:], "length") if reply.startswith("CUT:") else (reply, "stop")
        choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": text}}
        fields = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge-8b"}
        self._send(200, {**fields, "choices": [choice]})

    def _send(self, status, body, headers=None):
        if self.server.key is not None and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            status, body = 401, {"error": {"message": "no such key"}}
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(data), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        """Log nothing."""


@contextmanager
def judge_server(answer, **options):
    server = JudgeServer(answer, **options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
