"""ds_io: what it measures, what it writes, what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from deepspeed_ops.op_builder.errors import UsageError

from deepspeed_ops import ds_io, fio, io_sweep
from deepspeed_ops.io_sweep import Measured, Setting, Sweep

SMALL = [
    "--size",
    "8M",
    "--block-size",
    "1M,4M",
    "--queue-depth",
    "2,8",
    "--threads",
    "1",
    "--repeats",
    "2",
    "--no-fio",
]


def test_a_sweep_ends_in_settings_that_aio_handle_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: a tool whose result must be typed over by hand, or that leaves its file behind."""
    out, picture = tmp_path / "best.json", tmp_path / "plot.png"
    assert ds_io.main([str(tmp_path), *SMALL, "--backend", "all", "--json", str(out), "--png", str(picture)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    from deepspeed.ops.op_builder import AsyncIOBuilder

    aio = found["aio"]
    handle = (
        AsyncIOBuilder()
        .load()
        .aio_handle(
            aio["block_size"],
            aio["queue_depth"],
            aio["single_submit"],
            aio["overlap_events"],
            aio["intra_op_parallelism"],
        )
    )
    assert handle.get_block_size() == aio["block_size"]
    working = [name for name, (works, _) in io_sweep.backends().items() if works]
    assert len(found["measured"]) == 2 * 2 * len(working) * 2
    assert all(row["gbps"] > 0 and len(row["repeats_gbps"]) == 2 for row in found["measured"])
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.json", "plot.png"]
    said = capsys.readouterr().out
    assert "best:" in said and "CPU s/GB" in said


def test_beside_fio(tmp_path: Path) -> None:
    """Fault: a yardstick of another engine, depth or block, or one that is quietly absent."""
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    names = [n for n, (works, _) in io_sweep.backends().items() if works]
    found = io_sweep.run(Sweep(tmp_path, 8 << 20, [1 << 20], [1, 4], [2], names, [True, False], 2, True))
    for one in found:
        equal = one.direct and (one.setting.backend != "threads" or one.setting.queue_depth == 1)
        assert len(one.fio_gbps) == (2 if equal else 0) and (one.of_fio is not None) == equal
    for name, engine in (("io_uring", "io_uring"), ("libaio", "libaio"), ("threads", "psync")):
        argv = fio.command(Path("fio"), Path("f"), True, 8 << 20, 1 << 20, 4, 2, name)
        wanted = {f"--ioengine={engine}", "--iodepth=4", "--bs=1048576", "--numjobs=2", "--direct=1", "--rw=write"}
        assert wanted <= set(argv) and "--size=4194304" in argv


def test_fio_that_fails_says_so(tmp_path: Path) -> None:
    """Fault: a peer of zero, against which everything looks fast."""
    false = tmp_path / "fio"
    false.write_text("#!/bin/sh\necho broken >&2\nexit 3\n", encoding="utf-8")
    false.chmod(0o755)
    with pytest.raises(fio.FioFailed, match="broken"):
        fio.run(fio.command(false, tmp_path / "f", False, 1 << 20, 4096, 1, 1, "libaio"))
    with pytest.raises(fio.FioFailed):
        fio.run([str(tmp_path / "absent"), "--rw=read"])


def test_what_cannot_be_measured_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fault: half an hour of measuring that ends in an error."""
    assert ds_io.main([str(tmp_path / "absent"), *SMALL]) == UsageError.exit_code
    assert ds_io.main([str(tmp_path), *SMALL, "--backend", "libaoi"]) == UsageError.exit_code
    assert ds_io.main([str(tmp_path), "--size", "1000000G", "--no-fio"]) == UsageError.exit_code
    assert ds_io.main([str(tmp_path), "--size", "5M", "--block-size", "4M", "--no-fio"]) == UsageError.exit_code
    said = capsys.readouterr().err
    assert said.count("error: ") == 4 and "libaoi" in said and "free" in said
    for bad in (["--size", "much"], ["--queue-depth", "0"], ["--only", "both"]):
        with pytest.raises(SystemExit):
            ds_io.main([str(tmp_path), *bad])
    assert not list(tmp_path.iterdir())


def test_the_best_is_the_fastest_and_of_equals_the_cheapest() -> None:
    """Fault: a queue depth of 4096 because it was 0.1 % faster once."""
    slow, fast, costly = (Setting(1 << 20, depth, 1, "libaio") for depth in (1, 8, 128))
    rows = [
        Measured(s, write, [rate], cost)
        for s, rate, cost in ((slow, 1.0, 0.1), (fast, 2.0, 0.2), (costly, 2.01, 0.9))
        for write in (True, False)
    ]
    assert io_sweep.best(rows) == fast
    assert io_sweep.best(rows[:2]) == slow


def test_sizes() -> None:
    """Fault: 1M read as a million."""
    assert [ds_io.parse_size(t) for t in ("4096", "128K", "1M", "2GiB", "1 mb")] == [
        4096,
        131072,
        1 << 20,
        2 << 30,
        1 << 20,
    ]
    assert [ds_io.size_text(n) for n in (131072, 8 << 20, 3 << 30, 1000)] == ["128K", "8M", "3G", "1000"]
