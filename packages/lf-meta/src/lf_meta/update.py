"""``loongforge update --model FILE``: give new weights to a server that runs."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from lf_meta.errors import MetaError


class UpdateError(MetaError):
    """The server is not there, or goes on with its old weights; the message says why."""


def update_server(model: Path, server: str, timeout_s: float = 600.0) -> dict[str, Any]:
    """Ask a server of ``loongforge infer --serve`` to go on with the weights in a file.

    Args:
        model: what ``lf-ckpt export RUN/ckpt --lfckpt FILE`` has written. The server reads it, by this path.
        server: its address, such as ``http://127.0.0.1:8642``.
        timeout_s: longest wait for the answer, which comes behind the exchange.

    Returns:
        ``step`` and ``weights`` that answer now, ``previous`` weights.

    Raises:
        UpdateError: no server, or it refused; nothing has changed then.
    """
    if not server.startswith(("http://", "https://")):
        raise UpdateError(f"--server {server}: an address such as http://127.0.0.1:8642")
    body = json.dumps({"model": str(model.absolute())}).encode()
    # never through a proxy of the environment: the path means something on the server's machine only
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        url = f"{server.rstrip('/')}/update"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with opener.open(request, timeout=timeout_s) as answer:
            found: dict[str, Any] = json.load(answer)
        if not all(key in found for key in ("step", "weights", "previous")):
            raise ValueError("its answer names no weights")
    except urllib.error.HTTPError as e:
        raise UpdateError(f"{server} goes on with its weights: {_reason(e)}") from e
    except (OSError, ValueError, TypeError, http.client.HTTPException) as e:
        why = getattr(e, "reason", e)
        raise UpdateError(f"{server} does not answer as `loongforge infer RUN --serve` does: {why}") from e
    return found


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
