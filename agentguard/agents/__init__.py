"""Coding agents: how each is pointed at the proxy, and what its run cost."""
