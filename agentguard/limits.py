"""Every size and time a stranger could stretch, in one place. Where each is held is said beside it; tests/security holds them all.

Bytes unless a name says otherwise. A limit is far above what agents send: the largest request seen from one was 1.1 MB.
"""

from __future__ import annotations

MAX_BODY = 16 << 20
"""A request's body, by its content-length before a byte is read and while it is read (gateway.app)."""
AHEAD = 64 << 20
"""Bodies of requests that wait for their turn, all together. What is not read hides that its client has hung up, since a hang-up
stands behind the body; that request has its place until `serving.queue_s` (gateway.ahead)."""
MAX_DEPTH = 64
"""Objects and lists within each other in a body; at some 1,000 Python's parsers and printers give up (gateway.app)."""
BODY_S = 60.0
"""A request's body must be here by then (gateway.app)."""
MAX_HEADERS_BYTES, MAX_HEADERS, MAX_URL = 64 << 10, 128, 8 << 10
"""Names and values of all headers, their number, and the URL; counted while they come in (gateway.protocol)."""
HEADERS_S = 30.0
"""From the first byte of a connection or request to the end of its headers (gateway.protocol)."""
MAX_ID_CHARACTERS = 256
"""Session, caller, agent and request ids; printable ASCII without spaces (identity, gateway.app)."""
MAX_KEY_CHARACTERS = 512
"""A bearer token; a longer one is not hashed (gateway.auth)."""
MAX_KEYS = 256
MAX_EVENT = 8 << 20
"""One server-sent event of an upstream; a first chunk may carry a whole prompt's ids (engines.openai_http)."""
MAX_REPLY = 32 << 20
"""An upstream's whole reply where it is no stream: token ids of a long prompt, metrics, an error's text (engines.openai_http)."""
MAX_RECIPE = 256 << 10
"""A recipe's file; YAML is read at some 100 kB a second (policy)."""
SHOWN_CHARACTERS = 120
"""Of a wrong value in an error message (errors)."""
