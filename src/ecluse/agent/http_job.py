"""The program of job type http: makes the call that it reads from stdin, writes status and body of the answer to
stdout. Exit code 0: the status is 2xx. It is a process, so that a call that hangs is stopped like every other job."""

import http.client
import json
import shutil
import sys
from urllib.parse import urlsplit

SILENT_SECONDS = 60


def main() -> int:
    call = json.load(sys.stdin)
    parts, body, headers = urlsplit(call["url"]), call["body"], call["headers"]
    if body is not None and not isinstance(body, str):
        body, headers = json.dumps(body), {"Content-Type": "application/json", **headers}
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection = kind(str(parts.hostname), parts.port, timeout=SILENT_SECONDS)
        connection.request(call["method"], target, None if body is None else body.encode(), headers)
        answer = connection.getresponse()
        print(answer.status, answer.reason, flush=True)
        shutil.copyfileobj(answer, sys.stdout.buffer)
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"the call failed: {error or type(error).__name__}", flush=True)
        return 1
    return 0 if 200 <= answer.status < 300 else 1
