"""The engine in this process: slots, key-value cache, backends, sampling."""
