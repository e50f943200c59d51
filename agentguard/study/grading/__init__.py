"""Is a reply right? Text answers (text.py), and code that is run in a sandbox (code.py, sandbox.py)."""
