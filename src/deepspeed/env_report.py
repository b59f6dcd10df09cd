"""``python -m deepspeed.env_report``: the report of ``ds_report``, with the same options."""

from __future__ import annotations

from deepspeed_ops.report import cli_main, main

__all__ = ["cli_main", "main"]

if __name__ == "__main__":
    cli_main()
