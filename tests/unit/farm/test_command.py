"""Guards against bad input that ends in a traceback, a silent nothing, or half a result."""

from __future__ import annotations

import errno
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from farm_tool import command, images, parts, records

from op_builder import store as store_room
from op_builder.cells import cells, find_cell
from op_builder.errors import CompilerMissing, EngineMissing, ImageFailed, StoreError, UsageError
from op_builder.store import Store
from tests.toys import device_manifest, put
from tests.unit.farm.conftest import Runs, programs


def test_an_unknown_cell_is_named_with_its_nearest(ci_farm: Runs) -> None:
    """Fault: a mistyped cell builds nothing and exits 0."""
    code, out, err = ci_farm("build", "cu121-sm68")
    assert code == 2 and not out and "cu121-sm68" in err and "fix: ci/farm build cu" in err


def test_an_impossible_cell_says_since_when(ci_farm: Runs) -> None:
    """Fault: sm_120 by CUDA 12.1 fails in the compiler, minutes later."""
    code, _, err = ci_farm("build", "cu121-sm120")
    assert code == 2 and "since CUDA 12.8" in err and "sm120" in err.splitlines()[-1]


@pytest.mark.parametrize("arguments", [("build",), ("build", "--ship")])
def test_nothing_asked_for_is_an_error(ci_farm: Runs, arguments: tuple[str, ...]) -> None:
    """Fault: exit code 0 for a build of nothing."""
    code, _, err = ci_farm(*arguments)
    assert code == 2 and "fix: " in err


def test_no_engine_is_said_and_parts_need_none(ci_farm: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: 'docker: command not found' in the middle of a log."""
    monkeypatch.setenv("PATH", programs(tmp_path / "bin").partition(":")[0])
    code, _, err = ci_farm("build", "cpu")
    assert code == EngineMissing.exit_code and "docker is not on PATH; podman is not on PATH" in err
    assert "--parts-only" in err


def test_a_daemon_that_does_not_run_is_told_from_no_engine(
    ci_farm: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the user installs docker again, which is there."""
    said = "echo 'Cannot connect to the Docker daemon at unix:///var/run/docker.sock.' >&2; exit 1"
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", docker=said))
    monkeypatch.setattr("shutil.which", lambda name, path=None: "/bin/docker" if name == "docker" else None)
    code, _, err = ci_farm("--engine", "docker", "build", "cpu")
    assert code == EngineMissing.exit_code and "daemon of the container engine does not run" in err
    assert "Cannot connect" in err and "ci/farm engine start" in err


def test_an_unknown_engine_is_refused(ci_farm: Runs) -> None:
    """Fault: `--engine dokcer` is taken as no engine at all."""
    code, _, err = ci_farm("--engine", "dokcer", "build", "cpu")
    assert code == 2 and "known: docker, podman" in err


DOCKER = """
echo "$@" >> {log}
case "$*" in
  "version --format"*|"buildx version") exit 0 ;;
  *"image inspect"*) exit {base} ;;
  "pull "*) echo "dial tcp: lookup registry: no such host" >&2; exit 1 ;;
  "buildx build"*) echo "#9 [runtime 3/7] RUN pip install"; echo "write /x: no space left on device" >&2; exit 1 ;;
esac
exit 0
"""


def docker_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base_is_here: bool) -> Path:
    """A docker that answers from a script; the log of what it was asked."""
    log = tmp_path / "asked"
    script = DOCKER.format(log=log, base=0 if base_is_here else 1)
    monkeypatch.setenv("PATH", programs(tmp_path / "bin", docker=script))
    monkeypatch.setattr(parts, "build_set", lambda place, wants, with_host: ([], []))
    return log


