"""Stands in for SGLang's server: its addresses and answers, tokens 0, 1, 2 and so on, no model.

What it is sent goes to the file that ``STAND_IN_LOG`` names, a JSON line each; an update of weights
waits for the file that ``STAND_IN_GO`` names, and fails for version 13.
"""

import argparse
import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_running = threading.Event()
_version = ["0"]


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        del format, args

    def do_GET(self) -> None:
        self._say({"max_req_input_len": 250})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with Path(os.environ["STAND_IN_LOG"]).open("a") as log:
            log.write(json.dumps({"path": self.path, **body}) + "\n")
        if self.path == "/generate":
            self._generate(body)
        elif self.path == "/update_weights_from_disk":
            self._update(body)
        else:
            (_running.clear if self.path == "/pause_generation" else _running.set)()
            self._say({"status": "ok"})

    def _update(self, body: dict[str, Any]) -> None:
        while not Path(os.environ["STAND_IN_GO"]).exists():
            time.sleep(0.01)
        fails = body["weight_version"] == "13"
        if not fails:
            _version[0] = body["weight_version"]
        told = {"success": not fails, "message": "no room for it" if fails else "done"}
        self._say(told, status=400 if fails else 200)

    def _generate(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        most = body["sampling_params"]["max_new_tokens"]
        for token in range(most):
            _running.wait()
            is_last = token == most - 1
            meta = {
                "output_token_logprobs": [[-0.5, token, None]],
                "finish_reason": {"type": "length"} if is_last else None,
                "weight_version": _version[0],
            }
            event = {"output_ids": [token], "meta_info": meta}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
            time.sleep(0.002)
        self.wfile.write(b"data: [DONE]\n\n")

    def _say(self, told: dict[str, object], status: int = 200) -> None:
        text = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    _running.set()
    ThreadingHTTPServer(("127.0.0.1", parser.parse_known_args()[0].port), _Handler).serve_forever()
