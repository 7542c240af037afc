"""Worker processes for code that is untrusted or cannot share a process: rewards, environments, programs."""
