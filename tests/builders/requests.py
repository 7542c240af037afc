"""Requests of agents, as their clients send them."""

from __future__ import annotations

import json
import urllib.request


def user(text):
    return {"role": "user", "content": text}


def ask(base_url, messages, model="policy", retry=None):
    """The whole answer to a request."""
    headers = {"Content-Type": "application/json"}
    if retry is not None:
        headers["X-Stainless-Retry-Count"] = retry
    body = json.dumps({"model": model, "messages": messages}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers), timeout=20) as r:
        return json.loads(r.read())


def text_of(answer):
    return answer["choices"][0]["message"]["content"]
