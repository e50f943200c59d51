"""Which run of its task a session without an id is, agreed between the gateways of a store and over a restart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentguard.identity import Guesses, Identity
from agentguard.store.books import Books


class SharedGuesses:
    """Guesses, kept in the sessions' store where there is one. While it cannot be reached, this gateway goes by what it knows."""

    def __init__(self, books: Books, limit: int) -> None:
        self._books = books
        self._guesses = Guesses(limit)

    async def place(self, identity: Identity, body: Mapping[str, Any]) -> Identity:
        """The identity with its run's number; one that was not guessed as it is."""
        if not identity.guessed:
            return identity
        if text := await self._books.recall(str(identity)):
            self._guesses.learn(identity, text)
        placed = self._guesses.place(identity, body)
        await self._books.note(str(identity), self._guesses.told(identity))
        return placed

    async def refused(self, identity: Identity) -> None:
        """The latest request of this identity got an error instead of a reply."""
        if identity.guessed:
            self._guesses.refused(identity)
            await self._books.note(str(identity), self._guesses.told(identity))
