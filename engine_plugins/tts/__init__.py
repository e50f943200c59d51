"""Test-Time Speculation: the draft model learns from every verification while the request runs (arXiv 2605.09329).

    worker ── frames (ZMQ) ──► trainer process ── weights (shared memory) ──┐
      ▲                            │ notices (pipe)                         │
      └── collective RPC ── control task in the API server ◄────────────────┘

`capture` and `serving` run in the worker, `trainer` (with `rounds`, `layout`, `loss`, `twin` and `judge`) in a process of its own,
`control` in vLLM's API server. `settings` and `wire` are what they share.
"""
