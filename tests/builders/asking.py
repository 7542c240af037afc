"""Ask the policy at an agent's address, without a client library."""

from __future__ import annotations

import json
import urllib.error
import urllib.request


def ask(base_url, messages, *, retry=None, route="/chat/completions", **more):
    """The message that the policy answers, or (status, what is said) if it refuses. `retry`: as OpenAI's client."""
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    headers = {"Content-Type": "application/json"}
    if retry is not None:
        headers["X-Stainless-Retry-Count"] = str(retry)
    request = urllib.request.Request(base_url + route, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]
    return text if more.get("stream") else json.loads(text)["choices"][0]["message"]


def user(text):
    return {"role": "user", "content": text}
