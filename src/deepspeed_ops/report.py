"""``ds_report``."""

from __future__ import annotations


def main() -> int:
    """Print the report."""
    return 0


def cli_main() -> None:
    """Entry point."""
    raise SystemExit(main())
