"""The monitor's dialogs: choose one of a few, or type a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from agentguard.tui.glyphs import say


class Choose(ModalScreen[str | None]):
    """A list to choose from; Escape chooses nothing."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel", id="dialog.cancel")]

    def __init__(self, title: str, options: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._title = title
        self._options = options

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(say(self._title), classes="question", markup=False)
            yield OptionList(*(Option(say(text), id=key) for key, text in self._options), markup=False)

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)


class Confirm(Choose):
    """Yes or no; the cursor starts on no, so that a hasty Enter does nothing."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss('yes')", "Yes", id="confirm.yes"),
        Binding("n", "dismiss(None)", "No", id="confirm.no"),
    ]

    def __init__(self, question: str, yes: str) -> None:
        super().__init__(question, [("no", "n  no, leave it"), ("yes", f"y  yes, {yes}")])


class Ask(ModalScreen[str | None]):
    """One line of text. ``check`` gives the reason why a text is not accepted, None when it is."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "Cancel", id="ask.cancel")]

    def __init__(self, question: str, value: str = "", check: Callable[[str], str | None] | None = None) -> None:
        super().__init__()
        self._question = question
        self._value = value
        self._check = check

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(say(self._question), classes="question", markup=False)
            yield Input(self._value, compact=True)
            yield Static("Enter accepts, Escape cancels", classes="hint", markup=False)

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        reason = self._check(event.value) if self._check is not None else None
        if reason is None:
            self.dismiss(event.value)
        else:
            self.query_one(".hint", Static).update(say(reason))