def test_a_full_disk_in_mid_build_tags_nothing(
    ci_farm: Runs, farm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: an image without torch under the tag of a good one."""
    log = docker_says(tmp_path, monkeypatch, base_is_here=True)
    monkeypatch.setattr(images, "torch_wheels", lambda *_: tmp_path)
    code, _, err = ci_farm("--engine", "docker", "build", "cpu")
    asked = log.read_text(encoding="utf-8")
    assert code == StoreError.exit_code and "the disk is full" in err and "no space left on device" in err
    assert "buildx build" in asked and "\ntag " not in asked and " --tag " not in asked and " -t " not in asked
    assert records.read(command.Farm(farm), "cpu") == pytest.approx(None) or "image" not in (
        records.read(command.Farm(farm), "cpu") or {}
    )


def test_a_missing_base_image_says_how_to_make_one(
    ci_farm: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a registry's error for a machine that reaches none."""
    docker_says(tmp_path, monkeypatch, base_is_here=False)
    code, _, err = ci_farm("--engine", "docker", "build", "cpu")
    assert code == EngineMissing.exit_code and "cannot be pulled" in err and "ci/farm engine base" in err
    assert "no such host" in err


def test_too_little_disk_is_said_before_the_work(tmp_path: Path) -> None:
    """Fault: an hour of building that could not have fitted."""
    with pytest.raises(StoreError, match="GB free, and this needs about"):
        parts.refuse_little_space(tmp_path / "not" / "there", 1e9)


def test_the_size_gate_names_what_grew() -> None:
    """Fault: images grow and nobody notices."""
    cell = find_cell("cpu")
    images.check_sizes(cell, {"base": 1, "python": 1, "torch": 1, "ours": 1_000_000})
    with pytest.raises(ImageFailed, match="ours has 61") as err:
        images.check_sizes(cell, {"base": 1, "python": 1, "torch": 1, "ours": 61_000_000})
    assert "at most 60 MB" in err.value.why and "torch" in err.value.why
    with pytest.raises(ImageFailed, match="cpu has"):
        images.check_sizes(cell, {"base": 1, "python": 1, "torch": 2_000_000_000, "ours": 1})


def test_the_ledger_tells_layers_apart() -> None:
    """Fault: the size of ours includes torch's."""
    layers = [
        ("", 100), ("RUN apt-get install; useradd --uid 1000", 30), ("RUN pip install --find-links /wheels torch", 800),
        ("RUN pip install /wheel/*.whl", 20), ("COPY /parts /opt/ds/share/deepspeed-ops/", 5), ("USER 1000", 0),
    ]  # fmt: skip
    assert images.ledger_of(layers) == {"base": 100, "python": 30, "torch": 800, "ours": 25}


def test_plan_lists_every_cell_for_machines(ci_farm: Runs) -> None:
    """Fault: CI builds another set of cells than the matrix names."""
    code, out, _ = ci_farm("plan", "--json")
    rows = json.loads(out)["cells"]
    assert code == 0 and [row["cell"] for row in rows] == [cell.name for cell in cells()]
    assert all(row["changed"] and row["status"] == "never built" and row["in_store"] == 0 for row in rows)
    one = next(row for row in rows if row["cell"] == "cu121-sm86")
    assert {p["compiler"] for p in one["parts"]} >= {"nvrtc 12.1"} and one["args"]["CUDA"] == "12.1"
    code, out, _ = ci_farm("plan", "--images", "--names")
    assert code == 0 and json.loads(out) == [cell.name for cell in cells() if cell.tags]
    assert len(json.loads(out)) <= 256, "one matrix of CI has at most 256 jobs"


def test_list_shows_every_cell(ci_farm: Runs) -> None:
    """Fault: a table that leaves cells out."""
    code, out, _ = ci_farm("list")
    assert code == 0 and [line.split()[0] for line in out.splitlines()[1:]] == [cell.name for cell in cells()]


def test_cells_of_one_release_and_arch_share_their_parts(ci_farm: Runs) -> None:
    """Fault: the same code compiled once per torch; or a part of another release taken for this one's."""
    rows = {row["cell"]: row for row in json.loads(ci_farm("plan", "--json")[1])["cells"]}

    def keys(name: str) -> set[str]:
        return {p["key"] for p in rows[name]["parts"] if p["variant"].startswith("sm")}

    assert keys("cu121-sm86") == keys("cu121-torch2.5-sm86") != keys("cu124-sm86")
    assert not keys("cu121-sm86") & keys("cu121-sm80")
    assert rows["cu121-sm86"]["digest"] != rows["cu121-torch2.5-sm86"]["digest"]


def test_a_folder_of_other_things_is_not_replaced(tmp_path: Path) -> None:
    """Fault: `--out .` deletes the user's work."""
    part = put(Store(tmp_path / "store"), device_manifest())
    out = tmp_path / "out"
    (out / "thesis").mkdir(parents=True)
    (out / "thesis" / "final.tex").write_text("years of work", encoding="utf-8")
    with pytest.raises(UsageError, match="holds more than parts"):
        parts.export([part], out)
    assert (out / "thesis" / "final.tex").is_file()


def test_an_export_is_exact_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: parts of an earlier export stay; or a full disk leaves half a folder that a wheel then takes."""
    store, out = Store(tmp_path / "store"), tmp_path / "out"
    old, new = put(store, device_manifest("sm80")), put(store, device_manifest("sm90"))
    parts.export([old], out)
    parts.export([new], out)
    assert [p.name for p in (out / "toy").iterdir()] == [new.path.parent.name]

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copytree", full)
    with pytest.raises(StoreError, match="is full"):
        parts.export([old], out)
    assert [p.name for p in (out / "toy").iterdir()] == [new.path.parent.name]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "store"]


def test_a_release_that_cannot_be_had_stops_the_build(
    ci_farm: Runs, farm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: another release's compiler takes over, and the cell is not what its name says."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    code, _, err = ci_farm("build", "cu121-sm86", "--parts-only", "--no-host")
    assert code == CompilerMissing.exit_code and "could not be installed" in err
    assert not list((farm / "store").glob("fused_adam/*")) and not list((farm / "compilers").glob("*nvrtc*"))


def test_an_engine_says_full_disk_and_other_failures_apart() -> None:
    """Fault: 'exit code 1' for everything."""
    from farm_tool.engines import Answer, failure

    assert isinstance(failure("x", Answer(1, "a\nError: No space left on device (os error 28)\nb")), StoreError)
    other = failure("x", Answer(1, "#1 ok\n#2 ERROR: process did not complete: exit code: 2\n#3 canceled"))
    assert isinstance(other, ImageFailed) and "did not complete" in other.why


def test_a_build_that_hangs_on_a_full_disk_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: apt waits for ever where its disk is full, and the farm with it."""
    from farm_tool.engines import failure, full_disk, run

    hangs = [sys.executable, "-c", "import time; print('began', flush=True); time.sleep(120)"]
    reasons = iter(["", "no space left on device: /x is full"])
    start, told = time.monotonic(), []
    answer = run(hangs, {}, told.append, lambda: next(reasons))
    assert answer.code != 0 and told == ["began"] and time.monotonic() - start < 60
    error = failure("x", answer)
    assert isinstance(error, StoreError) and "/x is full" in error.why
    reason = full_disk(tmp_path)
    assert [reason() for _ in range(6)] == [""] * 6
    monkeypatch.setattr("farm_tool.engines.os.statvfs", lambda folder: SimpleNamespace(f_bfree=1, f_frsize=4096))
    assert [bool(reason()) for _ in range(6)] == [False] * 4 + [True] * 2


def test_a_base_is_refused_where_its_temporary_folder_is_full(farm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the apt of mmdebstrap waits on a full disk as that of an image does."""
    place = parts.Workplace(command.Farm(farm), command.settings_of({}, None, None), say=print)
    monkeypatch.setattr("farm_tool.parts.shutil.disk_usage", lambda folder: SimpleNamespace(free=10**8))
    with pytest.raises(StoreError, match=r"0\.1 GB free"):
        images.make_base(None, place)  # type: ignore[arg-type]  # never asked


def test_records_that_are_broken_count_as_none(farm: Path) -> None:
    """Fault: one half-written file and `list` is a traceback."""
    place = command.Farm(farm)
    records.write(place, "cpu", {"digest": "d"})
    assert records.read(place, "cpu") == {"digest": "d"}
    (farm / "records" / "cpu.json").write_text('{"digest"', encoding="utf-8")
    assert records.read(place, "cpu") is None
    assert store_room.ORIGINS  # the store's room is the one the farm keeps parts in


def test_podman_does_not_get_the_settings_of_docker(tmp_path: Path) -> None:
    """Fault: podman ends because the folder of a private dockerd's client holds no config.json."""
    from farm_tool.engines import find_engine

    env = {"PATH": programs(tmp_path / "bin", podman="exit 0", docker="exit 0"), "DOCKER_CONFIG": str(tmp_path)}
    assert "DOCKER_CONFIG" not in find_engine("podman", env).env
    assert find_engine("docker", env).env["DOCKER_CONFIG"] == str(tmp_path)
