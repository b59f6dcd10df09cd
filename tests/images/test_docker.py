"""The proof of the images, by a real dockerd: one definition, hardened, healthy, and nothing half done."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from farm_tool import dockerfile, images, pip_settings
from farm_tool.engines import Engine
from farm_tool.home import Farm
from farm_tool.own_engine import OwnDocker
from farm_tool.parts import Workplace

from op_builder.cells import find_cell
from op_builder.manifest import read_manifest
from op_builder.matrix import load
from tests.images.conftest import ROOT, Images

CELL = "cu121-sm86"


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every part by its place; each is verified against its manifest."""
    found = {}
    for path in sorted(folder.glob("*/*/*.json")):
        manifest = read_manifest(path)
        manifest.verify(path.parent / manifest.filename)
        found[path.relative_to(folder).as_posix()] = manifest.sha256
    return found


def test_the_dockerfile_is_clean() -> None:
    """Fault: what hadolint knows to go wrong."""
    program = shutil.which("hadolint") or str(Path(sys.executable).with_name("hadolint"))
    done = subprocess.run([program, str(ROOT / dockerfile.DOCKERFILE)], capture_output=True, encoding="utf-8")
    assert done.returncode == 0 and not done.stdout.strip(), done.stdout + done.stderr


def test_every_promise_of_the_image_is_kept(docker: Images, cpu: str) -> None:
    """Fault: root, a writable root file system needed, a missing op, a greeting that eats the exit code."""
    said = docker.ci_farm("test", "cpu")
    assert said.count("ok      cpu ") == 9 and "FAILED" not in said


def test_the_ledger_is_kept_and_within_its_limits(docker: Images, cpu: str) -> None:
    """Fault: the layer of ours grows beyond what was promised."""
    record = json.loads((docker.place.farm.records / "cpu.json").read_text(encoding="utf-8"))
    layers, most = record["layers"], load().image.most_mb
    assert 0 < layers["ours"] <= most["ours"] * 1e6 and 0 < sum(layers.values()) <= most["cpu"] * 1e6
    assert min(layers.values()) > 0, "every kind of layer was found"
    print("layers", {k: round(v / 1e6, 1) for k, v in layers.items()}, record["image_seconds"], "s")


def test_the_engine_itself_finds_it_healthy(docker: Images, cpu: str) -> None:
    """Fault: a HEALTHCHECK that cannot succeed in a hardened container."""
    name = docker.engine.ask("run", "-d", *images.HARDENED, "--health-interval", "2s", cpu, "sleep", "300")
    try:
        status, until = "", time.monotonic() + 120
        while status != "healthy" and time.monotonic() < until:
            time.sleep(1)
            status = docker.engine.ask("inspect", "--format", "{{.State.Health.Status}}", name)
        assert status == "healthy", docker.engine.ask("inspect", "--format", "{{json .State.Health}}", name)
    finally:
        docker.engine("rm", "-f", name)


def test_a_sick_image_is_found_unhealthy(docker: Images, cpu: str) -> None:
    """Fault: a health check that says ok whatever is there: here a part is gone and nothing may be compiled."""
    words = ("run", "--rm", "--user", "0", "-e", "DS_JIT=0", "--entrypoint", "sh", cpu, "-c")
    answer = docker.engine(
        *words, "rm -r /opt/ds/share/deepspeed-ops/cpu_adam && python -m deepspeed_ops.container health"
    )
    assert answer.code == 1 and "cpu_adam: " in answer.output and "cpu_lion: ok" in answer.output


def test_nothing_changed_is_seconds_and_the_same_image(docker: Images, cpu: str) -> None:
    """Fault: a rebuild of what is there."""
    before, start = docker.engine.inspect(cpu)["Id"], time.monotonic()
    assert "nothing to build" in docker.attempt("build")[1]
    said = docker.ci_farm("build", "cpu")
    seconds = time.monotonic() - start
    assert ", 0 built," in said and "ds:cpu: unchanged" in said and docker.engine.inspect(cpu)["Id"] == before
    print("nothing changed:", round(seconds, 1), "s")
    planned = docker.ci_farm("plan", "cpu", "--json")
    rows = json.loads(planned[planned.index("{") :])["cells"]
    assert rows[0]["status"] == "built" and not rows[0]["changed"]


