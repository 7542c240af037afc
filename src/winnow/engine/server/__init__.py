"""A vLLM server as an engine: requests and weights go to it over HTTP; its user starts and stops it."""
