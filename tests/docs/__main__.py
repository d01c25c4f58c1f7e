"""``python3 -m tests.docs`` makes again every page and list that is made of the program or of measured figures."""

from __future__ import annotations

from tests.docs import commands, error_codes, figures, support
from tests.docs.schemas import file, page


def main() -> None:
    """Write all of them, and put error codes in order."""
    error_codes.PAGE.write_text(error_codes.in_order(error_codes.PAGE.read_text()))
    figures.PAGE.write_text(figures.page())
    support.MAIN_PAGE.write_text(support.with_canaries(support.MAIN_PAGE.read_text()))
    page.PAGE.write_text(page.page())
    file.FILE.write_text(file.text())
    commands.PAGE.write_text(commands.with_commands(commands.PAGE.read_text()))


if __name__ == "__main__":
    main()
