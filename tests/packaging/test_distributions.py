"""One tree, three distributions: what each wheel is called, holds and requires."""

from __future__ import annotations

import email
import zipfile
from pathlib import Path

import pytest
from builds import build, install, make_venv, names, run
from deepspeed_ops.op_builder.errors import SettingError

from deepspeed_ops import distributions


def metadata(wheel: Path) -> email.message.Message:
    """METADATA of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (file,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(file))


@pytest.fixture(scope="module")
def wheels(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels of the work alone and of the names alone."""
    return {
        name: build(checkout, tmp_path_factory.mktemp(name), "--wheel", DS_DISTRIBUTION=name)[0][0]
        for name in ("deepspeed-ops", "deepspeed-names")
    }


def test_the_two_halves_are_the_whole(plain_wheel: Path, wheels: dict[str, Path]) -> None:
    """Fault: a module that is in both halves (uninstalling one breaks the other) or in none."""
    work, face = set(names(wheels["deepspeed-ops"])), set(names(wheels["deepspeed-names"]))
    assert not work & face
    assert work | face == set(names(plain_wheel)) - {"deepspeed/git_version_info_installed.py"}
    assert {n.partition("/")[0] for n in work} == {"deepspeed_ops"}


def test_what_they_require(plain_wheel: Path, wheels: dict[str, Path]) -> None:
    """Fault: names of one version beside the work of another; a command line that two distributions own."""
    whole, work, face = (metadata(w) for w in (plain_wheel, wheels["deepspeed-ops"], wheels["deepspeed-names"]))
    assert (whole["Name"], work["Name"], face["Name"]) == ("deepspeed", "deepspeed-ops", "deepspeed")
    assert face.get_all("Requires-Dist") == [f"deepspeed-ops=={work['Version']}"]
    assert work.get_all("Requires-Dist") == whole.get_all("Requires-Dist")
    with zipfile.ZipFile(wheels["deepspeed-names"]) as archive:
        assert not [n for n in archive.namelist() if n.endswith("entry_points.txt")]


def test_both_halves_beside_each_other_work(wheels: dict[str, Path], tmp_path: Path) -> None:
    """Fault: a face that only finds the work where one wheel installed both."""
    venv = make_venv(tmp_path / "venv")
    install(venv, *wheels.values())
    code = "import deepspeed, deepspeed_ops; from deepspeed.ops.op_builder import CPUAdamBuilder; print('both')"
    assert run(venv.python, "-c", code, cwd=tmp_path).stdout == "both\n"
    assert "cpu_adam" in run(venv.python.parent / "ds_report", cwd=tmp_path, check=False).stdout


def test_an_unknown_one_is_an_error_with_the_nearest_spelling(checkout: Path) -> None:
    """Fault: a misspelt variable that silently makes another wheel."""
    with pytest.raises(SettingError, match="DS_DISTRIBUTION=deepspeed-ops"):
        distributions.asked({"DS_DISTRIBUTION": "deepspeed_ops"})
    assert distributions.asked({"DS_DISTRIBUTION": ""}) == distributions.WHOLE