def built_in_docker(docker: Images, out: Path, **given: str) -> None:
    """Parts of the compile stages, which are handed no store, as ``out/host`` and ``out/gpu``."""
    settings = pip_settings.read(docker.engine.env)
    conf = out.with_suffix(".conf")
    conf.write_text(settings.conf, encoding="utf-8")
    words = [
        "buildx",
        "build",
        "--progress",
        "plain",
        "--file",
        str(ROOT / dockerfile.DOCKERFILE),
        "--target",
        "export",
    ]
    words += ["--secret", f"id=pip_conf,src={conf}", "--output", f"type=local,dest={out}"]
    words += ["--secret", f"id=pip_ca,src={settings.ca}"] if settings.ca else []
    for name, value in given.items():
        words += ["--build-arg", f"{name}={value}"]
    docker.engine.ask(*words, str(ROOT))


def test_compiled_inside_they_are_the_farms_own_parts(docker: Images, cpu: str, tmp_path: Path) -> None:
    """Fault: an image built with nothing but Docker holds other code than the farm's; or compiling needs a network."""
    docker.ci_farm("build", CELL, "--out", str(tmp_path / "farm"))
    given = dockerfile.arguments(find_cell(CELL))
    kept = {k: given[k] for k in ("BASE", "FFI", "NVRTC", "GPU_PARTS")}
    built_in_docker(docker, tmp_path / "inside", **kept)
    host, gpu, own = (digests(tmp_path / name) for name in ("inside/host", "inside/gpu", "farm"))
    assert gpu and gpu.items() <= own.items(), "equal bytes under equal keys"
    assert host and set(host) | set(gpu) == set(own), "equal keys"


def test_bake_builds_the_cells_it_names(docker: Images, cpu: str, tmp_path: Path) -> None:
    """Fault: a bake file that prints and does not build."""
    bake = ["buildx", "bake", "-f", str(ROOT / "docker" / "docker-bake.hcl")]
    names = [find_cell(n).bake_target for n in ("cpu", CELL, "cu124-torch2.5-sm90")]
    shown = json.loads(re.sub(r"(?m)^#.*$", "", docker.engine.ask(*bake, "--print", *names)))["target"]
    for name in ("cpu", CELL, "cu124-torch2.5-sm90"):
        cell = find_cell(name)
        target = shown[cell.bake_target]
        assert target["tags"] == list(cell.tags) and target["labels"] == dockerfile.labels(cell)
        assert {k: v for k, v in target["args"].items() if v} == {"GPU_PARTS": "cpu", **dockerfile.arguments(cell)}
    settings = pip_settings.read(docker.engine.env)
    (tmp_path / "pip.conf").write_text(settings.conf, encoding="utf-8")
    secrets = f"cpu.secrets=id=pip_conf,src={tmp_path / 'pip.conf'}"
    also = ["--set", f"cpu.secrets=id=pip_ca,src={settings.ca}"] if settings.ca else []
    out = tmp_path / "baked"
    done = subprocess.run(
        ["docker", *bake, "--set", "cpu.target=export", "--set", f"cpu.output=type=local,dest={out}",
         "--set", secrets, *also, "cpu"],
        env=dict(docker.engine.env), cwd=ROOT, capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    docker.ci_farm("build", "cpu", "--out", str(tmp_path / "farm"))
    assert set(digests(out / "host")) == set(digests(tmp_path / "farm")), "the same keys"


def test_a_full_disk_in_mid_build_leaves_no_tag(
    docker: Images, small_disk: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: an image without its last layers under the tag of a good one. The engine's disk has 350 MB."""
    disk = small_disk(350)
    for name in ("usr", "config"):
        (disk / name).symlink_to(docker.place.farm.engine / name)
    daemon = OwnDocker(disk)
    daemon.start()
    try:
        engine = Engine("docker", daemon.env)
        images.make_base(engine, docker.place)
        small = Images(docker.place, engine)
        code, said = small.attempt("build", "cpu")
        assert code == 20 and "the disk is full" in said and "no space left on device" in said.lower()
        assert engine.ask("images", "--format", "{{.Repository}}:{{.Tag}}").split() == [load().image.base]
    finally:
        daemon.stop()


def test_parts_on_a_full_disk_leave_nothing_half_done(
    docker: Images, workplace: Workplace, small_disk: Callable[[int], Path]
) -> None:
    """Fault: half a part is a hit ever after."""
    disk = small_disk(1)
    farm = Farm(disk / "farm")
    farm.root.mkdir()
    farm.compilers.symlink_to(workplace.farm.compilers)
    filler = disk / "filler"
    filler.write_bytes(b"x" * 900_000)
    command = [sys.executable, str(ROOT / "ci" / "farm"), "--farm", str(farm.root), "--jobs", "1"]
    command += ["build", CELL, "--no-host", "--parts-only"]
    done = subprocess.run(command, env=dict(docker.engine.env), capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 20 and "is full" in done.stderr, done.stderr
    whole = digests(farm.store.root)
    filler.unlink()
    again = subprocess.run(command, env=dict(docker.engine.env), capture_output=True, encoding="utf-8", check=False)
    assert again.returncode == 0, again.stderr
    assert set(whole.items()) <= set(digests(farm.store.root).items()) and len(digests(farm.store.root)) == 4


def test_a_daemon_that_does_not_run_is_said(docker: Images, tmp_path: Path) -> None:
    """Fault: a dead socket, and the message of a library."""
    env = {**docker.engine.env, "DOCKER_HOST": f"unix://{tmp_path}/dead.sock"}
    code, said = docker.attempt("build", "cpu", env=env)
    assert code == 60 and "the daemon of the container engine does not run" in said and "engine start" in said


def test_a_missing_base_image_is_said(docker: Images, cpu: str) -> None:
    """Fault: a registry's error, on a machine that reaches none."""
    base = load().image.base
    docker.engine.ask("tag", base, "kept:base")
    docker.engine.ask("rmi", base)
    try:
        code, said = docker.attempt("build", "cpu", "--rebuild")
        assert code == 60 and f"base image {base} is not here" in said and "ci/farm engine base" in said
    finally:
        docker.engine.ask("tag", "kept:base", base)


def test_images_are_pushed_once(
    docker: Images, cpu: str, tmp_path: Path, debian: Callable[[Mapping[str, str]], None]
) -> None:
    """Fault: a registry that gets what it has; a name that is there when only half the image is. A local registry."""
    debian({"docker-registry": "docker-registry"})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    conf = {
        "version": "0.1",
        "storage": {"filesystem": {"rootdirectory": str(tmp_path)}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    (tmp_path / "registry.yml").write_text(json.dumps(conf), encoding="utf-8")
    registry = subprocess.Popen(
        ["docker-registry", "serve", str(tmp_path / "registry.yml")], stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        place = f"localhost:{port}/team"
        env = {**docker.engine.env, "FARM_REGISTRY": place}
        for _ in range(50):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        changed = ("plan", "cpu", "--images", "--changed", "--names")
        assert '["cpu"]' in docker.ci_farm(*changed, env=env)
        assert f"pushed {place}/ds:cpu-" in docker.ci_farm("push", "cpu", "--to", place)
        assert "the registry has this digest" in docker.ci_farm("push", "cpu", "--to", place)
        assert "[]" in docker.ci_farm(*changed, env=env)
    finally:
        registry.terminate()
        registry.wait(20)
